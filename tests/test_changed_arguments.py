"""Blocks that change their arguments in place: what they share with other tensors changes as in one plain process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.models import Regression, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

WIDTH = 16


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def half(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.cat([x, x], 1))).chunk(2, 1)[0]


class Changing(Layers):
    """Computes with its argument before and after it changes it."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.sin(x.clone())
        x.mul_(torch.sigmoid(self.first(x.clone()))).add_(0.5)
        return torch.tanh(self.second(x)) + before


class Returning(Layers):
    """Returns what it changed."""

    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.first(x.clone()))
        x.mul_(torch.sigmoid(self.second(x.clone())))
        return x


class Telling(Layers):
    """Returns a number, and has its effect by what it changes."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(torch.tanh(self.second(torch.tanh(self.first(x.clone())))))
        return x.detach().mean()


class Copying(Layers):
    """Overwrites its argument."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.first(x.clone())
        x.copy_(torch.tanh(self.second(torch.sin(output))))
        return output


class OfTwo(Layers):
    """Changes two arguments."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = torch.sin(x.clone())
        y.mul_(self.half(y.clone()) + 0.5)
        x.mul_(torch.sigmoid(self.first(x.clone())))
        y.add_(0.1)
        return before + torch.cos(x) + torch.cat([y, y], 1)


class OfSame(Layers):
    """May get one tensor twice."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = torch.sin(y.clone())
        x.mul_(torch.sigmoid(self.first(x.clone())))
        y.add_(1)
        return before + torch.tanh(self.second(x)) * y.clone()


class OfPart(Layers):
    """Changes a part of its argument, and returns a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        part = x[:, : WIDTH // 2]
        part.mul_(self.half(part.clone()))
        return x[:, 2:10]


class OfBuffer(Layers):
    """Gets a row of its own buffer, and changes it."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, WIDTH))

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        before = x * row.clone()
        row.mul_(0.5).add_(torch.tanh(self.first(x)).detach().mean(0))
        return torch.tanh(self.second(x * self.table.sum(0).clone())) + before * row.clone()


class OfDetached(Layers):
    """Changes what its argument shares its memory with, behind autograd."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x.clone()))
        x.detach().mul_(0.5)
        return y + self.second(x)


class Net(Regression):
    """Changing blocks between glue that goes on with what they changed."""

    lr = 0.05

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def through(self, block: Any, h: Tensor) -> Tensor:
        output: Tensor = block(h)
        return output + 0.3 * h

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.inlet(x))
        for block in self.blocks:
            h = self.through(block, h)
        output: Tensor = self.head(h)
        return output


class ReturningNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        before, output = torch.cos(h.clone()), block(h)
        output += 0.5  # so changes `h`
        return before + output * h.clone()


class ViewNet(Net):
    """Its blocks get views."""

    def through(self, block: Any, h: Tensor) -> Tensor:
        wide = torch.cat([h, torch.cos(h.clone())], 1)
        view = wide[:, 4 : 4 + WIDTH]
        output = block(view)
        return wide[:, :WIDTH] + output + view * 0.3


class OverlappingNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        output: Tensor = block(h, h[:, : WIDTH // 2])
        return output + 0.3 * h


class ViewsNet(Net):
    """Its blocks get two views of what they don't get."""

    def through(self, block: Any, h: Tensor) -> Tensor:
        wide = torch.cat([h, torch.cos(h.clone())], 1)
        output: Tensor = block(wide[:, 4 : 4 + WIDTH], wide[:, 8 : 8 + WIDTH // 2])
        return 0.3 * (output + wide[:, :WIDTH] + wide[:, WIDTH:])


class TwiceNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        output: Tensor = block(h, h)
        return output + 0.3 * h


class KeywordNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        output: Tensor = block(y=h[:, 4:12], x=h)
        return output + 0.3 * h


class PartNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        output = block(h)
        output *= 1.5  # so changes `h`
        return torch.cat([output, output], 1) + h


class BufferNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        output: Tensor = block(h, block.table[1])
        return output


MODELS: dict[str, tuple[type[Net], type[nn.Module]]] = {
    "changing": (Net, Changing),
    "telling": (Net, Telling),
    "copying": (Net, Copying),
    "detached": (Net, OfDetached),
    "returning": (ReturningNet, Returning),
    "views": (ViewNet, Changing),
    "returned views": (ViewNet, Returning),
    "overlapping": (OverlappingNet, OfTwo),
    "overlapping views": (ViewsNet, OfTwo),
    "overlapping keywords": (KeywordNet, OfTwo),
    "twice": (TwiceNet, OfSame),
    "part": (PartNet, OfPart),
    "buffer": (BufferNet, OfBuffer),
}


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["loss"]))


