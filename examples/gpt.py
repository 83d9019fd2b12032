"""A byte-level GPT learns the Python standard library in pipeline 2 x data 2 x tensor 2.

python examples/gpt.py                                    8 processes on this machine
torchrun --nproc-per-node=8 examples/gpt.py --accelerator=gpu

Model and data are plain Lightning: nothing in them knows about parallelism, and nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import lightning as L
import rich
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDStrategy
from lightning_3d.run.report import report_table

# ------------------------------------------------------------------------------------------------------------ model


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position look at itself and at earlier ones."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (projection(x).view(heads).transpose(1, 2) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP."""
        x = x + self.attention(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class GPT(L.LightningModule):
    """Predicts the next byte; a batch is `(inputs, targets)`, both (B, T) int64."""

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 64,
        width: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
        lr: float = 2e-3,
        num_warmup_steps: int = 20,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.context = context
        self.lr = lr
        self.num_warmup_steps = num_warmup_steps
        self.optimizer = optimizer
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (B, T, vocabulary) from tokens (B, T)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy in nats per byte."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean cross entropy in nats per byte."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The given optimizer, or AdamW; its learning rate rises linearly over the first steps."""
        if self.optimizer is None:
            optimizer: Optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1, betas=(0.9, 0.95))
        else:
            optimizer = self.optimizer(self.parameters())
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.num_warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int, *, temperature: float = 0.7, seed: int = 0) -> str:
        """Continue the prompt by `length` bytes, drawn from the softmax of the logits over `temperature`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        text = torch.tensor(list(prompt.encode()), device=self.device)
        for _ in range(length):
            logits = self(text[None, -self.context :])[0, -1]
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            text = torch.cat([text, drawn])
        return bytes(text.tolist()).decode(errors="replace")


# ------------------------------------------------------------------------------------------------------------- data


class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of a text as `(inputs, targets)`, each (context,) int64, targets one byte ahead."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class StdlibText(L.LightningDataModule):
    """The `.py` sources of the running Python's standard library as bytes, split into train and validation by file."""

    SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})

    def __init__(self, context: int = 64, batch_size: int = 32, max_bytes: int = 4_000_000) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        """Read the files into memory, in an order and a split that only their relative paths decide."""
        train, validation = self.split_files()
        self.train_set = Chunks(b"".join(path.read_bytes() for path in train), self.context)
        self.validation_set = Chunks(b"".join(path.read_bytes() for path in validation), self.context)

    def split_files(self) -> tuple[list[Path], list[Path]]:
        """Choose files of about `max_bytes` together; one in ten is for validation."""
        root = Path(sysconfig.get_path("stdlib"))
        hashes = {path: zlib.crc32(path.relative_to(root).as_posix().encode()) for path in root.rglob("*.py")}
        files = [path for path in hashes if not self.SKIPPED & set(path.relative_to(root).parts)]
        chosen: list[Path] = []
        num_bytes = 0
        for path in sorted(files, key=lambda path: (hashes[path], path)):
            if num_bytes >= self.max_bytes:
                break
            chosen.append(path)
            num_bytes += path.stat().st_size
        train = [path for path in chosen if hashes[path] % 10]
        return train, [path for path in chosen if hashes[path] % 10 == 0]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled batches of `batch_size` pieces per replica."""
        order = torch.Generator().manual_seed(0)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches of `batch_size` pieces per replica, in order."""
        return DataLoader(self.validation_set, batch_size=self.batch_size, drop_last=True)


# -------------------------------------------------------------------------------------------------------------- main


class Results(L.Callback):
    """Prints the plan, what every rank holds, and a sample from the best checkpoint."""

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask all ranks for their shares; rank 0 prints."""
        assert isinstance(trainer.strategy, ThreeDStrategy)
        report, folder = trainer.strategy.report(), trainer.log_dir
        if not trainer.is_global_zero:
            return
        rich.print(trainer.strategy.plan, report_table(report))
        assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
        best = trainer.checkpoint_callback.best_model_path
        print(f"Every step's loss is in {folder}/metrics.csv. A sample from {best}:\n")
        print(GPT.load_from_checkpoint(best, map_location="cpu").generate("def ", 300))


def main(devices: int = 8, accelerator: str = "cpu", max_steps: int = 50, batch_size: int = 16) -> None:
    """Train; `Results` shows the plan and samples from the best checkpoint.

    Args:
        devices: Number of processes; a multiple of 4.
        accelerator: Lightning's name of the hardware.
        max_steps: Number of optimizer steps.
        batch_size: Pieces of text per replica and step.
    """
    strategy = ThreeDStrategy(
        pipeline_parallel_size=2,
        tensor_parallel_size=2,  # the other devices are replicas: 8 / (2 x 2) = 2
        zero={"stage": 1},
        pipeline={"num_microbatches": 2, "schedule": "1f1b"},
        start_method="fork",  # torch and Lightning are imported once, unless torchrun starts the processes
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator=accelerator,
        max_steps=max_steps,
        gradient_clip_val=1.0,
        val_check_interval=min(25, max_steps),
        limit_val_batches=4,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger("runs", name="gpt"),
        callbacks=[ModelCheckpoint(monitor="val_loss", filename="{step}-{val_loss:.3f}"), Results()],
        enable_model_summary=False,
    )
    L.seed_everything(1)
    model = GPT()
    trainer.fit(model, datamodule=StdlibText(model.context, batch_size))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
