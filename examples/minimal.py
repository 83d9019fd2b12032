"""A small transformer learns to count: two devices share the data, then the model itself.

python examples/minimal.py
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lightning_3d  # registers strategy="3d"


class Counter(L.LightningModule):
    """Predicts the next number of sequences such as 3, 5, 7, 9; nothing in it knows about parallelism."""

    def __init__(self, width=64, num_blocks=4):
        super().__init__()
        self.numbers = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 100)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=self.device)
        x = self.numbers(inputs)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    first, step = torch.randint(20, (2048, 1)), torch.randint(1, 6, (2048, 1))
    sequences = DataLoader(first + step * torch.arange(16), batch_size=16, shuffle=True)

    # Two GPUs, or two processes where there are none: data parallel with ZeRO stage 1.
    trainer = L.Trainer(strategy="3d", devices=2, max_epochs=1)
    trainer.fit(Counter(), sequences)
    checkpoint = trainer.checkpoint_callback.best_model_path

    # Any other layout goes on from there. Here each device has half of the blocks.
    pipeline = lightning_3d.ThreeDStrategy(pipeline_parallel_size=2)
    trainer = L.Trainer(strategy=pipeline, devices=2, max_epochs=2)
    trainer.fit(Counter(), sequences, ckpt_path=checkpoint)