def _trained(layout: Layout | None, names: Sequence[str]) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    """State and losses of each model."""
    found = {}
    for name in names:
        net, block = MODELS[name]
        losses = _Losses()
        trainer, _ = fitted(layout, partial(net, block), data=features, callbacks=[losses], batches=3, epochs=1)
        found[name] = whole_state(trainer), losses.seen
    return found


@pytest.fixture(scope="module")
def plain(workers: WorkerPools) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    """What one process without this strategy makes of each model."""
    (found,) = workers(1).run(_trained, None, [*MODELS])
    return found


LAYOUTS = {
    "one-full": Layout(activations={"recompute": "full"}),
    "one-selective": Layout(activations={"recompute": "selective"}),
    "dp2-zero3": Layout(dp=2, zero=3),
    "dp2-zero3-full": Layout(dp=2, zero=3, activations={"recompute": "full"}),
    "dp2-zero0-full": Layout(dp=2, zero=0, activations={"recompute": "full"}),
    "dp2-zero3-selective": Layout(dp=2, zero=3, activations={"recompute": "selective"}),
    "dp2-zero3-kept": Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": False}),
    "dp2-zero1-full": Layout(dp=2, zero=1, activations={"recompute": "full"}),
    "dp2-zero1-selective": Layout(dp=2, zero=1, activations={"recompute": "selective"}),
    "tp2": Layout(tp=2),
    "tp2-full": Layout(tp=2, activations={"recompute": "full"}),
    "tp2-selective": Layout(tp=2, activations={"recompute": "selective"}),
    "tp2-full-slices": Layout(tp=2, activations={"recompute": "full", "partition": True}),
    "tp2-selective-slices": Layout(tp=2, activations={"recompute": "selective", "partition": True}),
    "pp2": Layout(pp=2),
    "pp2-full": Layout(pp=2, activations={"recompute": "full"}),
    "pp2-selective": Layout(pp=2, activations={"recompute": "selective"}),
}
IN_MAKE_TEST = ("one-full", "one-selective", "dp2-zero3", "dp2-zero3-full", "pp2")
REFUSED_BY_PIPELINES = ("views", "returned views", "overlapping", "overlapping views", "overlapping keywords", "buffer")
"""What shares memory on one stage does not on another."""


def _has_model(layout: Layout, name: str) -> bool:
    if name == "buffer" and layout.dp > 1:  # which is of the first replica's samples
        return False
    return layout.pp == 1 or name not in (*REFUSED_BY_PIPELINES, "telling")  # which tells a mean over microbatches


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, id=name, marks=() if name in IN_MAKE_TEST else pytest.mark.matrix) for name, x in LAYOUTS.items()],
)
def test_what_arguments_share_memory_with_changes_as_in_one_process(
    workers: WorkerPools, plain: dict[str, tuple[dict[str, Tensor], list[float]]], layout: Layout
) -> None:
    names = [name for name in MODELS if _has_model(layout, name)]
    for found in workers(layout.world_size).run(_trained, layout, names):
        for name in names:
            state, losses = plain[name]
            assert_same_state([found[name][0]], state)
            assert found[name][1] == pytest.approx(losses, abs=1e-5), name


@pytest.mark.parametrize("name", some_in_matrix(REFUSED_BY_PIPELINES, lambda name: name != "overlapping"))
def test_what_does_not_share_memory_on_another_stage_is_refused(workers: WorkerPools, name: str) -> None:
    with pytest.raises(WorkerError, match=r"TraceError: .* (shares memory with|reads the buffer)"):
        workers(2).run(_trained, Layout(pp=2), [name])


class OfDtypes(Layers):
    """Changes an argument of which another one shows the bytes."""

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        pair.mul_(torch.sigmoid(self.first(x.clone()).mean()))
        return torch.tanh(self.second(x))


class DtypesNet(Net):
    def through(self, block: Any, h: Tensor) -> Tensor:
        h = h.clone()
        output: Tensor = block(h, torch.view_as_complex(h.view(len(h), -1, 2)))
        return output


def _trained_on_dtypes(layout: Layout) -> None:
    fitted(layout, partial(DtypesNet, OfDtypes), data=features, batches=1, epochs=1)


def test_memory_that_can_not_be_put_back_is_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"blocks\.0 changes an argument in place that lies in the memory of another"):
        workers(1).run(_trained_on_dtypes, Layout(activations={"recompute": "full"}))
