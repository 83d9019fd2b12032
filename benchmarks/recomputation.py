"""Recomputed blocks: bytes that a block keeps for its backward, against theory, and the time of a step.

    python -m benchmarks.recomputation

The GPT of `benchmarks.models` in one process. The bytes of a block are what four blocks keep more than two, half of it.
In theory ``full`` keeps a block's input, B x T x D numbers, and ``selective`` also the results of q, k, v, attention
with its logsumexp, out, up (four times as wide) and down. Steps take turns in one process, by its CPU time. The bars:
bytes within 3 %; a step with ``full`` at most 1.36 of one without, with ``selective`` at most 1.12.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.budget_sweep import step_of
from benchmarks.models import Block
from benchmarks.turns import ratio_quartiles, take_turns
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.distributed.rng import Generators

Mode = Literal["none", "full", "selective"]

BATCH, LENGTH, WIDTH, HEADS, WARM_UP, TURNS = 8, 256, 256, 8, 2, 25
BARS = {"selective": 1.12, "full": 1.36}


class _Made(TorchDispatchMode):
    """Notes the memory that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._bytes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return output

    def kept(self, weights: Iterable[Tensor]) -> int:
        """Bytes that still are there, but for views of weights."""
        gc.collect()
        own = {StorageWeakRef(weight.untyped_storage()) for weight in weights}
        return sum(size for made, size in self._bytes.items() if made not in own and not made.expired())


def _kept(mode: Mode, num_blocks: int) -> int:
    blocks: list[Any] = [Block(WIDTH, HEADS) for _ in range(num_blocks)]
    made = _Made()
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with made:
        for i, block in enumerate(blocks):
            x = _run(block, mode, str(i))(x)
        return made.kept(weight for block in blocks for weight in block.parameters())


def _run(block: nn.Module, mode: Mode, fqn: str) -> Any:
    if mode == "none":
        return block
    recomputation = Recomputation(fqn, block, mode, Generators(torch.device("cpu")))
    recomputation(block, (torch.randn(1, 8, WIDTH, requires_grad=True),), {})  # the first call finds out
    return lambda x: recomputation(block, (x,), {})


def kept_table() -> Table:
    """Bytes of a block by mode."""
    activation = BATCH * LENGTH * WIDTH * 4
    theory = {"none": None, "full": activation, "selective": 11 * activation + BATCH * HEADS * LENGTH * 4}
    table = Table("recompute", "MiB kept per block", "in theory", "ratio", "bar")
    for mode, expected in theory.items():
        kept = (_kept(mode, 4) - _kept(mode, 2)) / 2  # type: ignore[arg-type]
        compared = ("", "", "") if expected is None else (f"{expected / 2**20:.2f}", f"{kept / expected:.4f}", "1.03")
        table.add_row(mode, f"{kept / 2**20:.2f}", *compared)
    return table


def time_table() -> Table:
    """Steps by mode, which take turns."""
    torch.set_num_threads(1)
    fqns = [f"blocks.{i}" for i in range(8)]
    steps = {mode: step_of({} if mode == "none" else dict.fromkeys(fqns, mode)) for mode in ("none", *BARS)}
    seconds = take_turns(steps, num_warm_up=WARM_UP, num_turns=TURNS)
    table = Table("recompute", "ms", "of none", "quartiles", "bar", title=f"one step, {TURNS} turns")
    for mode, own in seconds.items():
        low, middle, high = ratio_quartiles(own, seconds["none"])
        bar = f"{BARS[mode]:.2f}" if mode in BARS else ""
        table.add_row(mode, f"{median(own) * 1e3:.0f}", f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", bar)
    return table


def main() -> None:
    """Print both tables."""
    Console().print(kept_table())
    Console().print(time_table())


if __name__ == "__main__":
    main()
