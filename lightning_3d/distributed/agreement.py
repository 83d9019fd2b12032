"""Decisions that one rank makes for all, and errors of one that all raise: it alone would leave them waiting."""

from __future__ import annotations

import pickle
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_3d.errors import PlanError
from lightning_3d.torch_internals.process_groups import object_device

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


def on_one_rank(
    decide: Callable[[], T],
    *,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    size_of: Callable[[int], int] | None = None,
) -> T:
    """Run ``decide`` on one rank of a group, by default rank 0 of the world, and give its result to every rank of it.

    Every rank of the group calls it. The result must be picklable.

    Args:
        size_of: Gives all ranks the size that this one passes, by a collective that may compare something, too.

    Raises:
        Exception: what ``decide`` raised, on every rank.
    """
    outcome, decides, message = _Outcome(), dist.get_rank(group) == rank, bytearray()
    if decides:
        try:
            outcome = _Outcome(value=decide())
        except Exception as error:
            outcome = _Outcome(error=error)
        portable_outcome = outcome if outcome.error is None else _Outcome(error=portable(outcome.error))
        message.extend(pickle.dumps(portable_outcome))
    size = (size_of or partial(_size_of, rank, group))(len(message))
    sent = torch.frombuffer(message if decides else bytearray(size), dtype=torch.uint8).to(object_device(group))
    dist.broadcast(sent, group_src=rank, group=group)
    outcome = outcome if decides else pickle.loads(sent.cpu().numpy().tobytes())
    if outcome.error is not None:
        raise outcome.error
    value: T = outcome.value
    return value


def _size_of(rank: int, group: dist.ProcessGroup | None, size: int) -> int:
    """The size that a rank of a group passes."""
    sent = torch.tensor(size, device=object_device(group))
    dist.broadcast(sent, group_src=rank, group=group)
    return int(sent)


def gather_numbers(number: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """One 64-bit integer of every rank, by rank; every rank calls it. The hosts exchange them, where they can."""
    return [number for (number,) in gather_rows([number], group)]


def gather_rows(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """As many integers of every rank, likewise."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=object_device(group))
    everyone = mine.new_empty(dist.get_world_size(group) * len(numbers))
    dist.all_gather_single(everyone, mine, group)
    rows: list[list[int]] = everyone.view(-1, len(numbers)).tolist()
    return rows


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The object that each rank of a group gives, by rank; every rank of it calls this."""
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    return everyone


def described_alike(described: Mapping[str, str], group: dist.ProcessGroup | None = None) -> set[str]:
    """The names of what all ranks of a group describe in the same words; every rank of it calls this."""
    sums = gather_numbers(zlib.crc32(repr(sorted(described.items())).encode()), group)
    if len(set(sums)) == 1:
        return set(described)
    everyone = gather_objects(dict(described), group)
    return {name for name, words in described.items() if all(other.get(name) == words for other in everyone)}


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks what any of them raises inside.

    Every rank reaches the end, whatever others raise: collectives inside come before what one alone may raise.

    Args:
        group: A group of all ranks; the default one without it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    raise_alike(error, group)


def raise_alike(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank what the first of those that failed ran into; every rank calls it.

    Args:
        error: What this rank ran into, if anything.
        group: A group of all ranks; the default one without it.
    """
    if not any(gather_numbers(int(error is not None), group)):
        return
    everyone = gather_objects(None if error is None else portable(error), group)
    rank, first = next((rank, other) for rank, other in enumerate(everyone) if other is not None)
    if error is not None and rank == dist.get_rank(group):
        raise error
    first.add_note(f"on rank {rank}")
    raise first from error


def portable(error: BaseException) -> BaseException:
    """The same, or what tells of an error that can't be pickled in words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PlanError("".join(traceback.format_exception(error)))
    return error
