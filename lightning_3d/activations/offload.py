"""Offload: what blocks keep for their backwards lies in host memory until shortly before.

    forward of block k     each tensor that it keeps is copied to the host while it goes on computing
    end of it              what block k - 1 kept leaves the device, once copied
    backward of block k    what it kept is back, and what block k - 1 kept comes back meanwhile

So the device holds what two blocks keep; what the last one kept is still there when the backward begins.

Everything belongs to the graph: memory of the host and of the device goes with what autograd saved, whether a backward
used it or not. Changes by ``tensor.data``, which torch does not count, are not seen in what has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.activations.saved_tensor import Saved, SavedTensor, check_unchanged, unpack
from lightning_3d.activations.transfers import SideStreams, Wait
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks, is_cast, is_in_backward
from lightning_3d.torch_internals.dispatch import version_counter
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.tensors import are_transforms_active, base_of, storage_id, untransformed, version_of

LEAST_BYTES = 2**20
"""Smaller tensors stay: a copy of them takes longer to begin than to run."""


class Offload:
    """Offloads what the blocks of this rank keep.

    Args:
        device: Where they compute.
        transfers: Begins the copies.
        least_bytes: Of memory that is worth it.
    """

    def __init__(self, device: torch.device, transfers: SideStreams, least_bytes: int = LEAST_BYTES) -> None:
        self._device, self._transfers, self._least_bytes = device, transfers, least_bytes
        self._memory: WeakValueDictionary[tuple[int, int], _Memory] = WeakValueDictionary()
        """(identity of a storage, version of its values) -> where it is."""
        self._present: _Call | None = None
        self._last: ref[_Call] | None = None

    @contextmanager
    def call(self, block: nn.Module) -> Iterator[None]:
        """Offload what autograd saves inside, in a call of a block.

        Nothing where its caller has hooks of its own around it, as a checkpoint, or transforms of ``torch.func``.
        """
        is_left = is_in_backward() or has_saved_tensor_hooks() or are_transforms_active()
        if is_left or not torch.is_grad_enabled():
            yield
            return
        self._present = call = _Call(block, self._last)
        try:
            with saved_tensors_hooks(self.keep, unpack):
                yield
        finally:
            self._present = None
        if call.memory:
            if self._last is not None and (last := self._last()) is not None:
                last.leave()
            self._last = ref(call)

    def keep(self, tensor: Tensor) -> Saved:
        """Keep a tensor for the backward of the block that is called."""
        call = self._present
        if call is None or not self._is_worth_it(tensor) or call.has_weight(tensor):
            return SavedTensor(tensor)
        storage, version = tensor.untyped_storage(), version_of(tensor)
        memory = self._memory.get((storage_id(storage), version))
        if memory is None:
            memory = self._memory[storage_id(storage), version] = _Memory(storage, self._transfers)
        call.memory.append(ref(memory))
        counter, dtype = version_counter(tensor), tensor.dtype
        offset, size, stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()

        def back() -> Tensor:
            check_unchanged(counter, version, size)
            if is_in_backward():
                call.need()
            storage = memory.get()
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)

        return back

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and untransformed(tensor) is tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and tensor.untyped_storage().nbytes() >= self._least_bytes
        )


class _Memory:
    """A storage that is copied to the host, leaves the device, and comes back once.

    It is copied as a whole, as autograd would keep it as a whole: tensors that share it still do when it is back.

    Args:
        storage: It must not change before it has left.
    """

    def __init__(self, storage: UntypedStorage, transfers: SideStreams) -> None:
        self._identity = StorageWeakRef(storage)  # no other storage gets it while this lives
        self._transfers = transfers
        self._device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._host: Tensor | None = None
        self._copy: Wait | None = transfers.to_host(self._device)  # under way: to the host, or back where neither is
        self._stays = False  # on the device, until nobody needs it

    def leave(self) -> None:
        """Let the memory of the device go, once its copy is done."""
        if self._device is not None and not self._stays:
            assert self._copy is not None
            self._host, self._device, self._copy = self._copy(), None, None

    def fetch(self) -> None:
        """Begin to bring it back."""
        self._stays = True
        if self._host is not None:
            self._copy, self._host = self._transfers.to_device(self._host), None

    def get(self) -> UntypedStorage:
        """The storage on the device, for what is computed from now on."""
        self.fetch()
        if self._device is None:
            assert self._copy is not None
            self._device, self._copy = self._copy(), None
        return self._device.untyped_storage()


class _Call:
    """A call of a block. It lives as long as the graph keeps something of it.

    Args:
        before: The call before it, whose backward comes next.
    """

    def __init__(self, block: nn.Module, before: ref[_Call] | None) -> None:
        own = [part_of(tensor) for tensor in (*block.parameters(), *block.buffers())]
        self._storages = {storage_id(tensor.untyped_storage()) for tensor in own}
        self._shapes = {tensor.shape for tensor in own}
        self._before, self._is_needed = before, False
        self.memory: list[ref[_Memory]] = []
        """Memory that its backward needs."""

    def has_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight or buffer, a view of one, or a copy that ``autocast`` made of one."""
        if storage_id(tensor.untyped_storage()) in self._storages:
            return True
        base = base_of(tensor)
        whole = tensor if base is None else base
        return isinstance(whole, nn.Parameter) or (is_cast(whole) and whole.shape in self._shapes)

    def leave(self) -> None:
        """Let the memory of the device go."""
        for reference in self.memory:
            if (memory := reference()) is not None:
                memory.leave()

    def fetch(self) -> None:
        """Begin to bring everything back, in the order in which the backward needs it."""
        for reference in reversed(self.memory):
            if (memory := reference()) is not None:
                memory.fetch()

    def need(self) -> None:
        """Tell that its backward runs: the memory of the one that comes next begins to come back, too."""
        if self._is_needed:
            return
        self._is_needed = True
        self.fetch()
        if self._before is not None and (call := self._before()) is not None:
            call.fetch()
