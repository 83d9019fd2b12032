"""Offload: what blocks keep for their backwards lies in host memory until shortly before.

    forward of block k     each tensor that it keeps is copied to the host while it goes on computing
    end of it              what block k - 1 kept leaves the device, once copied
    backward of block k    what it kept is back, and what block k - 1 kept comes back meanwhile

So the device holds what two blocks keep; what the last one kept is still there when the backward begins. Where the
backward of a pipeline stage ends, what it needs first for the next microbatch comes back.

Everything belongs to the graph: memory of the host and of the device goes with what autograd saved, whether a backward
used it or not. Changes by ``tensor.data``, which torch does not count, are not seen in what has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.kept_tensor import Kept, KeptTensor, check_unchanged, given
from lightning_3d.activations.offloaded_call import ForwardPass, OffloadedCall, Reference, nothing, refer_to
from lightning_3d.activations.offloaded_memory import OffloadedMemory
from lightning_3d.activations.transfers import Transfers
from lightning_3d.activations.transforms import transforms_refused
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks, is_in_backward
from lightning_3d.torch_internals.dispatch import version_counter
from lightning_3d.torch_internals.tensors import storage_id, untransformed, version_of

LEAST_BYTES = 2**20
"""Smaller tensors stay: a copy of them takes longer to begin than to run."""


class Offload:
    """Offloads what the blocks of this rank keep.

    Args:
        device: Where they compute.
        transfers: Begins the copies.
        least_bytes: Of memory that is worth it.
    """

    def __init__(self, device: torch.device, transfers: Transfers, least_bytes: int = LEAST_BYTES) -> None:
        self._device, self._transfers, self._least_bytes = device, transfers, least_bytes
        self._memory: WeakValueDictionary[tuple[int, int], OffloadedMemory] = WeakValueDictionary()
        """(identity of a storage, version of its values) -> where it is."""
        self._forward = ForwardPass()
        self._forwards: dict[int, ForwardPass] = {}  # stage -> its newest
        self._present: OffloadedCall | None = None
        self._last: Reference = nothing

    def begin_forward(self, stage: int) -> None:
        """Tell that a pipeline stage begins with a microbatch. Their backwards come in the order of their forwards."""
        forward = ForwardPass()
        if stage in self._forwards:
            self._forwards[stage].following = forward
        self._forward = self._forwards[stage] = forward

    @contextmanager
    def call(self, fqn: str, block: nn.Module) -> Iterator[None]:
        """Offload what autograd saves inside, in a call of a block.

        A block stands aside where its caller has hooks of its own around it, as a checkpoint.

        Raises:
            StepError: the block does what torch does not do under hooks.
        """
        if not torch.is_grad_enabled() or is_in_backward() or has_saved_tensor_hooks():
            yield
            return
        self._present = call = OffloadedCall(block, self._forward)
        try:
            with saved_tensors_hooks(self.keep, given), transforms_refused(fqn):
                yield
        finally:
            self._present = None
        if (last := self._last()) is not None:
            last.leave()
        self._last = refer_to(call)

    def keep(self, tensor: Tensor) -> Kept:
        """Keep a tensor for the backward of the block that is called."""
        call = self._present
        if call is None or not self._is_worth_it(tensor) or call.has_weight(tensor):
            return KeptTensor(tensor)
        storage, version = tensor.untyped_storage(), version_of(tensor)
        memory = self._memory.get((storage_id(storage), version))
        if memory is None:
            memory = OffloadedMemory(storage, self._transfers)
            self._memory[storage_id(storage), version] = memory
        call.add(memory)
        return _OffloadedTensor(
            memory=memory,
            call=call,
            counter=version_counter(tensor),
            version=version,
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            size=tensor.size(),
            stride=tensor.stride(),
        )

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and untransformed(tensor) is tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and tensor.untyped_storage().nbytes() >= self._least_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _OffloadedTensor:
    """A tensor in offloaded memory."""

    memory: OffloadedMemory
    call: OffloadedCall
    counter: Tensor
    version: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def __call__(self) -> Tensor:
        """The tensor, back on the device."""
        check_unchanged(self.counter, self.version, self.size)
        if is_in_backward():
            self.call.need()
        storage = self.memory.get()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)
