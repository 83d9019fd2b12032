"""What blocks do that torch's compilers get wrong or refuse: compiled blocks do it as eager ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.law.models.compiled import WIDTH, Drawing, Habits
from tests.models import Regression, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

# Dynamo looks at `grad` of what it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Net(Regression):
    lr = 0.05

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        output: Tensor = self.head(h)
        return output


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Twice(Net):
    """Two losses and two backwards of one forward, by hand."""

    def __init__(self) -> None:
        super().__init__(Plain)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad()
        output = self(batch[0])
        self.manual_backward(F.mse_loss(output, batch[1]), retain_graph=True)
        self.manual_backward(output.square().mean())
        optimizer.step()


class Penalised(Net):
    """A loss on gradients."""

    def __init__(self) -> None:
        super().__init__(Plain)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].detach().requires_grad_()
        output = self(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return F.mse_loss(output, batch[1]) + slope.square().mean()


def _trained(layout: Layout | None, model: Callable[[], L.LightningModule]) -> tuple[dict[str, Tensor], list[str]]:
    """The state, and warnings of the compiler."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fitted(layout, model, data=features)
    return whole_state(trainer), [str(w.message) for w in caught if "compile.enabled" in str(w.message)]


@pytest.mark.parametrize("model", [Habits, partial(Net, Drawing), Twice])
def test_compiled_blocks_do_it_as_eager_ones(workers: WorkerPools, model: Callable[[], L.LightningModule]) -> None:
    ((plain, _),) = workers(1).run(_trained, None, model)
    ((found, told),) = workers(1).run(_trained, Layout(compile_backend="aot_eager"), model)
    assert_same_state([found], plain)
    assert len(told) == isinstance(model, partial), told
    assert all("Drawing runs eagerly" in one and "draws random numbers into a view" in one for one in told)


def test_gradients_of_gradients_raise(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match="aot_autograd does not currently support double backward"):
        workers(1).run(_trained, Layout(compile_backend="aot_eager"), Penalised)
