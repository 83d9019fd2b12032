"""Launching a run of the Trainer on all ranks, by launchers that Lightning keeps private."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from lightning_3d.errors import StepError

_GRACE = 5.0  # seconds in which ranks may come to an error of their own
_UNTIL_ENDED = 10.0  # seconds that a process has to raise and print its error after one that it started has failed


class ProcessObserver(_ChildProcessObserver):
    """Kills the process that started others where one of those has failed, unless it ends by itself in time.

    Lightning 2.6 kills it at once, so that its own error may not be printed.

    Args:
        patience: Seconds that it has.
        other arguments: Lightning's.
    """

    def __init__(self, main_pid: int, child_processes: list[subprocess.Popen[bytes]], patience: float) -> None:
        super().__init__(main_pid, child_processes)
        self._patience = patience

    @override
    def _terminate_all(self) -> None:
        time.sleep(self._patience)  # in a daemon thread, which ends with the process
        super()._terminate_all()


class RunLauncher(_Launcher):
    """Launches runs of the Trainer such as ``fit``, and sees each of their exceptions before anything is torn down.

    It notes the arguments ``weights_only`` of ``fit``, ``test`` and the like, which Lightning 2.6 does not hand on to
    strategies that restore after setup, and ``ckpt_path``, which they are told after it.
    """

    weights_only: bool | None = None
    ckpt_path: str | os.PathLike[str] | None = None
    procs: list[Any]
    """Processes that this one started."""
    _fail: Callable[[BaseException], Exception | None]
    """Takes an exception that ends a run; returns another to raise in its place, if any."""

    def failed_children(self) -> Iterator[tuple[int, int]]:
        """Local rank and exit code of each process that this one started and that has failed."""
        for local_rank, process in enumerate(self.procs, start=1):
            if process.poll():
                yield local_rank, process.returncode

    @contextmanager
    def _noted(self, function: Callable[..., object], *args: object, **kwargs: object) -> Iterator[None]:
        """Around a call of the function with these arguments."""
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        self.weights_only, self.ckpt_path = arguments.get("weights_only"), arguments.get("ckpt_path")
        try:
            yield
        except _TunerExitException:  # ends a fit of the Tuner, which is no failure
            raise
        except BaseException as error:
            if (named := self._fail(error)) is None:
                raise
            raise named from None  # that a connection was lost says no more


class ScriptLauncher(RunLauncher, _SubprocessScriptLauncher):
    """Starts the other processes of a node by running the script again, unless they were started already."""

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        fail: Callable[[BaseException], Exception | None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._fail = fail

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.num_processes == self.num_nodes == 1  # nothing is started

    @override
    def launch(
        self, function: Callable[..., object], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> object:
        with self._noted(function, *args, **kwargs):
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            if not (self.cluster_environment.creates_processes_externally or self.is_interactive_compatible):
                self._call_children_scripts()
                ProcessObserver(os.getpid(), self.procs, _UNTIL_ENDED).start()
            _set_num_threads_if_needed(num_processes=self.num_processes)
            try:
                return function(*args, **kwargs)
            except BaseException:
                if not dist.is_initialized():  # the others wait for this one, until they time out
                    self._end_children()
                raise

    def _end_children(self) -> None:
        deadline = time.monotonic() + _GRACE
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):  # each may come to the same error
                process.wait(max(deadline - time.monotonic(), 0.0))
            process.terminate()


class ForkLauncher(RunLauncher, _MultiProcessingLauncher):
    """Forks a process for each rank, as for ``ddp_notebook``: in a notebook there is no script to run again.

    The process that is forked is no rank. It gets the trained weights, the metrics and what ``fit`` or the like gives.

    Args:
        full_weights: A context, entered by all ranks, in which the model's ``state_dict`` is that of one process.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        fail: Callable[[BaseException], Exception | None],
        full_weights: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(strategy, start_method="fork")
        self._fail, self._full_weights = fail, full_weights

    @override
    def launch(
        self, function: Callable[..., object], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> object:
        def run() -> object:
            torch.set_num_threads(1)  # the threads of OpenMP, if this process has had any, are not forked
            with self._noted(function, *args, **kwargs):
                return function(*args, **kwargs)

        if dist.is_initialized():  # gloo's threads
            raise StepError(
                "Ranks are forks of this process, which has process groups already, as after a run on one GPU, and"
                " these can't be forked: restart the kernel, or run a script with start_method='popen'."
            )
        self.procs = []
        return super().launch(run, trainer=trainer)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: object) -> Any:
        with self._full_weights():
            return super()._collect_rank_zero_results(trainer, results)


def is_forked(environment: ClusterEnvironment, start_method: str) -> bool:
    """Whether nobody else starts the processes, and forks are asked for or Python runs interactively."""
    return (_IS_INTERACTIVE or start_method == "fork") and not environment.creates_processes_externally
