"""A GPT-2 that was trained by Lightning's DeepSpeedStrategy; what was changed is marked by `# was:`.

python examples/from_deepspeed.py                       ds_config.json as it was: bf16, ZeRO 2, accumulation, clipping
python examples/from_deepspeed.py --pipeline_parallel_size 2    likewise, and its accumulation is in microbatches
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_3d import ThreeDStrategy  # was: from lightning.pytorch.strategies import DeepSpeedStrategy

CONFIG = Path(__file__).with_name("ds_config.json")


class LanguageModel(L.LightningModule):
    """A small GPT-2 with random weights; a batch is token ids (B, T) int64."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the next token."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the same of other sequences."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, which DeepSpeed built from its config."""  # was: nothing, as "optimizer" in the config says it
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)


def counting(num: int) -> Tensor:
    """Sequences such as 3, 5, 7, 9, modulo 64; (num, 32) int64."""
    first, step = torch.randint(64, (num, 1)), torch.randint(1, 4, (num, 1))
    return (first + step * torch.arange(32)) % 64


def main(devices: int = 2, max_steps: int = 60, pipeline_parallel_size: int = 1) -> None:
    """Train, and tell the loss before and after.

    Args:
        devices: Number of GPUs, or of processes where there are none.
        max_steps: Number of optimizer steps.
        pipeline_parallel_size: Number of pipeline stages.
    """
    L.seed_everything(1)
    # was: DeepSpeedStrategy(config="ds_config.json")
    strategy = ThreeDStrategy.from_deepspeed(
        CONFIG, leave_out=["optimizer"], pipeline_parallel_size=pipeline_parallel_size
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=max_steps,
        precision="bf16-true",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2 if pipeline_parallel_size == 1 else 1,
    )
    model = LanguageModel()
    batch_size = 8 if pipeline_parallel_size == 1 else 16  # of a stage's first call: two microbatches
    training, validation = (DataLoader(counting(num), batch_size=batch_size) for num in (4096, 256))
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, training)
    after = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        print(f"val_loss {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
