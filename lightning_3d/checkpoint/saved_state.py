"""The state dicts in a checkpoint folder, as hooks that load a checkpoint see them: whole values, read when asked for.

Each rank reads by itself what its code asks for, from the file system that all of them share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

from typing_extensions import override

from lightning_3d.checkpoint.folder import Folder, TreePath


class SavedState(MutableMapping[str, Any]):
    """The values below one path in a folder, by name; hooks may change it, which leaves the folder as it is."""

    def __init__(self, folder: Folder, path: TreePath) -> None:
        self.folder, self.path = folder, path
        depth = len(path)
        names = (str(entry[depth]) for entry in folder.entries if entry[:depth] == path)
        self._values: dict[str, Any] = dict.fromkeys(names)
        self._unread = set(self._values)

    def split(self) -> tuple[frozenset[str], dict[str, Any]]:
        """The names of what was not asked for and is as in the files, and the rest, by name."""
        return frozenset(self._unread), {name: self._values[name] for name in self._values if name not in self._unread}

    def copy(self) -> SavedState:
        """Another of the same values; what it is told does not change this one."""
        other = copy(self)
        other._values, other._unread = dict(self._values), set(self._unread)
        return other

    def __or__(self, changes: Mapping[str, Any]) -> SavedState:
        other = self.copy()
        other.update(changes)
        return other

    @override
    def __getitem__(self, name: str) -> Any:
        if name in self._unread:
            self[name] = self.folder.read_below((*self.path, name))
        return self._values[name]

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._unread.discard(name)

    @override
    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self._unread.discard(name)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._values

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)
