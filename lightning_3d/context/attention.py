"""Which way attention on slices goes: the one that ``context.attention`` names, or the cheapest.

    ulysses    an all-to-all of each operand, and of the output: a rank has all rows of its heads
    gather     an all-gather of keys and values: a rank has all of both
    ring       keys and values go from rank to rank: a rank has two slices of both at a time

Under a causal mask, `gather` lets later ranks compute more than earlier ones, and so does `ring` in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from lightning_3d.config.context import AttentionWay, RowOrder
from lightning_3d.context.ring import are_cut, attend_in_ring, unserved
from lightning_3d.context.rules import attend_own_queries
from lightning_3d.errors import ConfigError
from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.rules.attention import Attention, attend
from lightning_3d.sharding.rules.call import LocalCall, Rule, TorchCall


def attends_on_slices(call: TorchCall) -> bool:
    """Whether a call is attention whose queries, keys and values are all cut along the sequence."""
    if call.name != "scaled_dot_product_attention":
        return False
    attention = Attention(*call.args, **call.kwargs)
    return are_cut((attention.query, attention.key, attention.value), -2)


def attend_own_heads(call: TorchCall, axis: Axis) -> LocalCall | None:
    """Attention of this rank's heads of queries, keys and values."""
    attention = Attention(*call.args, **call.kwargs)
    return attend(call, axis) if are_cut((attention.query, attention.key, attention.value), -3) else None


def by_way(order: RowOrder) -> Mapping[AttentionWay, Rule]:
    """By way how a rank computes once the operands lie as it wants them."""
    return {
        "ulysses": attend_own_heads,
        "ring": partial(attend_in_ring, order=order),
        "gather": attend_own_queries,
    }


def refused(call: TorchCall, way: AttentionWay, axis: Axis) -> ConfigError:
    """The error on attention that the way of the settings can't serve."""
    attention = Attention(*call.args, **call.kwargs)
    query, key, value = (tuple(tensor.shape) for tensor in (attention.query, attention.key, attention.value))
    reasons = {
        "ulysses": f"it cuts heads, and {axis.size} ranks do not divide those of all three",
        "ring": unserved(attention),
        "gather": f"it drops nothing, and there is dropout_p={attention.dropout_p}",
    }
    return ConfigError(
        f"context.attention={way!r} can't serve scaled_dot_product_attention of queries {query}, keys {key} and values"
        f" {value}: {reasons[way]}. Use context.attention='auto'."
    )
