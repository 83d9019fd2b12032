"""Settings of torch that code around a block may have for its forward alone, for the recomputation of that forward.

The default dtype, which a precision may set for forwards alone, and the kernels that attention may choose from
(``torch.nn.attention.sdpa_kernel``), which keep different tensors. Autocast is kept by torch's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda

_KERNELS = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
"""Whether attention may choose a kernel, and what sets that."""


class TorchSettings:
    """The settings as they are now."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._kernels = [is_enabled() for is_enabled, _ in _KERNELS]  # type: ignore[no-untyped-call]  # torch 2.13

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have them inside, and those of now afterwards."""
        now = TorchSettings()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_default_dtype(self._dtype)
        for (_, enable), is_enabled in zip(_KERNELS, self._kernels, strict=True):
            enable(is_enabled)
