"""The optimizers that a fit trains with: checked, divided over the ranks, and stepped on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_3d.checkpoint.box import Box, Share, boxes
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.tp_replica_sync import TPReplicaSync
from lightning_3d.errors import StepError
from lightning_3d.planning.optimizer_plan import KindFound, OptimizerPlan
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.requirements import check_optimizers
from lightning_3d.run.decide.unsafe_optimizers import refuse_collectives, refuse_wrappers
from lightning_3d.run.parallel.offload import offloaded_steps
from lightning_3d.run.parallel.parallel_model import ParallelModel
from lightning_3d.run.step.pending_gradients import gradients_seen
from lightning_3d.run.switched_settings import SwitchedSettings
from lightning_3d.sharding.placement import interleaved_parameters
from lightning_3d.torch_internals.autograd import is_in_backward
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.local_steps import LocalSteps
from lightning_3d.zero.optimizer_kind import OptimizerKind, is_known
from lightning_3d.zero.own_collectives import before_collectives
from lightning_3d.zero.owners import kinds_of
from lightning_3d.zero.whole_steps import WholeParameter, WholeSteps, parameters_on_all, whole_parameters


class TrainedOptimizers:
    """Optimizers that step a parallel model, until `close`; every rank makes it and calls its methods.

    Args:
        parallel: Gets a plan of how they step, and of what is recomputed within a budget.

    Raises:
        StepError: an optimizer would not train what it should.
        ConfigError: the ranks were given different ones.
        PlanError: a rank does not fit into its budget.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parallel: ParallelModel, context: RunContext) -> None:
        module, config, mesh = context.module, context.config, context.mesh
        precision, device = context.precision, context.device
        self.optimizers = list(optimizers)
        self._parallel = parallel
        zero, shows = parallel.zero, config.zero.show_gradients
        zero.shows_gradients = gradients_seen(context.trainer, module) if shows == "auto" else shows
        _replace_early(optimizers, parallel.built.names, module)
        kinds = check_optimizers(optimizers, module, mesh, config.zero, device)
        with ExitStack() as undone:
            zero.assign_shards(kinds)
            whole = _whole_parameters(zero, kinds, context)
            zero.whole = {shard.parameter: shard for shard in whole}
            planned = [_planned(optimizer, kind, whole, config.zero) for optimizer, kind in kinds.items()]
            parallel.plan = replace(parallel.plan, optimizers=tuple(planned))
            for plan in planned:
                if plan.received_bytes:
                    rank_zero_info(f"{plan}.")
            undone.callback(zero.release)
            precision.assign_shards(kinds, module, config.precision)
            masters = precision.master_weights()
            refuse_wrappers(optimizers, config.zero, has_masters=masters is not None)
            settings = SwitchedSettings(kinds, mesh.shape, config.zero, device)

            def before_step(optimizer: Optimizer) -> None:
                precision.refuse_unchecked(optimizer)
                settings.check(optimizer)

            self._steps = LocalSteps(
                zero,
                check=before_step,
                offload=offloaded_steps(config.zero, zero, device),
                masters=masters,
                whole=WholeSteps(whole, device),
                together={optimizer for optimizer, kind in kinds.items() if kind == "all"},
                has_gradients=not module.automatic_optimization,
                alike=TPReplicaSync(mesh.group("tp")) if mesh.shape.tp > 1 else None,
            )
            undone.enter_context(self._steps.hooked(optimizers))

            def before_collective() -> None:
                for optimizer in self._steps.running:
                    refuse_collectives(optimizer, kinds[optimizer], mesh.shape, config.zero)

            if not all(map(is_known, optimizers)):
                undone.enter_context(before_collectives(before_collective))
            if mesh.shape.pp > 1 or mesh.shape.size("state") > 1:
                undone.callback(register_optimizer_step_pre_hook(self._refuse_in_backward).remove)
            if parallel.budget is not None and not parallel.plan.memory:
                held = parallel.held(config, optimizers)
                parallel.plan = parallel.budget.plan(parallel.plan, module, held, config, mesh, device)
                parallel.apply_checkpointing(parallel.plan)
            if precision.scales_losses:
                undone.enter_context(schedulers_skipping(module, precision.skips))
            self._undone = undone.pop_all()

    def _refuse_in_backward(self, optimizer: Optimizer, *_: object) -> None:
        """Raise for a step that a hook of a gradient makes, where others have yet to add theirs."""
        own = self._parallel.zero.shards
        if is_in_backward() and any(p in own for group in optimizer.param_groups for p in group["params"]):
            raise StepError(
                f"{type(optimizer).__name__}.step() was called inside of a backward, as by a hook of a gradient, to"
                " which other replicas or microbatches have yet to add theirs. Return the optimizer from"
                " configure_optimizers and step it after the backward; against memory, zero.stage=2 or 3 shares"
                " gradients among the ranks, and zero.offload_optimizer='cpu' moves states to the host."
            )

    def begin_batch(self) -> None:
        """Before a training step."""
        self._steps.refuse_unfinished()

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the step of an optimizer."""
        try:
            yield
        finally:
            self._steps.leave(optimizer)
        self._parallel.runner.after_optimizer_step()

    def close(self) -> None:
        """Let optimizers step as torch's do."""
        self._undone.close()


