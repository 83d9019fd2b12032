"""The blocks that are recomputed, or whose activations are offloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checks import TYPE_PREFIX
from lightning_3d.errors import PlanError
from lightning_3d.model.blocks import fqns_matching


def chosen_blocks(blocks: Mapping[str, nn.Module], config: ActivationsConfig) -> frozenset[str]:
    """FQNs of the blocks that ``activations.recompute`` and ``activations.offload`` are for.

    Args:
        blocks: FQN -> block, in the order of their first calls.

    Raises:
        PlanError: ``activations.blocks`` names none.
    """
    if config.recompute == "none" and not config.offload:
        return frozenset()
    chosen = [fqn for fqn, block in blocks.items() if _is_chosen(fqn, block, config.blocks)]
    if isinstance(config.blocks, str) and not chosen:
        classes = sorted({type(block).__name__ for block in blocks.values()})
        raise PlanError(
            f"activations.blocks={config.blocks!r} matches the class of no block. Their classes: {', '.join(classes)}."
        )
    for pattern in config.blocks if isinstance(config.blocks, tuple) else ():
        fqns_matching(pattern, blocks, "activations.blocks")
    return frozenset(chosen[:: config.every])


def _is_chosen(fqn: str, block: nn.Module, rule: str | Sequence[str]) -> bool:
    if isinstance(rule, str):
        return re.search(rule.removeprefix(TYPE_PREFIX), type(block).__name__) is not None
    if rule:
        return any(fnmatchcase(fqn, pattern) for pattern in rule)
    return next(block.children(), None) is not None  # a single layer keeps little but its inputs
