"""The table: by the name of a torch function the rules that may answer it on shards, the first that does first.

A function that stands here not, or none of whose rules answers, is looked up by `generic`. A new operator is one entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_3d.sharding.rules import (
    aliases,
    channelwise,
    contraction,
    convolution,
    losses,
    projection,
    randomness,
    views,
)
from lightning_3d.sharding.rules.attention import attend
from lightning_3d.sharding.rules.call import Rule
from lightning_3d.sharding.rules.flex_attention import attend_heads
from lightning_3d.sharding.rules.function import EXPERTS_MATMULS


def _table() -> Mapping[str, tuple[Rule, ...]]:
    rules: dict[str, tuple[Rule, ...]] = {}

    def register(names: Iterable[str], *answers: Rule) -> None:
        for name in names:
            rules[name] = (*rules.get(name, ()), *answers)

    register(("linear", "addmm", "mm"), projection.project)
    register(("matmul", "__matmul__"), projection.project, contraction.contract, contraction.multiply_stacks)
    register(("bmm",), contraction.contract, contraction.multiply_stacks)
    register(("einsum", *EXPERTS_MATMULS), contraction.contract)
    register(convolution.NAMES, convolution.convolve)
    register(("scaled_dot_product_attention",), attend)
    register(("flex_attention",), attend_heads)
    register(("dropout",), randomness.drop)
    register(losses.NAMES, losses.of_own_rows, losses.of_own_elements)
    register(channelwise.NAMES, channelwise.on_channels)
    register(aliases.NAMES, aliases.alias)
    register(views.CUTS, views.cut_parts)
    register(("__getitem__",), views.take_every_nth)
    register(views.VIEWS, views.view_parts, views.view_shards)
    register(("__getitem__",), views.take_beside)
    register(("__setitem__",), views.set_beside)
    register(("repeat",), views.repeat_into_parts)
    register(("new_empty", "new_zeros", "new_ones", "new_full"), views.make_alike)
    return rules


RULES: Mapping[str, tuple[Rule, ...]] = _table()
