"""The table: by the name of a torch function the rules that may answer it on shards, the first that does first.

A function that stands here not, or none of whose rules answers, is looked up by `generic`. A new operator is one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F

from lightning_3d.tensor.rules import aliases, channelwise, contraction, convolution, dropout, projection, views
from lightning_3d.tensor.rules.attention import attend
from lightning_3d.tensor.rules.batched_matmul import multiply_stacks
from lightning_3d.tensor.rules.call import Rule
from lightning_3d.tensor.rules.function import EXPERTS_MATMULS, Function
from lightning_3d.tensor.rules.gated import gated
from lightning_3d.tensor.rules.multihead import is_multi_head_attention, multi_head_attention


def _table() -> Mapping[str, tuple[Rule, ...]]:
    rules: dict[str, tuple[Rule, ...]] = {}

    def answer(names: Sequence[str] | frozenset[str], *answers: Rule) -> None:
        for name in names:
            rules[name] = (*rules.get(name, ()), *answers)

    answer(("linear", "addmm", "mm"), projection.project)
    answer(("matmul", "__matmul__"), projection.project, contraction.contract, multiply_stacks)
    answer(("bmm",), contraction.contract, multiply_stacks)
    answer(("einsum", *EXPERTS_MATMULS), contraction.contract)
    answer(convolution.NAMES, convolution.convolve)
    answer(("scaled_dot_product_attention",), attend)
    answer(("dropout",), dropout.drop)
    answer(channelwise.NAMES, channelwise.on_channels)
    answer(aliases.NAMES, aliases.alias)
    answer(views.CUTS, views.cut_parts)
    answer(("__getitem__",), views.take_every_nth)
    answer(views.VIEWS, views.view_parts, views.merge_into_parts)
    answer(("repeat",), views.repeat_into_parts)
    answer(("new_empty", "new_zeros", "new_ones", "new_full"), views.make_alike)
    return rules


RULES: Mapping[str, tuple[Rule, ...]] = _table()


def rewritten(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Function | None:
    """The same function in calls that have rules, for one that torch hands over as a single call."""
    if is_multi_head_attention(function, args, kwargs):
        return multi_head_attention
    return gated if function is F.glu else None
