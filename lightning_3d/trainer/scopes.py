"""Changes outside of a strategy's own objects while a Trainer runs, as contexts that undo them.

The strategy enters them in ``setup`` and leaves them in ``teardown``, which the Trainer calls after an exception, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torchmetrics
from torch import nn

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
def metrics_joined(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Let torchmetrics join over the replicas alone; the other axes hold copies."""
    metrics = [m for m in module.modules() if isinstance(m, torchmetrics.Metric) and m.process_group is None]
    for metric in metrics:
        metric.process_group = group
    try:
        yield
    finally:
        for metric in metrics:
            metric.process_group = None
