"""A row of telemetry: the metrics of all ranks, from what each of them measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.distributed.mesh import MeshShape


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The work of a rank: steps, samples, tokens, floating-point operations."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    flops: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def amounts(total: Amount, counted: Amount) -> dict[str, float]:
    """Name -> what a rank has done since the last row, and in the steps in which operations were counted."""
    return {**vars(total), **{f"counted_{name}": number for name, number in vars(counted).items()}}


def rates(ranks: Sequence[Mapping[str, float]], shape: MeshShape, peak: float | None) -> dict[str, float | None]:
    """The work of all ranks by time.

    Args:
        ranks: ``amounts`` of each rank, and ``seconds``.
        peak: Of one device, in TFLOP/s.
    """
    replicas = [ranks[shape.replica_ranks(dp)[0]] for dp in range(shape.dp)]
    unit = "tokens" if any(rank["tokens"] for rank in replicas) else "samples"
    done, counted = (sum(rank[name] for rank in replicas) for name in (unit, f"counted_{unit}"))
    seconds = max(rank["seconds"] for rank in ranks)
    flops = sum(rank["counted_flops"] for rank in ranks)
    tflops = flops / counted * done / seconds / shape.world_size / 1e12 if counted else None
    found: dict[str, float | None] = {"seconds_per_step": seconds / ranks[0]["steps"]}
    found["samples_per_second"] = sum(rank["samples"] for rank in replicas) / seconds
    if unit == "tokens":
        found["tokens_per_second"] = done / seconds
    found["tflops_per_device"] = tflops
    if peak is not None:
        found["mfu"] = None if tflops is None else tflops / peak
    return found


def times_and_memory(ranks: Sequence[Mapping[str, float]], phases: Sequence[str]) -> dict[str, float | None]:
    """Times of phases as means over the ranks, memory of the rank with the most."""
    found: dict[str, float | None] = {}
    for name in (f"time/{phase}" for phase in ("step", *phases)):
        times = [rank[name] for rank in ranks if name in rank]
        found[name] = sum(times) / len(times) if times else None
    memory = (name for name in ranks[0] if name.startswith("memory/"))
    return found | {name: max(rank[name] for rank in ranks) for name in memory}
