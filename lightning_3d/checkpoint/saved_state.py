"""A state dict of a checkpoint folder as hooks that load a checkpoint see it: full values, read when asked for.

Each rank reads by itself what its code asks for, from the file system that all of them share.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from lightning_3d.checkpoint.lazy import made


class SavedState(UserDict[str, Any]):
    """Values by name; hooks may change them, which leaves the folder as it is.

    Args:
        values: Tensors, or containers of them, are lazy until somebody asks for them.
    """

    @override
    def __getitem__(self, name: str) -> Any:
        value = self.data[name] = made(self.data[name])
        return value

    @override
    def copy(self) -> SavedState:
        return SavedState(self.data)


def unread(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a state dict as they are: lazy where nobody has asked for them."""
    return state.data if isinstance(state, SavedState) else state
