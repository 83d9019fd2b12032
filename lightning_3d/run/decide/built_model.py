"""A model as its author built it: checked, converted, and noted before ranks take their parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d.distributed.rng import join_replica
from lightning_3d.model.initial_weights import check_same_model, is_on_meta, place_buffers
from lightning_3d.planning.held import StateShapes
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.compiled_code import warn_of_compiled
from lightning_3d.run.decide.requirements import check_model
from lightning_3d.torch_internals.launchers import RunLauncher
from lightning_3d.torch_internals.lightning_helpers import layer_sync_of, leave_out_module_names

_NO_PATHS = (None, "best", "last", "hpc", "registry")
"""Values of ``ckpt_path`` for which there may be no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """The things about a model that are known only as long as every rank has the whole of it."""

    names: Mapping[nn.Parameter, str]
    """Names of its parameters, as optimizers hold them that LightningCLI has made from the command line."""
    shapes: StateShapes
    is_empty: bool
    """Whether it was built on the meta device, for a checkpoint to fill."""


def prepare_model(context: RunContext) -> BuiltModel:
    """Check a model and bring it into the form that steps run it in; every rank calls it.

    Raises:
        StepError: it can't be made parallel.
        PlanError: the ranks were given different models, or one without weights.
    """
    module, shape, config, device = context.module, context.mesh.shape, context.config, context.device
    check_model(module, config, shape)
    names = WeakIdKeyDictionary({p: fqn for fqn, p in module.named_parameters()})
    context.precision.convert(module, config.precision, device)
    syncing = layer_sync_of(context.strategy)
    if syncing is not None and shape.size("samples") > 1:
        syncing.apply(module)
    if shape.is_model_parallel:
        warn_of_compiled(module)
    if shape.is_model_parallel or config.activations.plans_memory:
        leave_out_module_names(context.trainer)
    launcher = context.strategy.launcher
    assert isinstance(launcher, RunLauncher)
    check_same_model(module, is_restored=launcher.ckpt_path not in _NO_PATHS)
    built = BuiltModel(names=names, shapes=StateShapes(module), is_empty=is_on_meta(module))
    place_buffers(module, device)
    join_replica(context.mesh, device)
    return built
