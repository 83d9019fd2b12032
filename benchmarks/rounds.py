"""Contenders that take turns: ratios of their steps within the same round, so that noise hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks

Contenders = Mapping[str, Callable[[], float]]
"""Name -> seconds of a step, measured on every rank."""

Bars = Sequence[tuple[str, str, float | None]]
"""A contender, the peer that it is compared with, and the largest ratio that is wanted."""


def compare(contenders: Contenders, bars: Bars, *, num_ranks: int, num_rounds: int, title: str) -> None:
    """Print the median over the rounds of each contender's ratio to its peer in the same round.

    Args:
        contenders: Each runs in processes of its own, one after the other in every round.
    """
    rounds = [
        {name: run_ranks(_seconds, num_ranks, contenders[name]) for name in contenders} for _ in range(num_rounds)
    ]
    table = Table("", "against", "ratio", "by round", "bar", title=f"one step, {title}, {num_rounds} rounds")
    for name, peer, bar in bars:
        ratios = [seconds[name] / seconds[peer] for seconds in rounds]
        listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(name, peer, f"{statistics.median(ratios):.3f}", listed, "" if bar is None else f"{bar:.2f}")
    Console().print(table)
    Console().print({name: f"{statistics.median(s[name] for s in rounds) * 1e3:.0f} ms" for name in contenders})


def _seconds(contender: Callable[[], float]) -> float:
    seconds = contender()
    dist.barrier()
    return seconds
