"""Fine-tunes a causal language model of transformers by LoRA, in two pipeline stages: 2 % of its weights are trained.

python examples/lora.py                        a small Llama with random weights
python examples/lora.py --model gpt2           a folder, or a name on the Hugging Face hub

LoRA is written out here in plain torch; models that peft has changed train in the same way.
"""

from __future__ import annotations

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_3d import ThreeDStrategy


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two narrow matrices, at first zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the product to what the layer gives."""
        output: Tensor = self.linear(x) + self.up(self.down(x))
        return output


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a model, and add LoRA to the projections of its attention."""
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name.endswith(("q_proj", "v_proj")):
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], LoRA(linear, rank))


class FineTuning(L.LightningModule):
    """A batch is token ids (B, T) int64."""

    def __init__(self, model: str | None, rank: int) -> None:
        super().__init__()
        if model:
            self.model = AutoModelForCausalLM.from_pretrained(model).train()
        else:
            small = LlamaConfig(
                vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
            )
            self.model = AutoModelForCausalLM.from_config(small)
        add_lora(self.model, rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the next token."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the same of other sequences."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def main(
    model: str | None = None, devices: int = 2, max_steps: int = 100, pipeline_parallel_size: int = 2, rank: int = 4
) -> None:
    """Train, and tell the loss before and after.

    Args:
        model: Folder or name of a pretrained model; none for a small one with random weights.
        devices: Number of GPUs, or of processes where there are none.
        max_steps: Number of optimizer steps.
        pipeline_parallel_size: Number of pipeline stages.
        rank: Width of the matrices of LoRA.
    """
    L.seed_everything(1)
    module = FineTuning(model, rank)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    share = trained / sum(p.numel() for p in module.parameters())
    strategy = ThreeDStrategy(pipeline_parallel_size=pipeline_parallel_size)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=max_steps)
    sequences = (torch.randint(8, (4096, 1)) + 3 * torch.arange(16)) % 64  # 2, 5, 8, 11, ...
    training, validation = DataLoader(sequences[256:], batch_size=16), DataLoader(sequences[:256], batch_size=16)
    before = trainer.validate(module, validation, verbose=False)[0]["val_loss"]
    trainer.fit(module, training)
    after = trainer.validate(module, validation, verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        print(f"trained {share:.1%} of the weights")
        print(f"val_loss {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
