"""Checkpoints as one process reads them: folders of any layout, and plain files, a tensor at a time."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_3d.checkpoint.atomic import completed
from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.checkpoint.damage import damage, has_checksums, raise_of_damage
from lightning_3d.checkpoint.folder import MODEL, TIED, Folder, TreePath, is_sharded_checkpoint, nested, read_rest
from lightning_3d.checkpoint.further_states import sections_inside
from lightning_3d.checkpoint.lazy import LazyTensor
from lightning_3d.checkpoint.manifest import META
from lightning_3d.errors import CheckpointError, CheckpointNotFoundError
from lightning_3d.torch_internals.pytree import tree_map_only


class Source(ABC):
    """A checkpoint. In what it gives, tensors are `LazyTensor`; names that are tied have the same."""

    path: Path

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """The state of the model, by FQN."""

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """Everything, as a plain Trainer has it in a file; "optimizer_states" are there if they were saved.

        Raises:
            CheckpointError: it holds what may not be unpickled, or can't be read.

        """


def open_source(path: Path, *, weights_only: bool) -> Source:
    """Open a checkpoint.

    Args:
        weights_only: As in ``torch.load``.

    Raises:
        CheckpointNotFoundError: There is nothing.
        CheckpointError: It is no checkpoint, or can't be read.

    """
    path = completed(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}")
    if path.is_dir() and not is_sharded_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint: a folder of one has the file {META}")
    if path.is_file() and not has_checksums(path):
        raise CheckpointError(f"{path} is no checkpoint: torch.save writes zip files, and it is none")
    raise_of_damage(path, damage(path))
    return _File(path, weights_only) if path.is_file() else _Folder(path, weights_only)


class _File(Source):
    def __init__(self, path: Path, weights_only: bool) -> None:
        self.path = path
        with _unpickling(path):
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        if not isinstance(loaded, dict) or not isinstance(loaded.get(MODEL), Mapping):
            raise CheckpointError(f'{path} is no checkpoint of a Trainer: it has no "{MODEL}"')
        known: dict[object, LazyTensor] = {}
        self._loaded: dict[str, Any] = tree_map_only(Tensor, lambda tensor: known.setdefault(*_stored(tensor)), loaded)

    @override
    def weights(self) -> dict[str, Any]:
        return dict(self._loaded[MODEL])

    @override
    def checkpoint(self) -> dict[str, Any]:
        return self._loaded


def read_folder(path: object, map_location: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """A checkpoint folder as one dictionary, for ``MyModule.load_from_checkpoint``; None where there is none.

    Args:
        map_location: As in ``torch.load``.
        weights_only: The same.

    Returns:
        The contents of a file, but for the states of optimizers.
    """
    if not isinstance(path, str | Path) or not is_sharded_checkpoint(Path(path)):
        return None
    raise_of_damage(Path(path), damage(Path(path)))
    folder = Folder.open(Path(path), weights_only=weights_only)
    rest = read_rest(folder.location, map_location=map_location, weights_only=weights_only)
    state = io.BytesIO()
    torch.save(folder.read_below((MODEL,)), state)
    state.seek(0)
    return {**rest, MODEL: torch.load(state, map_location=map_location, weights_only=False)}


def _stored(tensor: Tensor) -> tuple[object, LazyTensor]:
    """A tensor, and by which it is the same as others that are tied to it."""
    if tensor.layout != torch.strided:
        raise CheckpointError(f"the checkpoint holds a tensor of {tensor.layout}, which can't be exported")
    info = TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)
    place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else id(tensor)
    return place, LazyTensor(info=info, make=lambda: tensor.detach())


class _Folder(Source):
    def __init__(self, path: Path, weights_only: bool) -> None:
        self.path, self._weights_only = path, weights_only
        self._folder = Folder.open(path, weights_only=weights_only)

    @override
    def weights(self) -> dict[str, Any]:
        state = self._section(MODEL)
        for other, first in self._section(TIED).items():
            there, here = state.get(first), state.get(other)
            if isinstance(there, LazyTensor) and isinstance(here, LazyTensor) and _same(there, here):
                state[other] = there
        return state

    @override
    def checkpoint(self) -> dict[str, Any]:
        with _unpickling(self.path):
            rest = read_rest(self.path, weights_only=self._weights_only)
        rest = sections_inside(rest, self._section)
        known: dict[object, LazyTensor] = {}
        rest = tree_map_only(Tensor, lambda tensor: known.setdefault(*_stored(tensor)), rest)
        whole = {**rest, MODEL: self.weights()}
        if "lr_schedulers" in rest:  # they are saved with the optimizers
            whole["optimizer_states"] = [self._optimizer(name) for name in self._folder.optimizer_sections()]
        return whole

    def _section(self, name: str) -> dict[str, Any]:
        return self._by_fqn((name,))

    def _optimizer(self, section: str) -> dict[str, Any]:
        """The state of an optimizer, by the numbers that torch gives to parameters."""
        groups = nested([*self._below((section, "param_groups")).items()])
        states = self._by_fqn((section, "state"))
        fqns = [fqn for group in groups for fqn in group["params"]]
        numbers = {fqn: number for number, fqn in enumerate(fqns)}
        if strange := states.keys() - numbers.keys():
            raise CheckpointError(
                f"{self.path} has states of {min(strange)} in {section}, which is in none of its groups"
            )
        return {
            "state": {numbers[fqn]: states[fqn] for fqn in fqns if fqn in states},
            "param_groups": [{**group, "params": [numbers[fqn] for fqn in group["params"]]} for group in groups],
        }

    def _by_fqn(self, start: TreePath) -> dict[str, Any]:
        leaves: dict[str, list[tuple[TreePath, Any]]] = {}
        for path, value in self._below(start).items():
            leaves.setdefault(str(path[0]), []).append((path[1:], value))
        return {fqn: nested(of_fqn) for fqn, of_fqn in leaves.items()}

    def _below(self, start: TreePath) -> dict[TreePath, Any]:
        """Everything that was saved under a path, by the rest of its path."""
        entries = {path: entry for path, entry in self._folder.entries.items() if path[: len(start)] == start}
        plain = [path for path, entry in entries.items() if entry.tensor is None]
        with _unpickling(self.path):
            values = dict(zip(plain, self._folder.read_alone(plain), strict=True)) if plain else {}
        return {
            path[len(start) :]: values[path]
            if entry.tensor is None
            else LazyTensor(info=entry.tensor, make=partial(self._read, path))
            for path, entry in entries.items()
        }

    def _read(self, path: TreePath) -> Tensor:
        with _unpickling(self.path):
            (tensor,) = self._folder.read_alone([path])
        assert isinstance(tensor, Tensor)
        return tensor


def _same(first: LazyTensor, second: LazyTensor) -> bool:
    """Whether two tensors of a folder are equal."""
    return first.info == second.info and torch.equal(first.make(), second.make())


@contextmanager
def _unpickling(path: Path) -> Iterator[None]:
    """Say in one line what was wrong with a file."""
    try:
        yield
    except (Exception, CheckpointException) as raised:  # the latter is a BaseException
        error = next(iter(raised.failures.values()))[0] if isinstance(raised, CheckpointException) else raised
        if isinstance(error, CheckpointError):
            raise error from None
        if isinstance(error, UnpicklingError) and "weights_only" in str(error):
            raise CheckpointError(
                f"{path} holds objects of classes that are not unpickled, as they may run code: where you trust it, set"
                " weights_only=False (--trusted)"
            ) from error
        line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is no checkpoint, or damaged: {line}") from error
