"""Runs the hooks and makes the optimizers that precede the first step; undoes them on exit.

Planning traces a step before there are optimizers, and before the hooks that a loop calls first. Most steps read
neither. For one that can't be traced without, optimizers are made and those hooks are called, and again at their time.
Hooks of callbacks of Lightning and of this package leave nothing that a step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from lightning_3d.model.snapshot import Snapshot, preserved
from lightning_3d.torch_internals.lightning_helpers import (
    callbacks_of,
    make_optimizers,
    reset_optimizers,
    set_up_validation,
)
from lightning_3d.torch_internals.patches import replaced


@contextmanager
def with_simulated_fit_start(
    trainer: Trainer, module: LightningModule, step: str, batch: object, rest: Sequence[object]
) -> Iterator[None]:
    """Let the module and its Trainer be inside as the first call of a step finds them.

    Args:
        step: ``"training_step"``, ``"validation_step"``, ...
        batch: Of that call.
        rest: Its further arguments.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, ParallelStrategy)
    callbacks = [c for c in callbacks_of(trainer) if not type(c).__module__.startswith(("lightning.", "lightning_3d."))]
    with ExitStack() as stack:
        stack.enter_context(preserved(module))
        stack.enter_context(_parameters_kept(module))
        stack.callback(Snapshot(callbacks, with_data=False).restore)
        stack.enter_context(replaced("logs", module, {"log": _ignored}))
        if step == "training_step":
            set_up_validation(trainer)
            stack.callback(reset_optimizers, strategy)
            strategy.optimizers, strategy.lr_scheduler_configs = make_optimizers(module)
            if not module.automatic_optimization:
                stack.enter_context(_stepping_muted(module))
        stage = step.removesuffix("_step").replace("training", "train")
        arguments: dict[str, tuple[object, ...]] = {"on_fit_start": ()} if stage == "train" else {}
        arguments |= {f"on_{stage}_start": (), f"on_{stage}_epoch_start": ()}
        arguments |= {f"on_{stage}_batch_start": (batch, rest[0] if rest else 0)}
        with torch.set_grad_enabled(step == "training_step"):
            for name, of_hook in arguments.items():
                for callback in callbacks:
                    getattr(callback, name)(trainer, module, *of_hook)
                getattr(module, name)(*of_hook)
        yield


class _Muted:
    """A scheduler in the hands of a step with manual optimization that is traced: it is read, and steps nothing."""

    def __init__(self, present: object) -> None:
        self._present = present

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present, name)

    def step(self, *_: Any, **__: Any) -> Any:
        """Nothing."""


class _MutedOptimizer(_Muted):
    """An optimizer in its hands, which may get the step's losses by a closure."""

    def step(self, closure: Any = None, **_: Any) -> Any:
        """Run the closure alone."""
        return None if closure is None else closure()

    def zero_grad(self, *_: object, **__: object) -> None:
        """Nothing: there are no gradients."""


def _stepping_muted(module: LightningModule) -> AbstractContextManager[None]:
    """Let a step with manual optimization run without its backwards, and leave parameters and rates alone."""

    def muted(present: Callable[..., object], kind: type[_Muted]) -> Callable[..., Any]:
        def all_or_one(*args: object, **kwargs: object) -> Any:
            found = present(*args, **kwargs)
            return [*map(kind, found)] if isinstance(found, list) else found and kind(found)

        return all_or_one

    ignored = dict.fromkeys(("manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"), _ignored)
    own = {
        "optimizers": muted(module.optimizers, _MutedOptimizer),
        "lr_schedulers": muted(module.lr_schedulers, _Muted),
    }
    return replaced("manual steps", module, {**ignored, **own})


def _ignored(*args: object, **kwargs: object) -> None:
    """Nothing, as where a rehearsed hook logs."""


@contextmanager
def _parameters_kept(module: nn.Module) -> Iterator[None]:
    """Put the parameters' data, and whether they are trained, back afterwards."""
    before = [(parameter, parameter.detach().clone(), parameter.requires_grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, data, requires_grad in before:
            if not parameter.is_meta:
                parameter.data.copy_(data)
            parameter.requires_grad_(requires_grad)
