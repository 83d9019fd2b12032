"""The launcher of the Trainer, through which every exception of a run leaves it before anything is torn down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_3d.torch_internals import lightning_helpers


class Launcher(lightning_helpers.ScriptLauncher):
    """Starts the other processes of a node by running the script again, unless they were started already.

    Args:
        fail: Takes an exception that ends a run; returns another to raise in its place, if any.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        fail: Callable[[BaseException], Exception | None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._fail = fail

    def failed_children(self) -> Iterator[tuple[int, int]]:
        """Local rank and exit code of each process that this one started and that has failed."""
        for local_rank, process in enumerate(self.procs, start=1):
            if process.poll():
                yield local_rank, process.returncode

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on all ranks; what it raises is told to all of them."""
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except lightning_helpers.TunerExit:
            raise
        except BaseException as error:
            if (named := self._fail(error)) is None:
                raise
            raise named from error
