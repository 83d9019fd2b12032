"""Who starts the processes of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning.pytorch.strategies import ParallelStrategy

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import refuse_unbuilt, resolve_mesh_shape
from lightning_3d.run.decide.requirements import refuse_offload
from lightning_3d.run.ranks import ProcessSettings, number_of_processes
from lightning_3d.torch_internals.launchers import ForkLauncher, RunLauncher, ScriptLauncher, is_forked


def make_launcher(
    strategy: ParallelStrategy,
    settings: ProcessSettings,
    config: ThreeDConfig,
    num_nodes: int,
    *,
    fail: Callable[[BaseException], Exception | None],
    full_weights: Callable[[], AbstractContextManager[None]],
) -> RunLauncher:
    """Choose between forks of this process and runs of the script.

    Args:
        fail: Takes an exception that ends a run; returns another to raise in its place, if any.
        full_weights: A context, entered by all ranks, in which the model is that of one process.

    Raises:
        ConfigError: no run could follow the settings; before any process is started.
    """
    assert strategy.cluster_environment is not None
    num_processes, device = number_of_processes(strategy), strategy.root_device
    refuse_unbuilt(resolve_mesh_shape(config, num_nodes * num_processes))
    refuse_offload(config.activations, device)
    is_on_one_gpu = num_processes == 1 and device.type != "cpu"  # which may be in use already
    if is_forked(strategy.cluster_environment, settings.start_method) and not is_on_one_gpu:
        return ForkLauncher(strategy, fail, full_weights)
    # Starts none under torchrun or SLURM, but checks that they started as many as the Trainer expects.
    return ScriptLauncher(strategy.cluster_environment, num_processes, num_nodes, fail)