def _whole_parameters(
    zero: Zero, kinds: Mapping[Optimizer, OptimizerKind], context: RunContext
) -> list[WholeParameter]:
    """The parameters that are stepped whole though ranks hold parts of them; every rank calls it."""
    if {"parameters", "all"}.isdisjoint(kinds.values()):
        return []
    named = dict(context.module.named_parameters())
    parts, steps = interleaved_parameters(context.module), kinds_of(named.values(), kinds)
    parts_of = {parameter: parts.get(fqn) for fqn, parameter in named.items()}

    def boxes_of(parameter: nn.Parameter, coordinate: Sequence[int]) -> list[Box]:
        assert isinstance(parameter, DTensor), "it is cut"
        shape, placements = parameter.device_mesh.shape, parameter.placements
        return boxes(parameter.shape, shape, coordinate, placements, parts_of[parameter])

    cut = [p for p, shard in zero.shards.items() if steps[p] == "parameters" and not shard.owned_by_other]
    together = {fqn: parameter for fqn, parameter in named.items() if steps[parameter] == "all"}
    shares = {fqn: Share(parameter, parts.get(fqn)) for fqn, parameter in together.items() if parameter in zero.shards}
    own_boxes = {fqn: share.boxes for fqn, share in shares.items()}
    is_cut = context.config.zero.stage == 3
    return [
        *whole_parameters(cut, context.mesh, boxes_of),
        *parameters_on_all(together, context.mesh, own_boxes, cuts_replicas=is_cut),
    ]


def _planned(
    optimizer: Optimizer, kind: OptimizerKind, whole: Sequence[WholeParameter], config: ZeroConfig
) -> OptimizerPlan:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return OptimizerPlan(
        name=type(optimizer).__name__,
        kind=kind,
        found=_how_found(optimizer, config),
        received_bytes=round(sum(each.received_bytes for each in whole if each.parameter in held)),
    )


def _how_found(optimizer: Optimizer, config: ZeroConfig) -> KindFound:
    """Whence it is known how much of a parameter an optimizer has to see."""
    if config.optimizer_steps != "auto":
        return "set by zero.optimizer_steps"
    return "known" if is_known(optimizer) else "tried on small tensors"


def _replace_early(optimizers: Sequence[Optimizer], early: Mapping[nn.Parameter, str], module: nn.Module) -> None:
    """Let optimizers that have done nothing yet hold the parameters of the same names that the module has now."""
    held, now = set(module.parameters()), dict(module.named_parameters(remove_duplicate=False))
    for optimizer in optimizers:
        for group in [] if optimizer.state else optimizer.param_groups:
            group["params"][:] = [p if p in held else now.get(early.get(p, ""), p) for p in group["params"]]


@contextmanager
def schedulers_skipping(module: LightningModule, skips: Callable[[Optimizer], bool]) -> Iterator[None]:
    """Let learning-rate schedulers that Lightning steps with every step of their optimizer skip those that it skips.

    Args:
        skips: Whether an optimizer has skipped its last step.
    """
    original = type(module).lr_scheduler_step

    def lr_scheduler_step(self: LightningModule, scheduler: Any, metric: Any) -> None:
        if self is not module or not _steps_with(scheduler, module, skips):
            original(self, scheduler, metric)

    with replaced("schedulers", type(module), {"lr_scheduler_step": lr_scheduler_step}):
        yield


def _steps_with(scheduler: object, module: LightningModule, skips: Callable[[Optimizer], bool]) -> bool:
    """Whether a scheduler goes with steps, the last of which its optimizer has skipped."""
    optimizer = vars(scheduler).get("optimizer")
    configs = [config for config in module.trainer.lr_scheduler_configs if config.scheduler is scheduler]
    return optimizer is not None and skips(optimizer) and any(config.interval == "step" for config in configs)
