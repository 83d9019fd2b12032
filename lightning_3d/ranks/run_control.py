"""The control of a run on several ranks: who lives, who failed, and which signals all of them heed together."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import RankError
from lightning_3d.ranks.ending import settle
from lightning_3d.ranks.epochs import Epochs
from lightning_3d.ranks.failure import Failure, ended_by, is_lost_connection
from lightning_3d.ranks.interrupts import Interrupts
from lightning_3d.ranks.process_exit import abort_at_end, stay_until
from lightning_3d.ranks.standstill import Standstill
from lightning_3d.ranks.status_store import StatusStore
from lightning_3d.ranks.stops import Stops
from lightning_3d.ranks.watchdog import RankStatus, Watchdog
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.launchers import RunLauncher
from lightning_3d.torch_internals.patches import replaced


class RunControl:
    """The control of one run of the Trainer, such as a fit, on several ranks; every rank opens and closes it.

    Args:
        timeout: Seconds without a sign of life after which a process counts as stopped.
        launcher: Its processes are ended with this one where the main thread of this one can't end.
    """

    def __init__(self, trainer: Trainer, shape: MeshShape, launcher: RunLauncher, *, timeout: float) -> None:
        self._trainer, self._launcher = trainer, launcher
        self._status = RankStatus(
            store=StatusStore.open(),
            rank=dist.get_rank(),
            names=[_name(shape, rank) for rank in range(shape.world_size)],
            step=self._step,
        )
        self._stops = Stops(self._status, may_wait=lambda: self._watchdog.failure is None)
        self._epochs = Epochs(self._status, timeout=timeout)
        self.standstill = Standstill(self._status)
        self._interrupts = Interrupts(
            self._status,
            self._stops,
            is_ending=lambda: self._watchdog.is_ending,
            is_fit=trainer.state.fn == TrainerFn.FITTING,
        )
        polls = [
            self._look_at_children,
            self._stops.look,
            self._stop_evaluation,
            self._epochs.look,
            self.standstill.look,
            self._interrupts.look,
        ]
        self._watchdog = Watchdog(self._status, timeout=timeout, polls=polls, before_exit=self._kill_children)
        self._open = ExitStack()
        self.has_failed = False
        """Whether ranks failed apart from each other, after which no collective would end."""

    # ---- a run that goes well

    def __deepcopy__(self, memo: dict[int, object]) -> RunControl:
        """Itself, which the Trainer knows: it belongs to the process."""
        return self

    def open(self) -> None:
        """Watch from here on."""
        self._watchdog.start()
        atexit.register(self.close)
        self._open.callback(atexit.unregister, self.close)
        self._open.enter_context(lightning_helpers.signals_noted(self._trainer, self._note, self._note))
        self._open.enter_context(lightning_helpers.called_before_batches(self._trainer, self.heed_signals))
        default = signal.getsignal(signal.SIGINT)
        self._open.callback(lightning_helpers.put_back_at_end, self._trainer, signal.SIGINT, default)
        self._open.enter_context(self._interrupts.noted())

    def place(self, shape: MeshShape) -> None:
        """Name ranks by their places on another mesh."""
        self._status.names[:] = [_name(shape, rank) for rank in range(shape.world_size)]

    def begin_batch(self) -> None:
        """Before each training step."""
        loop = self._trainer.fit_loop.epoch_loop
        number = loop.batch_progress.current.ready
        self._epochs.begin_batch(self._trainer.current_epoch, number, is_last=self._trainer.is_last_batch)

    def close(self) -> None:
        """Watch no more."""
        with closing(self._watchdog):
            self._open.close()
        if self.has_failed:  # the board may have ended with the rank that failed first
            return
        store, names = self._status.store, [f"left/{rank}" for rank in self._status.others]
        with suppress(dist.DistError):
            self._epochs.tell()
            store.put(f"left/{self._status.rank}", "")
        if self._status.rank == 0:
            stay_until(lambda: store.get_all(names) is not None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._stops.ask(signum)

    def heed_signals(self) -> None:
        """Do what a signal asks for where all ranks have agreed to. Every rank calls it before each batch.

        Raises:
            SIGTERMException: the run is to end.
            KeyboardInterrupt: the user has interrupted it.
        """
        self._heed(self._stops.before_batch())

    def handle_signals_collectively(self) -> None:
        """The same after setup and after the last batch, with signals that came just now."""
        self._stops.look_together()
        self._heed(self._stops.before_batch())

    def _heed(self, signum: int | None) -> None:
        if signum == signal.SIGTERM:
            lightning_helpers.stop_in_time(self._trainer)
            raise SIGTERMException
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        if signum is not None:
            lightning_helpers.requeue(self._trainer, signum)

    def _stop_evaluation(self) -> None:
        """Outside of a fit, batches need no agreement: each rank ends after its own."""
        if self._stops.pending == signal.SIGTERM and self._trainer.state.fn != TrainerFn.FITTING:
            lightning_helpers.stop_in_time(self._trainer)

    # ---- a run that fails

    def fail(self, error: BaseException, patches: ExitStack) -> RankError | None:
        """Tell the other ranks of an exception, and what to raise in its place, if it says only that others are gone.

        Args:
            patches: Undone when the run has ended.
        """
        ending = settle(self._status, self._watchdog, error, explained=self._epochs.shorter)
        if ending.is_alike:
            return None
        self.has_failed = True
        abort_at_end()
        patches.enter_context(_saving_refused(self._trainer, ending.first))
        place = self._status.failed("").place
        if ending.first.rank == self._status.rank:
            error.add_note(f"{place} failed first")
            return None
        return RankError(f"{place} ends, because it waited for {ending.first}") if is_lost_connection(error) else None

    def _look_at_children(self) -> None:
        for local_rank, code in self._launcher.failed_children():
            how = f"by {ended_by(signal.Signals(-code))}" if code < 0 else f"with exit code {code}"
            failure = self._status.silent(self._status.rank + local_rank, f"its process ended {how}")
            self._status.store.put_first("failure", failure.to_text())

    def _kill_children(self) -> None:
        self._launcher.kill(signal.SIGKILL)

    def _step(self) -> str:
        stage = self._trainer.state.stage
        return f"{'setup' if stage is None else stage.value} step {self._trainer.global_step}"


@contextmanager
def _saving_refused(trainer: Trainer, failure: Failure) -> Iterator[None]:
    """Let callbacks that save on exceptions save nothing, as not all ranks are there to do it."""

    def refuse(filepath: object, *args: object, **kwargs: object) -> None:
        rank_zero_warn(f"{filepath} is not saved, which needs all ranks: {failure}")

    with replaced("saving", trainer, {"save_checkpoint": refuse}):
        yield


def _name(shape: MeshShape, rank: int) -> str:
    place = shape.coordinate(rank)
    return f"rank {rank} (pipeline stage {place.pp}, data {place.dp}, tensor {place.tp})"
