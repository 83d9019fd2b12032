"""The contexts that hold while a Trainer runs, in one list: each changes something outside of a strategy's own objects.

A run enters them as its phases begin and leaves them when it closes, after an exception, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.resuming import Resuming
from lightning_3d.data.step_sampler import in_whole_steps
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.parts.finetuning import finetuning_joined
from lightning_3d.run.context import RunContext
from lightning_3d.run.parallel.parallel_model import ParallelModel
from lightning_3d.run.step.user_clipping import clipping_joined
from lightning_3d.torch_internals import flex_attention
from lightning_3d.torch_internals.dynamo import modules_watched
from lightning_3d.torch_internals.lightning_helpers import logging_as_alone, training_samplers_changed
from lightning_3d.torch_internals.losses import weights_shown
from lightning_3d.torch_internals.optimizers import averages_grouped
from lightning_3d.torch_internals.pytree import forget_dataclasses, register_dataclass, registered_dataclasses


def open_before_layout(
    session: ExitStack, context: RunContext, dataclasses: list[type[object]], resuming: Resuming | None
) -> None:
    """Apply the patches that are needed before the layout is known: dataclasses as pytrees, resuming, order of samples.

    Args:
        dataclasses: Those that steps of the model passed around in earlier runs.
        resuming: In a fit.
    """
    session.enter_context(dataclasses_registered(dataclasses))
    if resuming is not None:
        session.enter_context(resuming.installed())
    if (samples := context.config.samples_per_step) is not None:
        in_steps = partial(in_whole_steps, samples_per_step=samples)
        session.enter_context(training_samplers_changed(context.trainer, in_steps))


def open_before_planning(session: ExitStack, config: ThreeDConfig, mesh: Mesh) -> None:
    """Enter what holds from before a model is made parallel on a mesh."""
    _enter(
        session,
        (mesh.shape.size("samples") == 1, logging_as_alone),
        (mesh.shape.size("replica") > 1, lambda: torch.compiler.set_stance("force_eager")),
        (mesh.shape.size("replica") > 1, flex_attention.calls_seen),
        (config.compile.enabled, modules_watched),
        (True, weights_shown),
    )


def open_for_steps(session: ExitStack, context: RunContext, parallel: ParallelModel) -> None:
    """Enter what holds for a model that is parallel."""
    pipeline, is_in_parts = context.mesh.group("pp"), context.is_in_parts

    def norm(parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
        ranks = range(context.mesh.shape.world_size)
        context.rendezvous.sync_check(ranks, "a norm of gradients, as clip_grad_norm_ takes it")
        return parallel.gradients.norm(parameters, norm_type)

    _enter(
        session,
        (True, parallel.router.installed),
        (is_in_parts, lambda: clipping_joined(context.module, parallel.zero, norm)),
        (is_in_parts, lambda: finetuning_joined(pipeline)),
        (is_in_parts, averages_grouped),
    )


def _enter(session: ExitStack, *contexts: tuple[bool, Callable[[], AbstractContextManager[object]]]) -> None:
    for is_due, context in contexts:
        if is_due:
            session.enter_context(context())


@contextmanager
def dataclasses_registered(classes: list[type[object]]) -> Iterator[None]:
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
