"""Splitting blocks into finer ones: the coarsest that still balance the pipeline stages.

[Note: splitting blocks]
Coarse blocks are better blocks: less glue, larger FSDP units, plans for whole layers. They are opened only where they
are too few, or so heavy that the slowest stage would have more than 1.25 x its share of the parameters. Opening a
block makes its children blocks and its own code glue. What helps is predicted from parameter counts, and kept only if
the step can still be traced and the real calls of the finer blocks are better shared out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from torch import nn

from lightning_3d.model.blocks import inner_blocks, num_parameters, tied_groups
from lightning_3d.model.kinds import kind_of
from lightning_3d.planning.partition import additive, least_greatest_load
from lightning_3d.trace.trace import Trace

Calls = Sequence[tuple[str, nn.Module]]
"""FQN and block of each call, as traced, or as it would be."""

Slowness = tuple[int, float]
"""(calls missing for one per stage, parameters of the slowest stage over the mean); the smaller the better."""


def greatest_imbalance(partition: str | tuple[str, ...]) -> float | None:
    """Parameters of the slowest stage over its share, above which blocks are opened; None if they never are.

    Blocks that the user names stay as they are; ``"uniform"`` only needs enough of them.
    """
    if isinstance(partition, tuple) or partition.startswith("type:"):
        return None
    return math.inf if partition == "uniform" else 1.25


def is_balanced(blocks: Mapping[str, nn.Module], num_stages: int, imbalance: float) -> bool:
    """Whether the stages would be balanced if each block were called once, in this order."""
    return _slowness([*blocks.items()], num_stages) <= (0, imbalance)


def opened_until_enough(blocks: Mapping[str, nn.Module], num_stages: int) -> dict[str, nn.Module]:
    """Open blocks until each stage can have one, or nothing can be opened; without a trace."""
    current = dict(blocks)
    while len(tied_groups(current)) < num_stages:
        if not (opened := _to_open([*current.items()], len(current) + 1, math.inf, ())):
            break
        current = _with_opened(current, opened)
    return current


def split_blocks(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    num_stages: int,
    imbalance: float,
    trace_with: Callable[[Mapping[str, nn.Module]], Trace],
) -> dict[str, nn.Module]:
    """Open blocks until the stages are balanced or nothing helps.

    Args:
        module: The whole model.
        blocks: From ``find_blocks``.
        imbalance: From ``greatest_imbalance``.
        trace_with: Traces the step with the given blocks.

    Returns:
        FQN -> block, in definition order.
    """
    trace = trace_with(blocks)
    glue_before = _num_glue_parameters(module, blocks, trace)
    current, slowness = dict(blocks), _slowness(_called(blocks, trace), num_stages)
    refused: set[Hashable] = set()
    while opened := _to_open(_called(current, trace), num_stages, imbalance, refused):
        finer = _with_opened(current, opened)
        try:
            finer_trace = trace_with(finer)
            glue = max(0, _num_glue_parameters(module, finer, finer_trace) - glue_before)
            finer_slowness = _slowness(_called(finer, finer_trace), num_stages, glue)
        except Exception:  # whatever its code does that glue can't, the coarser blocks could be traced
            finer_slowness = slowness
        if finer_slowness < slowness:
            current, trace, slowness = finer, finer_trace, finer_slowness
        else:
            refused |= set(map(kind_of, opened.values()))
    return current


def _slowness(calls: Calls, num_stages: int, glue: int = 0) -> Slowness:
    """That of stages with these calls, and with the glue of this many parameters on each."""
    if len(calls) < num_stages:
        return num_stages - len(calls), 0
    loads = [num_parameters(block) for _, block in calls]
    slowest = least_greatest_load(additive(loads), len(loads), num_stages) + glue
    return 0, slowest * num_stages / max(sum(loads), 1)


def _to_open(calls: Calls, num_stages: int, imbalance: float, refused: Collection[Hashable]) -> dict[str, nn.Module]:
    """The block to open, or all of a kind, for the best balance; none where it is good, or nothing helps."""
    slowness = _slowness(calls, num_stages)
    if slowness <= (0, imbalance):
        return {}
    mean = sum(num_parameters(block) for _, block in calls) / num_stages
    candidates = {
        fqn: block
        for fqn, block in calls
        # The slowest stage of the best cut exceeds the mean by less than the heaviest block.
        if slowness[0] or num_parameters(block) > (imbalance - 1) * mean
        if kind_of(block) not in refused and _parts(fqn, block)
    }
    alike: dict[Hashable, tuple[str, ...]] = {}
    for fqn, block in candidates.items():
        alike[kind_of(block)] = (*alike.get(kind_of(block), ()), fqn)
    outcomes = []
    for i, choice in enumerate([*((fqn,) for fqn in candidates), *alike.values()]):
        opened = _opened(calls, choice)
        glue = sum(num_parameters(block) for _, block in calls) - sum(num_parameters(block) for _, block in opened)
        largest = num_parameters(candidates[choice[0]])
        outcomes.append((_slowness(opened, num_stages, glue), len(choice), -largest, i, choice))
    if not outcomes or min(outcomes)[0] >= slowness:
        return {}
    return {fqn: candidates[fqn] for fqn in min(outcomes)[-1]}


def _parts(fqn: str, block: nn.Module) -> dict[str, nn.Module]:
    """Child blocks, looking through single-child wrappers."""
    parts = inner_blocks(fqn, block)
    while len(parts) == 1:
        parts = inner_blocks(*next(iter(parts.items())))
    return parts


def _with_opened(blocks: Mapping[str, nn.Module], opened: Collection[str]) -> dict[str, nn.Module]:
    finer: dict[str, nn.Module] = {}
    for fqn, block in _opened([*blocks.items()], opened):
        if block not in finer.values():
            finer[fqn] = block
    return finer


def _opened(calls: Calls, fqns: Collection[str]) -> Calls:
    """As if each of these blocks called each of its parts once."""
    return [part for fqn, block in calls for part in (_parts(fqn, block) if fqn in fqns else {fqn: block}).items()]


def _called(blocks: Mapping[str, nn.Module], trace: Trace) -> Calls:
    return [(call.name, blocks[call.name]) for call in trace.block_calls]


def _num_glue_parameters(module: nn.Module, blocks: Mapping[str, nn.Module], trace: Trace) -> int:
    """Elements of the parameters that every stage holds."""
    used = {fqn for call in trace.calls for fqn in call.parameters}
    in_blocks = {parameter for block in blocks.values() for parameter in block.parameters()}
    return sum(p.numel() for fqn, p in module.named_parameters() if fqn in used or p not in in_blocks)
