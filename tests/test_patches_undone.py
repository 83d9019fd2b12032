"""After `fit`, also after one that fails, torch, Lightning and the user's objects are what they were before it.

What stays: the model was trained, and a Trainer may go on with it. So its parameters are this rank's shards, a block
whose calls take other ranks keeps its runner, a model of which this rank has parts keeps what `to` does with them, and
`fully_shard` has changed the classes of what it wrapped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d.callbacks import ScheduleTimeline
from lightning_3d.errors import TraceError
from lightning_3d.model.block_runner import runner_of
from lightning_3d.parts.layout import LAYOUT
from lightning_3d.parts.module import holds_parts
from lightning_3d.torch_internals.modules import APPLY, CALL, forward_hook_registries
from lightning_3d.torch_internals.pytree import tree_leaves
from tests.models import loader, tokens
from tests.parity import QUIET, Layout
from tests.unchanged import (
    IN_CLASSES,
    Present,
    changed,
    changed_code,
    code_of_packages,
    state_of_the_process,
    state_of_torch,
)
from tests.workers import WorkerPools

# ------------------------------------------------------------------------------------------------------------- a model


_SMALL = 4
"""A batch of fewer samples fails where a test wants it to: a new shape, which all stages of a pipeline trace alike.
What one stage alone raises ends the others through the lost connection."""


class Failure(Exception):
    """Raised by the user's code."""


@dataclass
class Activations:
    """What blocks pass on; torch's pytrees do not know it."""

    hidden: Tensor
    scale: float


class Block(nn.Module):
    def __init__(self, width: int, fails: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.seen: list[int] = []
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.fails = fails

    def forward(self, activations: Activations) -> Activations:
        if self.fails and len(activations.hidden) < _SMALL:
            raise Failure("in a block")
        hidden = self.down(F.gelu(self.up(self.norm(activations.hidden))))
        return Activations(activations.hidden + hidden, activations.scale)


class Model(L.LightningModule):
    """Uses what a strategy steps in for: dataclasses, hooks, metrics, lists, logs."""

    def __init__(self, fails: bool, width: int = 16, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, fails) for _ in range(4))
        self.head = nn.Linear(width, vocabulary)
        self.accuracy = MulticlassAccuracy(vocabulary, average="micro")
        self.losses: list[Tensor] = []
        self.widths: list[int] = []
        self.blocks[1].up.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.widths.append(output.shape[-1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        activations = Activations(self.embedding(inputs), 1.0)
        for block in self.blocks:
            activations = block(activations)
        logits = self.head(activations.hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        self.accuracy(logits, targets.flatten())
        self.log("accuracy", self.accuracy)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ------------------------------------------------------------------------------------------------ what must not change

_RUNNER = {"forward", CALL}
"""Attributes that a runner sets on its block."""

_STAYING = ("_fsdp", "_is_fsdp_managed_module", "__composable_api_state", "_hparams", LAYOUT)
"""Attributes that FSDP2, Lightning and the strategy set on a module for good; the last is the layout that it has."""


def _state() -> Present:
    return {**state_of_torch(), "activations are a leaf": len(tree_leaves(Activations(torch.zeros(1), 1.0))) == 1}


def _wrapped(cls: type) -> type:
    """The class that `fully_shard` was given."""
    return cls.__bases__[1] if cls.__name__.startswith("FSDP") and issubclass(cls, FSDPModule) else cls


def _takes_other_ranks(module: nn.Module) -> bool:
    """Whether it is a block whose calls take other ranks."""
    runner = runner_of(module)
    if runner is None:
        return False
    in_parts = any(isinstance(p, DTensor) or p.is_meta for p in module.parameters())
    return in_parts or isinstance(module, FSDPModule) or runner.joined is not None


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.") or isinstance(hook, bool)


def _users_objects(model: Model) -> Present:
    """What hangs on the modules besides tensors: classes, names of attributes, methods, hooks."""
    found: Present = {}
    for name, module in model.named_modules():
        where = name or "model"
        attributes = vars(module)
        found[f"class of {where}"] = _wrapped(type(module))
        kept = _RUNNER if _takes_other_ranks(module) else {APPLY} if not name and holds_parts(module) else set()
        found[f"attributes of {where}"] = {n for n in attributes.keys() - kept if not n.startswith(_STAYING)}
        found |= {f"{where}.{n}": v for n, v in attributes.items() if callable(v) and n not in kept}
        hooks = [hook for registry in forward_hook_registries(module) for hook in registry.values()]
        found[f"hooks of {where}"] = [hook for hook in hooks if not _is_of_torch(hook)]
    found["group of the metric"] = model.accuracy.process_group
    for cls in (Model, Block, MulticlassAccuracy, Activations):
        found |= {f"{cls.__name__}.{n}": v for n, v in vars(cls).items() if isinstance(v, IN_CLASSES)}
    found["fields"] = [field.name for field in fields(Activations)]
    return found


# ------------------------------------------------------------------------------------------------------------ the runs


def _trainer(layout: Layout, max_steps: int) -> L.Trainer:
    return L.Trainer(
        **QUIET,
        devices=layout.world_size,
        strategy=layout.strategy(),
        max_steps=max_steps,
        enable_checkpointing=False,
        callbacks=[ScheduleTimeline(step=0)] if layout.pp > 1 else [],
    )


def _fit(layout: Layout, fails: bool) -> list[str]:
    """What a fit leaves changed: of torch, Lightning and the process; of the user's objects."""
    model, trainer = Model(fails), _trainer(layout, max_steps=3)
    readers: list[Callable[[], Present]] = [_state, state_of_the_process, lambda: _users_objects(model)]
    code, before = code_of_packages(), [read() for read in readers]
    with pytest.raises((Failure, TraceError)) if fails else nullcontext():
        trainer.fit(model, loader(tokens(18), global_batch_size=8))
    gc.collect()  # an exception has a hook for what is printed of it, as long as it is there
    assert (1 <= trainer.global_step < 3) if fails else trainer.global_step == 3
    after = [read() for read in readers]
    left = [change for was, now in zip(before, after, strict=True) for change in changed(was, now)]
    return changed_code(code, code_of_packages()) + left + sorted(before[-1].keys() ^ after[-1].keys())


def _fits(layout: Layout) -> list[list[str]]:
    return [_fit(layout, fails) for fails in (False, True)]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, num_microbatches=2), Layout(tp=2)], ids=str)
def test_all_is_as_before(workers: WorkerPools, layout: Layout) -> None:
    assert workers(2).run(_fits, layout) == [[[], []]] * 2


def test_a_patch_is_seen() -> None:
    model = Model(False)
    code, of_users = code_of_packages(), _users_objects(model)
    cosine, block = torch.cos, model.blocks[0]
    try:
        torch.cos = torch.sin
        nn.Linear.extra_repr_of_test = lambda self: ""  # type: ignore[attr-defined]
        block.forward = block.forward  # type: ignore[method-assign]
        model.blocks[1].register_forward_hook(lambda *args: None)
        of_packages, of_user = changed_code(code, code_of_packages()), changed(of_users, _users_objects(model))
    finally:
        torch.cos = cosine
        del nn.Linear.extra_repr_of_test  # type: ignore[attr-defined]
    assert any(change.startswith("torch.cos:") for change in of_packages)
    assert any(change.endswith("Linear.extra_repr_of_test: is new") for change in of_packages)
    assert any(change.startswith("attributes of blocks.0") for change in of_user)
    assert any(change.startswith("hooks of blocks.1") for change in of_user)
