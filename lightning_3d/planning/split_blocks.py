"""Splitting blocks into finer ones: the coarsest that still balance the pipeline stages.

[Note: splitting blocks]
Coarse blocks are better blocks: less glue, larger FSDP units, plans for whole layers. They are opened only where they
are too few, or so heavy that the slowest stage would have more than 1.25 x its share of the parameters. Opening a
block makes its children blocks and its own code glue. What helps is predicted from parameter counts, and kept only if
the step can still be traced and the real calls of the finer blocks are better shared out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_3d.model.blocks import inner_blocks, kind_of, tied_groups
from lightning_3d.planning.loads import num_parameters
from lightning_3d.planning.partition import additive, least_greatest_load
from lightning_3d.trace.trace import Trace

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
    calls = _Calls(calls=tuple(blocks.items()))
    return calls.slowness(num_stages) <= (0, imbalance)


def opened_until_enough(blocks: Mapping[str, nn.Module], num_stages: int) -> dict[str, nn.Module]:
    """Open blocks until each stage can have one, or nothing can be opened; without a trace."""
    current = dict(blocks)
    while len(tied_groups(current)) < num_stages:
        calls = _Calls(calls=tuple(current.items()))
        if not (opened := _worth_opening(calls, len(current) + 1, math.inf, ())):
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
    current, slowness = dict(blocks), _called(blocks, trace, glue=0).slowness(num_stages)
    refused: set[Hashable] = set()
    while opened := _worth_opening(_called(current, trace, glue=0), num_stages, imbalance, refused):
        # What is inside may be called often, which the prediction can't know: first without opening parts again.
        outermost = {fqn: block for fqn, block in opened.items() if fqn in current}
        for choice in (outermost, opened) if len(outermost) < len(opened) else (opened,):
            finer = _with_opened(current, choice)
            try:
                finer_trace = trace_with(finer)
            except Exception:  # whatever its code does that glue can't, the coarser blocks could be traced
                continue
            glue = max(0, _num_glue_parameters(module, finer, finer_trace) - glue_before)
            finer_slowness = _called(finer, finer_trace, glue=glue).slowness(num_stages)
            if finer_slowness < slowness:
                current, trace, slowness = finer, finer_trace, finer_slowness
                break
        else:
            refused.add(kind_of(max(opened.values(), key=num_parameters)))
    return current


@dataclass(frozen=True, kw_only=True)
class _Calls:
    """Calls of blocks as they were traced, or as they would be."""

    calls: tuple[tuple[str, nn.Module], ...]
    glue: int = 0
    """Parameters that opened blocks leave to glue, on every stage."""

    @property
    def loads(self) -> list[int]:
        return [num_parameters(block) for _, block in self.calls]

    def mean(self, num_stages: int) -> float:
        """Parameters of a stage if all had as many."""
        return max(sum(self.loads), 1) / num_stages

    def slowness(self, num_stages: int) -> Slowness:
        if len(self.calls) < num_stages:
            return num_stages - len(self.calls), 0
        slowest = least_greatest_load(additive(self.loads), len(self.calls), num_stages) + self.glue
        return 0, slowest / self.mean(num_stages)

    def opened(self, fqns: Collection[str]) -> _Calls:
        """As if each of these blocks called each of its parts once."""
        calls: list[tuple[str, nn.Module]] = []
        glue = dict.fromkeys(fqns, 0)
        for fqn, block in self.calls:
            parts = _parts(fqn, block) if fqn in fqns else {fqn: block}
            if fqn in fqns:
                glue[fqn] = num_parameters(block) - sum(map(num_parameters, parts.values()))
            calls += parts.items()
        return _Calls(calls=tuple(calls), glue=self.glue + sum(glue.values()))


def _worth_opening(
    calls: _Calls, num_stages: int, imbalance: float, refused: Collection[Hashable]
) -> dict[str, nn.Module]:
    """The blocks to open, among them some inside others, until the stages are balanced or nothing helps.

    With fewer calls than stages, until there are enough.
    """
    enough = len(calls.calls) >= num_stages
    opened: dict[str, nn.Module] = {}
    while (slowness := calls.slowness(num_stages)) > (0, imbalance if enough else math.inf):
        candidates = {
            fqn: block
            for fqn, block in calls.calls
            # The slowest stage of the best cut exceeds the mean by less than the heaviest block.
            if slowness[0] or num_parameters(block) > (imbalance - 1) * calls.mean(num_stages)
            if kind_of(block) not in refused and _parts(fqn, block)
        }
        alike: dict[Hashable, tuple[str, ...]] = {}
        for fqn, block in candidates.items():
            alike[kind_of(block)] = (*alike.get(kind_of(block), ()), fqn)
        choices = [*((fqn,) for fqn in candidates), *alike.values()]  # one of them, or all of a kind together
        outcomes = [
            (calls.opened(choice).slowness(num_stages), len(choice), -num_parameters(candidates[choice[0]]), i)
            for i, choice in enumerate(choices)
        ]
        if not outcomes or min(outcomes)[0] >= slowness:
            break
        chosen = choices[min(outcomes)[-1]]
        opened |= {fqn: candidates[fqn] for fqn in chosen}
        calls = calls.opened(chosen)
    return opened


def _parts(fqn: str, block: nn.Module) -> dict[str, nn.Module]:
    """Child blocks, looking through single-child wrappers."""
    parts = inner_blocks(fqn, block)
    while len(parts) == 1:
        parts = inner_blocks(*next(iter(parts.items())))
    return parts


def _with_opened(blocks: Mapping[str, nn.Module], opened: Collection[str]) -> dict[str, nn.Module]:
    finer: dict[str, nn.Module] = {}
    for fqn, block in blocks.items():
        parts = _with_opened(_parts(fqn, block), opened) if fqn in opened else {fqn: block}
        finer |= {name: part for name, part in parts.items() if part not in finer.values()}
    return finer


def _called(blocks: Mapping[str, nn.Module], trace: Trace, *, glue: int) -> _Calls:
    return _Calls(calls=tuple((call.name, blocks[call.name]) for call in trace.block_calls), glue=glue)


def _num_glue_parameters(module: nn.Module, blocks: Mapping[str, nn.Module], trace: Trace) -> int:
    """Elements of the parameters that every stage holds."""
    used = {fqn for call in trace.calls for fqn in call.parameters}
    in_blocks = {parameter for block in blocks.values() for parameter in block.parameters()}
    return sum(p.numel() for fqn, p in module.named_parameters() if fqn in used or p not in in_blocks)
