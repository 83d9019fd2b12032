"""Views of gathered tensors that are changed in place, as in ``hidden[..., :5].zero_()`` across shards.

In one process the tensor that was viewed changes with its view, and the view with it. The view of a gathered tensor is
one of a copy: the other never changes. Only planning looks for these, and replicates the weights that they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_3d.tensor.placement import Partial
from lightning_3d.tensor.rules.function import tensors_in
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from lightning_3d.torch_internals.tensors import storage_id


@dataclass(slots=True)
class GatheredCopies:
    """The gathered copies of one run of a block on fake tensors, and the views of them."""

    _copies: list[tuple[ShardedTensor, Tensor]] = field(default_factory=list)
    """Made in the call that is under way."""

    _viewed: dict[int, ShardedTensor] = field(default_factory=dict)
    """Memory that must not be changed, of a copy or of what was copied -> what was copied."""

    _kept: list[Tensor] = field(default_factory=list)  # so that no memory is used twice

    def add(self, tensor: Tensor, whole: Tensor) -> None:
        """Note that `whole` was gathered from `tensor`."""
        if isinstance(tensor, ShardedTensor) and not isinstance(tensor.placement, Partial):
            self._copies.append((tensor, whole))

    def end_call(self, output: Any) -> None:
        """Note which copies the results of a call are views of."""
        results = {_memory(tensor) for tensor in tensors_in(output)} if self._copies else set()
        for tensor, whole in self._copies:
            if _memory(whole) in results:
                self._viewed.update({_memory(whole): tensor, _memory(tensor): tensor})
                self._kept.append(whole)
        self._copies.clear()

    def spoiled_by(self, changed: Tensor | None) -> ShardedTensor | None:
        """The tensor, a copy of which is viewed, if a change of `changed` makes the two differ."""
        return None if changed is None or not self._viewed else self._viewed.get(_memory(changed))


def _memory(tensor: Tensor) -> int:
    own = tensor.local if isinstance(tensor, ShardedTensor) else tensor
    return storage_id(own.untyped_storage())
