"""Where the parameters and buffers of a model lie, by where its blocks run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lightning_3d.torch_internals.modules import named_state
from lightning_3d.trace.trace import Trace


def used_by_glue(trace: Trace | None) -> frozenset[str]:
    """FQNs of blocks' parameters and buffers that code outside of their block uses."""
    return frozenset(fqn for call in (trace.calls if trace else ()) for fqn in call.parameters)


def find_ties(module: nn.Module) -> dict[str, str]:
    """FQN -> first FQN of the same tensor, where a tensor has several."""
    names: dict[Tensor, list[str]] = {}
    for fqn, tensor, _ in named_state(module):
        names.setdefault(tensor, []).append(fqn)
    return {fqn: fqns[0] for fqns in names.values() for fqn in fqns if len(fqns) > 1}


def place_state(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    places: Mapping[str, Collection[int]],
    trace: Trace | None,
    everywhere: Collection[int],
) -> dict[str, tuple[int, ...]]:
    """A tensor lies with the blocks that own it, whatever its names, and everywhere if glue uses it in a trace.

    Without a trace it lies with its block alone.

    Args:
        places: Block FQN -> where it runs: ranks of the pp axis, or calls of which a stage may be made.

    Returns:
        FQN of a parameter or of a block's buffer -> where it lies, ascending. Glue buffers are everywhere.
    """
    owners: dict[nn.Module, set[int]] = {}  # a module that several blocks share lies with each of them
    for fqn, block in blocks.items():
        for inner in block.modules():
            owners.setdefault(inner, set()).update(places[fqn])
    of_glue = used_by_glue(trace)
    names: dict[Tensor, list[str]] = {}
    held: dict[Tensor, set[int]] = {}
    of_blocks: dict[Tensor, set[int]] = {}
    for fqn, tensor, owner in named_state(module):
        if owner not in owners and not isinstance(tensor, nn.Parameter):
            continue
        names.setdefault(tensor, []).append(fqn)
        place = owners[owner] if owner in owners and fqn not in of_glue else everywhere
        held.setdefault(tensor, set()).update(place)
        if trace is None and owner in owners:
            of_blocks.setdefault(tensor, set()).update(place)
    held |= of_blocks
    return {fqn: tuple(sorted(held[tensor])) for tensor, fqns in names.items() for fqn in fqns}
