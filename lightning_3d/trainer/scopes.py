"""Changes outside of a strategy's own objects while a Trainer runs, as contexts that undo them.

The strategy enters them in ``setup`` and leaves them in ``teardown``, which the Trainer calls after an exception, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.torch_internals.pytree import forget_dataclasses, register_dataclass, registered_dataclasses


@contextmanager
def dataclasses_registered(classes: list[type[Any]]) -> Iterator[None]:
    """Let dataclasses that steps pass around be pytrees.

    Args:
        classes: Those of an earlier run of the same model; holds those of this run afterwards.
    """
    for cls in classes:
        register_dataclass(cls)
    try:
        yield
    finally:
        classes[:] = registered_dataclasses()
        forget_dataclasses(classes)


@contextmanager
def metrics_joined(group: dist.ProcessGroup) -> Iterator[None]:
    """Let torchmetrics join over the replicas alone, wherever metrics are kept; the other axes hold copies."""
    join = Metric.sync

    def sync(self: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        join(self, dist_sync_fn, process_group or self.process_group or group, *args, **kwargs)

    with attributes_replaced(Metric, {"sync": sync}):
        yield


@contextmanager
def parts_averaged() -> Iterator[None]:
    """Let torch's ``AveragedModel`` average models of which each rank holds a part."""
    update = AveragedModel.update_parameters

    def update_parameters(averaged: AveragedModel, model: nn.Module) -> None:
        for (fqn, mean), current in zip(averaged.module.named_parameters(), model.parameters(), strict=False):
            if mean.is_meta != current.is_meta or isinstance(mean, DTensor) != isinstance(current, DTensor):
                raise StepError(
                    f"An AveragedModel holds {fqn} as it was before {type(model).__name__} was made parallel. Make it"
                    " in a callback's setup and keep it as an attribute of the callback, or make it in on_fit_start."
                )
        with implicit_replication():  # some functions average plain tensors and DTensors in one list
            update(averaged, model)

    with attributes_replaced(AveragedModel, {"update_parameters": update_parameters}):
        yield


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

    with attributes_replaced(type(module), {"lr_scheduler_step": lr_scheduler_step}):
        yield


def _steps_with(scheduler: Any, module: LightningModule, skips: Callable[[Optimizer], bool]) -> bool:
    """Whether a scheduler goes with steps, the last of which its optimizer has skipped."""
    optimizer = vars(scheduler).get("optimizer")
    configs = [config for config in module.trainer.lr_scheduler_configs if config.scheduler is scheduler]
    return optimizer is not None and skips(optimizer) and any(config.interval == "step" for config in configs)
