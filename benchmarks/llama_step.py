"""Tokens per second, model FLOPs utilisation and peak memory of a Llama by what is kept where, on one device.

    python -m benchmarks.llama_step                                     1.1 B parameters, for an accelerator of 80 GB
    python -m benchmarks.llama_step --compiled true
    python -m benchmarks.llama_step --width 128 --num_layers 2 --vocabulary 512 --batch 4 --length 128     for a CPU

A Llama of `transformers` with random weights in bf16-mixed, AdamW, with a plain Trainer and with this strategy.
``auto`` gets as budget the middle between the peaks of ``none`` and ``full``. Every mode trains for some steps of the
Trainer; the step is the median of those after the first, from one batch to the next, the device waited for. The FLOPs
of a token are 6 for each weight of a matrix product, and 6 x layers x length x width for causal attention (Chowdhery
et al. 2022, appendix B): what is computed again does not count. Those that the device could make are Lightning's
figures; on devices that it does not know there is no utilisation. The peak is what torch's allocator has handed out at
once, at most, from the second step on.
"""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from lightning.fabric.utilities.throughput import get_available_flops
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.data_parallel_step import Clock
from benchmarks.measured_memory import MeasuredPeak
from benchmarks.models import random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

WARM_UP, LARGE = 4, 1e4
GIB = 2**30
MODES: dict[str, dict[str, Any]] = {
    "activations offloaded": {"activations": {"recompute": "none", "offload": True}},
    "optimizer offloaded": {"zero": {"offload_optimizer": "cpu"}},
}
"""Settings of the strategy by what they are called in the table."""


class Llama(L.LightningModule):
    """A Llama with random weights; a batch is (tokens, targets)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**config, use_cache=False))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    @property
    def flops_of_token(self) -> float:
        """Of a forward and its backward, at one token of length; without attention."""
        in_products = sum(p.numel() for name, p in self.named_parameters() if p.dim() == 2 and "embed" not in name)
        return 6.0 * in_products


class WaitingClock(Clock):
    """Waits for the device at each batch, and has its allocator begin anew at the second."""

    def tick(self) -> None:
        """A batch has come."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            if self.num_batches == 1:
                torch.accelerator.reset_peak_memory_stats()
        super().tick()


def trained(
    strategy: ThreeDStrategy | str, model: Llama, batches: DataLoader[Any], precision: str
) -> tuple[float, int]:
    """Seconds of a step, and bytes at most, which a plain Trainer on CPUs does not know."""
    gc.collect()  # what the one before has left
    clock, measured = WaitingClock(WARM_UP), MeasuredPeak()
    has_budget = isinstance(strategy, ThreeDStrategy) and strategy.config.activations.plans_memory
    callbacks = (clock, *((measured,) if has_budget else ()))
    settings: dict[str, Any] = {"accelerator": "auto", "precision": precision}
    quiet_trainer(strategy, 1, len(batches), *callbacks, **settings).fit(deepcopy(model), batches)
    if torch.accelerator.is_available():
        return clock.seconds(), torch.accelerator.max_memory_allocated()
    return clock.seconds(), measured.peak


def recomputed(strategy: ThreeDStrategy | str) -> str:
    """How many blocks are recomputed, and how."""
    if isinstance(strategy, str):
        return ""
    modes = [block.recompute for block in strategy.plan.blocks if block.is_recomputed]
    return ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)) or "nothing"


def main(
    width: int = 2048,
    num_layers: int = 16,
    num_heads: int = 32,
    num_key_value_heads: int = 8,
    vocabulary: int = 32_768,
    batch: int = 4,
    length: int = 2048,
    steps: int = 8,
    precision: str = "bf16-mixed",
    compiled: bool = False,
) -> None:
    """Print the table.

    Args:
        width: Of the residual stream; the MLP has four times as many channels.
        batch: Samples of a step.
        length: Tokens of a sample.
        steps: Steps that count.
        compiled: Whether blocks are compiled.
    """
    config = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": length,
    }
    table = Table("strategy", "recomputed blocks", "ms", "of plain", "tokens / s", "MFU", "peak GiB")
    torch.manual_seed(0)
    model = Llama(config)
    peaks: dict[str, int] = {}
    first = 0.0
    for mode in ("plain", "none", "selective", "full", "auto", *MODES):
        budget = sum(peaks[m] for m in ("none", "full")) / 2 / GIB if mode == "auto" else LARGE
        settings = MODES.get(mode, {"activations": {"recompute": mode, "budget": budget}})
        strategy = "auto" if mode == "plain" else ThreeDStrategy(**settings, compile={"enabled": compiled})
        batches = random_tokens(WARM_UP + steps, batch, length, vocabulary)
        seconds, peaks[mode] = trained(strategy, model, batches, precision)
        first = first or seconds
        rate = batch * length / seconds
        dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        possible = get_available_flops(_device(), dtype)
        flops = model.flops_of_token + 6.0 * num_layers * length * width
        utilisation = "" if possible is None else f"{rate * flops / possible:.1%}"
        row = (
            f"{seconds * 1e3:.1f}",
            f"{seconds / first:.3f}",
            f"{rate:,.0f}",
            utilisation,
            f"{peaks[mode] / GIB:.2f}",
        )
        table.add_row(mode, recomputed(strategy), *row)
    num = sum(p.numel() for p in model.parameters())
    table.title = f"{num / 1e6:,.0f} M parameters, {batch} x {length} tokens, {precision}, {_device()}"
    Console(width=120).print(table)


def _device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
