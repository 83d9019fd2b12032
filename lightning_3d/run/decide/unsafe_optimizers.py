"""Optimizers, their schedules and states that count on what only one process or DDP has; each in one line."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import StepError
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.wrapped_optimizers import with_wrapped


def stepping_device(config: ZeroConfig, device: torch.device) -> torch.device:
    """Where optimizers step."""
    return device if config.offload_optimizer == "none" else torch.device("cpu")


def steps_parts(shape: MeshShape, config: ZeroConfig) -> bool:
    """Whether ranks step parts of parameters where that will do."""
    return shape.tp > 1 or (config.stage > 0 and shape.size("state") > 1)


def refuse_wrappers(optimizers: Iterable[Optimizer], config: ZeroConfig, *, has_masters: bool) -> None:
    """Raise for optimizers that wrap others, where states are moved or master weights are kept with them."""
    for optimizer in optimizers if has_masters or config.offload_optimizer != "none" else ():
        if wrapped := with_wrapped(optimizer)[1:]:
            what = "keeps fp32 copies of 16-bit weights among" if has_masters else "moves"
            raise StepError(
                f"{type(optimizer).__name__} wraps {type(wrapped[0]).__name__}, which has the states, but with"
                f" zero.offload_optimizer={config.offload_optimizer!r} this run {what} those of the optimizer itself."
                f" Use {type(wrapped[0]).__name__} without it, or zero.offload_optimizer='none' and mixed precision."
            )


def refuse_collectives(optimizer: Optimizer, kind: OptimizerKind, shape: MeshShape, config: ZeroConfig) -> None:
    """Raise for an optimizer that communicates where other ranks do not step the same parameters."""
    num_state = shape.size("state")
    is_replicated = config.stage == 0 or num_state == 1 or (config.stage < 3 and kind == "all")
    if shape.is_model_parallel or not is_replicated or config.offload_optimizer != "none":
        raise StepError(
            f"{type(optimizer).__name__} communicates in its step, to which all ranks would have to come with all"
            f" parameters, but with pipeline_parallel_size={shape.pp}, tensor_parallel_size={shape.tp},"
            f" zero.stage={config.stage} on {num_state} ranks, zero.optimizer_steps={config.optimizer_steps!r} and"
            f" zero.offload_optimizer={config.offload_optimizer!r} each steps some. Use its single-device class, whose"
            " work is shared among the ranks in every layout; or size 1 for both and zero.stage=0."
        )


def refuse_unsaved(optimizers: Iterable[Optimizer], trainer: Trainer) -> None:
    """Raise for states of another form than torch's, if they are saved: what is of which parameter is not known."""
    if all(isinstance(c, ModelCheckpoint) and c.save_weights_only for c in trainer.checkpoint_callbacks):
        return
    for optimizer in (optimizer for optimizer in optimizers if optimizer.param_groups):
        name, groups = type(optimizer).__name__, optimizer.param_groups
        saved: Any = optimizer.state_dict()
        if not isinstance(saved, dict) or saved.keys() != {"state", "param_groups"}:
            form = f"the keys {list(saved)}" if isinstance(saved, dict) else f"a {type(saved).__name__}"
        elif [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
            form = f"{len(saved['param_groups'])} groups of other sizes than its {len(groups)} param_groups"
        else:
            continue
        raise StepError(
            f"{name}.state_dict() gives {form}, but checkpoints of any layout need torch's form: the keys 'state', by"
            " the numbers of parameters, and 'param_groups'. Use the optimizer inside of it, or one of torch's form; or"
            " save without its states: Trainer(enable_checkpointing=False), or ModelCheckpoint(save_weights_only=True)."
        )


def refuse_schedules(trainer: Trainer, shape: MeshShape, config: ZeroConfig) -> None:
    """Raise for schedules of learning rates that read states which a rank may lack, as ``AdafactorSchedule``."""
    if not steps_parts(shape, config) and shape.pp == 1:
        return
    for schedule in (scheduled.scheduler for scheduled in trainer.lr_scheduler_configs):
        code = getattr(getattr(schedule, "get_lr", None), "__code__", None)
        if code is not None and "state" in _names_in(code):
            raise StepError(
                f"{type(schedule).__name__} reads states of the optimizer, but with"
                f" pipeline_parallel_size={shape.pp}, tensor_parallel_size={shape.tp} and zero.stage={config.stage} on"
                f" {shape.size('state')} ranks each has those of what it steps alone. Use a schedule that goes by the"
                " number of the step; or size 1 for both and zero.stage=0."
            )


def _names_in(code: CodeType) -> set[str]:
    """The attributes and globals that a function names, also in functions inside of it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)
