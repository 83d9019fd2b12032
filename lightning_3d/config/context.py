"""The settings of context parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_3d.config.checks import check_values
from lightning_3d.errors import ConfigError

AttentionWay = Literal["auto", "ulysses", "ring", "gather"]
"""How queries of one slice of a sequence meet the keys and values of all slices."""

RowOrder = Literal["auto", "in_order", "head_tail"]
"""Which rows of a sequence a rank has inside of causal attention in a ring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig:
    """How steps run on slices of sequences, with ``context_parallel_size`` above 1."""

    section: ClassVar[str] = "context"

    attention: AttentionWay = "auto"
    """How ``F.scaled_dot_product_attention`` is made of queries, keys and values that are all cut along the sequence.

    * ``"ulysses"``: heads are cut in place of the sequence, by an all-to-all of each operand and of the output
      (Jacobs et al. 2023). The ranks must divide the heads of queries, keys and values.
    * ``"ring"``: keys and values pass round the ranks while each attends to those that it has (Liu et al. 2023). Under
      a causal mask or none, without dropout.
    * ``"gather"``: every rank gathers all keys and values, under any mask, without dropout.
    * ``"auto"``: for each call the way that sends the fewest bytes in the forward, and what the last rank of a causal
      call computes longer than others counts as bytes: ``"ulysses"`` or ``"gather"``, and the ring in place of the
      latter where it can serve.

    A call that the named way can't serve is refused. Other calls go where it costs least, whatever this says."""

    order: RowOrder = "auto"
    """Which rows each rank has inside of a causal ring; outside of it slices always lie in order.

    * ``"in_order"``: its slice, so that the last rank attends to most keys, and computes longest.
    * ``"head_tail"``: as many rows of the first half of the sequence as of the second, so that all attend to as many
      keys; an all-to-all brings queries, keys and values there, and another the output back.
    * ``"auto"``: ``"head_tail"`` where the last rank would else compute longer than these take: where the
      multiplications that it is spared are at least 1024 for each number sent."""

    dims: tuple[tuple[str | int, ...], ...] = ()
    """Where sequences lie, as pairs of an FQN pattern of blocks (``"encoder.*"``; ``*`` and ``?`` as in a shell) and
    the dimension of the sequence in the first floating-point argument of these blocks: 0 of ``(sequence, batch,
    features)``, 2 of ``(batch, features, sequence)``. Of several rules that name a block the last one holds; without
    one it is 1, of arguments ``(batch, sequence, features)`` alone. Results do not depend on it."""

    gather_outputs: bool = True
    """Whether ``predict_step`` gives whole tensors on every rank, as one process does, or each rank its slice of what
    lies in slices, which takes 1 / context_parallel_size of the memory. Not with a pipeline."""

    def __post_init__(self) -> None:
        check_values(self)
        for rule in self.dims:
            if [type(part) for part in rule] != [str, int] or int(rule[1]) < 0:
                raise ConfigError(
                    f"context.dims has the rule {list(rule)}: use pairs of an FQN pattern and a dimension"
                )
