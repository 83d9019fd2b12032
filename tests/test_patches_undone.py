"""After `fit`, also after one that fails, torch, Lightning and the user's objects are what they were before it.

What stays: the model was trained, and a Trainer may go on with it. So its parameters are this rank's shards, a block
whose calls take other ranks keeps its runner, a model of which this rank has parts keeps what `to` does with them, and
`fully_shard` has changed the classes of what it wrapped. What the law's cases leave their judge sees.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.errors import TraceError
from lightning_3d.model.block_runner import runner_of
from lightning_3d.parts.layout import LAYOUT
from lightning_3d.parts.module import holds_parts
from lightning_3d.torch_internals.modules import APPLY, CALL, forward_hook_registries
from tests.law.run import Surroundings
from tests.models import Block, TinyGPT, loader, tokens
from tests.parity import QUIET, Layout
from tests.unchanged import Present, changed
from tests.workers import WorkerPools

_SMALL = 4
"""A batch of fewer samples fails where a test wants it to: a new shape, which all stages of a pipeline trace alike.
What one stage alone raises ends the others through the lost connection."""


class Failure(Exception):
    """Raised by the user's code."""


class Failing(Block):
    """Fails at small batches."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < _SMALL:
            raise Failure("in a block")
        return super().forward(x)


class Model(TinyGPT):
    """Has a metric, logs, and a hook that keeps numbers."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Failing if fails else Block)(32, 4) for _ in range(4))
        self.widths: list[int] = []
        self.blocks[1].norm1.register_forward_hook(self._note)  # type: ignore[operator,union-attr]

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.widths.append(output.shape[-1])


_RUNNER = {"forward", CALL}
"""Attributes that a runner sets on its block."""

_STAYING = ("_fsdp", "_is_fsdp_managed_module", "__composable_api_state", "_hparams", LAYOUT)
"""Attributes that FSDP2, Lightning and the strategy set on a module for good; the last is the layout that it has."""


def _wrapped(cls: type) -> type:
    """The class that `fully_shard` was given."""
    return cls.__bases__[1] if cls.__name__.startswith("FSDP") and issubclass(cls, FSDPModule) else cls


def _takes_other_ranks(module: nn.Module) -> bool:
    """Whether it is a block whose calls take other ranks."""
    runner = runner_of(module)
    if runner is None:
        return False
    in_parts = any(isinstance(p, DTensor) or p.is_meta for p in module.parameters())
    return in_parts or isinstance(module, FSDPModule) or runner.pipeline_exchange is not None


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.") or isinstance(hook, bool)


def _users_objects(model: Model) -> Present:
    """What hangs on the modules besides tensors: classes, names of attributes, methods, hooks."""
    found: Present = {"group of the metric": model.accuracy.process_group}
    for name, module in model.named_modules():
        where, attributes = name or "model", vars(module)
        found[f"class of {where}"] = _wrapped(type(module))
        kept = _RUNNER if _takes_other_ranks(module) else {APPLY} if not name and holds_parts(module) else set()
        found[f"attributes of {where}"] = {n for n in attributes.keys() - kept if not n.startswith(_STAYING)}
        found |= {f"{where}.{n}": v for n, v in attributes.items() if callable(v) and n not in kept}
        hooks = [hook for registry in forward_hook_registries(module) for hook in registry.values()]
        found[f"hooks of {where}"] = [hook for hook in hooks if not _is_of_torch(hook)]
    return found


def _fit(layout: Layout, fails: bool) -> list[str]:
    """What a fit leaves changed: of torch, Lightning and the process; of the user's objects."""
    model = Model(fails)
    settings: dict[str, Any] = {**QUIET, "max_steps": 3, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = L.Trainer(devices=layout.world_size, strategy=layout.strategy(), **settings)
    before, objects = Surroundings(), _users_objects(model)
    with pytest.raises((Failure, TraceError)) if fails else nullcontext():
        trainer.fit(model, loader(tokens(18), global_batch_size=8))
    gc.collect()  # an exception has a hook for what is printed of it, as long as it is there
    assert (1 <= trainer.global_step < 3) if fails else trainer.global_step == 3
    after = _users_objects(model)
    return before.changes(Surroundings()) + changed(objects, after) + sorted(objects.keys() ^ after.keys())


def _fits(layout: Layout) -> list[list[str]]:
    return [_fit(layout, fails) for fails in (False, True)]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, num_microbatches=2), Layout(tp=2)], ids=str)
def test_all_is_as_before(workers: WorkerPools, layout: Layout) -> None:
    assert workers(2).run(_fits, layout) == [[[], []]] * 2


class Raising(L.Callback):
    """Raises in a hook, after a step that fails or not."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        setattr(self, hook, self.fail)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        raise Failure(self.hook)


class Part(L.Callback):
    """Raises where a part of a run is undone."""

    def __init__(self, part: str) -> None:
        self.part = part

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        run = strategy.run
        if self.part in ("contexts", "optimizers"):
            (run.ranks.session if self.part == "contexts" else run.optimizers._undone).callback(self.fail)
            return
        owners = {"io": strategy.checkpoint_io, "precision": strategy.precision_plugin, "saves": run.checkpoints}
        self.owner = owners[self.part]
        self.owner.teardown = self.fail

    def fail(self) -> None:
        if self.part not in ("contexts", "optimizers"):
            vars(self.owner).pop("teardown", None)
        raise Failure("in teardown")


def _left_by(layout: Layout, hook: str, part: str) -> list[str]:
    """What a run leaves changed of torch, Lightning and the process whose end raises."""
    callbacks = [Raising(hook) if hook else Part(part)]
    trainer = L.Trainer(
        **{**QUIET, "max_steps": 3, "limit_val_batches": 0, "enable_checkpointing": False},
        devices=layout.world_size,
        strategy=layout.strategy(),
        callbacks=callbacks,
    )
    model = Model(fails=hook == "on_exception")
    before = Surroundings()
    with pytest.raises(Failure):
        trainer.fit(model, loader(tokens(18), global_batch_size=8))
    gc.collect()
    return before.changes(Surroundings())


_PARTS = ("contexts", "optimizers", "saves", "io", "precision")
ENDS = [("on_exception", ""), ("teardown", ""), *(("", part) for part in _PARTS)]


def _ends(layout: Layout) -> list[list[str]]:
    return [_left_by(layout, hook, part) for hook, part in ENDS]


def test_all_is_as_before_where_an_end_raises(workers: WorkerPools) -> None:
    assert workers(2).run(_ends, Layout(dp=2)) == [[[]] * len(ENDS)] * 2
