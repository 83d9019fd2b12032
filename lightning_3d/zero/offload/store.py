"""Memory for what does not lie on the device: that of the host, or files mapped into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override


class Store(ABC):
    """Holds tensors of the CPU device."""

    can_fail: ClassVar[bool] = False
    """Whether room may be missing."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it is a view of, lies here."""

    @abstractmethod
    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new tensor.

        Raises:
            OffloadError: there is no room.
        """

    @abstractmethod
    def reserve(self, num_bytes: int) -> None:
        """Make sure of room for tensors that come.

        Raises:
            OffloadError: there is none.
        """

    def size_of(self, num_bytes: int) -> int:
        """Bytes of room that a tensor of so many bytes takes."""
        return num_bytes

    @abstractmethod
    def will_need(self, tensors: Iterable[Tensor]) -> None:
        """Begin to bring near what is used soon; other tensors are ignored."""

    @abstractmethod
    def need(self, tensors: Iterable[Tensor]) -> None:
        """Tell what is written now; other tensors are ignored."""

    @abstractmethod
    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Tell what is not used for a while; other tensors are ignored."""


class HostMemory(Store):
    """The memory of the host. Not pinned: states stay there, only parameters and gradients travel."""

    @override
    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    @override
    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    @override
    def reserve(self, num_bytes: int) -> None:
        """Nothing."""

    @override
    def will_need(self, tensors: Iterable[Tensor]) -> None:
        """Nothing."""

    @override
    def need(self, tensors: Iterable[Tensor]) -> None:
        """Nothing."""

    @override
    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Nothing."""
