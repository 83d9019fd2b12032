"""The table: by the name of a torch function the rules that may answer it on shards, the first that does first.

A function that stands here not, or none of whose rules answers, is looked up by `generic`. A new operator is one entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_3d.tensor.rules import aliases, channelwise, contraction, convolution, projection, randomness, views
from lightning_3d.tensor.rules.attention import attend
from lightning_3d.tensor.rules.call import Rule
from lightning_3d.tensor.rules.function import EXPERTS_MATMULS


def _table() -> Mapping[str, tuple[Rule, ...]]:
    rules: dict[str, tuple[Rule, ...]] = {}

    def answer(names: Iterable[str], *answers: Rule) -> None:
        for name in names:
            rules[name] = (*rules.get(name, ()), *answers)

    answer(("linear", "addmm", "mm"), projection.project)
    answer(("matmul", "__matmul__"), projection.project, contraction.contract, contraction.multiply_stacks)
    answer(("bmm",), contraction.contract, contraction.multiply_stacks)
    answer(("einsum", *EXPERTS_MATMULS), contraction.contract)
    answer(convolution.NAMES, convolution.convolve)
    answer(("scaled_dot_product_attention",), attend)
    answer(("dropout",), randomness.drop)
    answer(channelwise.NAMES, channelwise.on_channels)
    answer(aliases.NAMES, aliases.alias)
    answer(views.CUTS, views.cut_parts)
    answer(("__getitem__",), views.take_every_nth)
    answer(views.VIEWS, views.view_parts, views.merge_into_parts)
    answer(("__getitem__",), views.take_beside)
    answer(("__setitem__",), views.set_beside)
    answer(("repeat",), views.repeat_into_parts)
    answer(("new_empty", "new_zeros", "new_ones", "new_full"), views.make_alike)
    return rules


RULES: Mapping[str, tuple[Rule, ...]] = _table()
