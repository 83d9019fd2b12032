"""The saves of a run: one after another, at once or in the background, and the removal of what they replace.

    training   ... step | copy state | step | step | step | wait? copy state | step ...
    background                       | write, publish, remove the one before |        | write ...

A callback that keeps the best checkpoints removes one as soon as it has saved another. Here a removal comes after the
save before it has succeeded, so that there is always a complete checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import Share
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.distributed.agreement import raise_alike
from lightning_3d.torch_internals.dtensor import placed
from lightning_3d.torch_internals.pytree import tree_map

_log = logging.getLogger(__name__)

_Group = dist.ProcessGroup | None
_Content = TypeVar("_Content")


class Saves:
    """The saves of one run; all ranks call its methods alike, but for `once_saved`.

    Args:
        settings: How checkpoints are written.
        timeout: The timeout of collectives in the background.
    """

    def __init__(self, settings: CheckpointConfig, timeout: timedelta) -> None:
        self._settings, self._timeout = settings, timeout
        self._group: _Group = None  # of all ranks, for the background
        self._thread: threading.Thread | None = None  # that writes, or has written, one in the background
        self._error: Exception | None = None  # that it ran into
        self._due: list[Callable[[], None]] | None = None  # removals, until it is written
        self._lock = threading.Lock()  # for them

    def save(self, content: _Content, write: Callable[[_Content, _Group], None], is_running: bool) -> None:
        """Write a checkpoint now or in the background, where none is being written.

        Args:
            content: Tensors and other values in nested containers, that training may change afterwards.
            write: Called with the content, or a copy of it, and the group to do collectives in, if not the default.
            is_running: Whether training goes on, which it would hold up; else it is never in the background.

        Raises:
            CheckpointError: It can't be written.
        """
        if not (is_running and self._settings.async_save):
            write(content, None)
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._due, act = [], partial(write, _copied(content), self._group)
        self._thread = threading.Thread(target=self._run, args=[act], name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
            with self._lock:
                due, self._due = self._due, None
            for remove in due or ():
                remove()
        except Exception as error:
            self._error = error
            _log.error("%s", error)

    def once_saved(self, remove: Callable[[], None]) -> None:
        """Remove a checkpoint once the save before has succeeded, and never if it fails."""
        with self._lock:
            if self._due is not None:
                self._due.append(remove)
                return
        remove()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: It could not be written; on all ranks.
            OSError: It is written, but an older one could not be removed; on all ranks.
        """
        if self._thread is not None:
            raise_alike(self._ended())

    def finish_alone(self) -> None:
        """Wait for the save in the background when other ranks may not; its failure is logged."""
        if self._thread is not None:
            self._ended()

    def _ended(self) -> Exception | None:
        assert self._thread is not None
        self._thread.join()
        error, self._thread, self._error, self._due = self._error, None, None, None
        return error

    def close(self) -> None:
        """End what the saves have made; nothing is being written any more."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@torch.no_grad()
def _copied(tree: _Content) -> _Content:
    """Copies of the tensors on the CPU, pinned where they come from CUDA, whose allocator keeps them for the next save;
    and of everything else. A tensor in several places has one copy.
    """
    copies: dict[int, Tensor] = {}

    def copied(leaf: object) -> Any:
        if isinstance(leaf, Share):
            return replace(leaf, tensor=copied(leaf.tensor))
        if not isinstance(leaf, Tensor):
            return deepcopy(leaf)
        if id(leaf) not in copies:
            copies[id(leaf)] = _on_host(leaf.detach())
        return copies[id(leaf)]

    found: _Content = tree_map(copied, tree)
    return found


def _on_host(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = _on_host(tensor.to_local())
        return placed(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
