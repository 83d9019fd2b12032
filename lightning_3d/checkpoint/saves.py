"""The saves of a run: one after another, at once or in the background, and the removal of what they replace.

    training   ... step | copy state | step | step | step | wait? copy state | step ...
    background                       | write, publish, remove the one before |        | write ...

A callback that keeps the best checkpoints removes one as soon as it has saved another. Here a removal comes after the
save before it has succeeded, so that there is always a complete checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.checkpoint.staging import Staging
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.errors import CheckpointError

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
        self._flight: _Flight | None = None
        self._group: _Group = None  # of all ranks, for the background
        self._staging = Staging()
        self._removals = _Removals()

    def begins(self, path: str | os.PathLike[str], *, may_skip: bool) -> bool:
        """Whether a save begins now; waits for the one before, if it is not left out for that.

        Args:
            may_skip: Whether another save will come.
        """
        if self._settings.while_saving == "skip" and self._is_busy(may_skip=may_skip):
            rank_zero_warn(
                f"{path} is not saved, as the checkpoint before is still being written and checkpoint.while_saving is"
                " 'skip'."
            )
            self._removals.next_save()
            return False
        self.wait()
        return True

    def save(
        self,
        path: str | os.PathLike[str],
        content: _Content,
        write: Callable[[_Content, _Group], None],
        is_running: bool,
    ) -> None:
        """Write a checkpoint now or in the background.

        Args:
            path: Its path.
            content: Tensors and other values in nested containers, that training may change afterwards.
            write: Called with the content, or a copy of it, and the group to do collectives in, if not the default.
            is_running: Whether training goes on, which it would hold up; else it is never in the background.

        Raises:
            CheckpointError: It can't be written, unless failures are to be warned of.
        """
        number = self._removals.next_save()
        self._removals.forget(os.fspath(path))
        if not (is_running and self._settings.async_save):
            try:
                write(content, None)
            except CheckpointError as error:
                self._fail(error)
            else:
                self._removals.succeed(number, os.fspath(path))
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        copy, group = self._staging.copied(content), self._group
        self._flight = _Flight(lambda: write(copy, group), lambda: self._removals.succeed(number, os.fspath(path)))

    def once_saved(self, path: str | os.PathLike[str], act: Callable[[], None]) -> None:
        """Remove a checkpoint, or change a link to one, once the save before has succeeded.

        Args:
            path: The checkpoint or the link.
            act: Removes or changes it; only the last of several counts. Others that were given later follow.
        """
        self._removals.add(os.fspath(path), act)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: It could not be written, unless failures are to be warned of; on all ranks.
        """
        if self._flight is None:
            return
        error, self._flight = self._flight.join(), None
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, None if error is None else str(error))
        if (reason := next((each for each in reasons if each is not None), None)) is not None:
            self._fail(CheckpointError(reason))

    def finish_alone(self) -> None:
        """Wait for the save in the background when other ranks may not; its failure is logged."""
        if self._flight is not None:
            error, self._flight = self._flight.join(), None
            if error is not None:
                _log.error("%s", error)

    def close(self) -> None:
        """End what the saves have made; nothing is being written any more."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._staging = Staging()

    def _is_busy(self, *, may_skip: bool) -> bool:
        """Whether the save before goes on, on any rank, and all of them may leave out another."""
        if self._flight is None:
            return False
        found: list[tuple[bool, bool]] = [(False, False)] * dist.get_world_size()
        dist.all_gather_object(found, (self._flight.is_alive, may_skip))
        return any(is_alive for is_alive, _ in found) and all(may for _, may in found)

    def _fail(self, error: CheckpointError) -> None:
        if self._settings.on_save_failure == "raise":
            raise error
        rank_zero_warn(
            f"{error} Training goes on without this checkpoint, as checkpoint.on_save_failure is 'warn'; those before"
            " stay until another one is written."
        )


class _Flight:
    """A save in the background."""

    def __init__(self, write: Callable[[], None], succeed: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._write, self._succeed = write, succeed
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
            self._succeed()
        except Exception as error:
            self._error = error
            _log.error("%s", error)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Exception | None:
        self._thread.join()
        return self._error


class _Removals:
    """Removals of checkpoints, each held back until the save that came before it has succeeded.

    If that one failed, a later one into the same folder allows it: what another callback saves replaces nothing there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, Callable[[], None]]] = {}
        self._last, self._succeeded = 0, 0

    def next_save(self) -> int:
        """The number of a save that is due."""
        self._last += 1
        return self._last

    def succeed(self, number: int, saved: str) -> None:
        """Carry out what this save, which has succeeded, allows."""
        with self._lock:
            self._succeeded = number
            folder = os.path.dirname(saved)
            earlier = {path: last for path, (last, _) in self._held.items() if last <= number}
            due = [path for path in earlier if earlier[path] == number or os.path.dirname(path) == folder]
            acts = [self._held.pop(path)[1] for path in due]
        for act in acts:
            act()

    def add(self, path: str, act: Callable[[], None]) -> None:
        """Carry it out now or later."""
        with self._lock:
            if self._succeeded < self._last:
                self._held[path] = self._last, act
                return
        act()

    def forget(self, path: str) -> None:
        """There will be another checkpoint at this path."""
        with self._lock:
            self._held.pop(path, None)
