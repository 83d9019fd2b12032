"""The store that a setting names: host memory, or files in a directory."""

from __future__ import annotations

from pathlib import Path

from lightning_3d.zero.offload.files import Files
from lightning_3d.zero.offload.store import HostMemory, Store


def make_store(place: str) -> Store:
    """The store of ``zero.offload_optimizer`` or ``zero.offload_params``, other than ``"none"``.

    Raises:
        OffloadError: it is a directory that can't be made or written, on this rank.
    """
    return HostMemory() if place == "cpu" else Files(Path(place).expanduser())
