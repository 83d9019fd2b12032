"""A GPT learns from sequences that are too long for one process: each is cut over the ranks (context parallel).

python examples/long_sequences.py                  4 ranks, which may take 64 MiB each in a training step
python examples/long_sequences.py --devices=1      is refused: one rank would take more

The model and the data are those of `gpt.py`; nothing in them knows that sequences are cut.
"""

from __future__ import annotations

import lightning as L
import rich
from gpt import GPT, StdlibText
from jsonargparse import auto_cli

from lightning_3d import ThreeDStrategy


def main(devices: int = 4, length: int = 2048, max_steps: int = 10, budget: float = 0.0625) -> None:
    """Train, and show the memory of the ranks and what moves between them.

    Args:
        devices: Number of ranks, which share each sequence.
        length: Bytes of text in a sequence.
        max_steps: Number of optimizer steps.
        budget: GiB that a rank may take.
    """
    strategy = ThreeDStrategy(context_parallel_size=devices, zero={"stage": 3}, activations={"budget": budget})
    trainer = L.Trainer(strategy=strategy, devices=devices, accelerator="auto", max_steps=max_steps, logger=False)
    L.seed_everything(1)
    trainer.fit(GPT(context=length), datamodule=StdlibText(length, batch_size=1))
    if trainer.is_global_zero:
        rich.print(strategy.plan, f"loss {float(trainer.callback_metrics['loss']):.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
