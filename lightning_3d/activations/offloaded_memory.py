"""The memory behind tensors that autograd saved, on the device or on the host."""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.activations.transfers import Transfer, Transfers


class _Place(Enum):
    LEAVING = auto()  # on the device, and being copied to the host; leave() -> AWAY, fetch() -> THERE
    AWAY = auto()  # on the host; fetch() -> COMING
    COMING = auto()  # being copied to the device; get() -> THERE
    THERE = auto()  # on the device, until nobody needs it


class OffloadedMemory:
    """A storage that is copied to the host, leaves the device, and comes back once.

    It is copied as a whole, as autograd would keep it as a whole: tensors that share it still do when it is back.

    Args:
        storage: It must not change before it has left.
        transfers: Begins the copies.
    """

    def __init__(self, storage: UntypedStorage, transfers: Transfers) -> None:
        self._identity = StorageWeakRef(storage)  # no other storage gets it while this lives
        self._transfers = transfers
        self._device: Tensor | None = _bytes_of(storage)
        self._host: Tensor | None = None
        self._transfer: Transfer | None = transfers.to_host(self._device)
        self._place = _Place.LEAVING

    def leave(self) -> None:
        """Let the memory of the device go, once its copy is done."""
        if self._place is _Place.LEAVING:
            assert self._transfer is not None
            self._host, self._device, self._transfer = self._transfer.wait(), None, None
            self._place = _Place.AWAY

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._place is _Place.LEAVING:
            self._place = _Place.THERE
        elif self._place is _Place.AWAY:
            assert self._host is not None
            self._transfer, self._host = self._transfers.to_device(self._host), None
            self._place = _Place.COMING

    def get(self) -> UntypedStorage:
        """The storage on the device, for what is computed from now on."""
        self.fetch()
        if self._place is _Place.COMING:
            assert self._transfer is not None
            self._device, self._transfer = self._transfer.wait(), None
            self._place = _Place.THERE
        assert self._device is not None
        return self._device.untyped_storage()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
