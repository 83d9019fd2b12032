"""Optimizers that step all parameters together do so where ranks hold parts of them: as in one process, on every rank.

In fp64, as a line search makes much of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from tests.law.models.spellings import FusedQKV
from tests.models import TinyGPT, tokens
from tests.optimizers import ByHand, ClippingAdam, Prodigy, Sam
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "ClippingAdam": partial(ClippingAdam, lr=1e-2, eps=1e-3),
    "LBFGS": partial(LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "Prodigy": Prodigy,
    "Sam": Sam,
}

LAYOUTS = (
    Layout(dp=2, zero=3, mode="auto"),
    Layout(tp=2, mode="auto"),
    Layout(pp=2, num_microbatches=2, mode="auto"),
    Layout(dp=2, tp=2, zero=3, mode="auto"),
    Layout(pp=2, dp=2, zero=1, num_microbatches=2, mode="auto"),
    Layout(pp=2, tp=2, num_microbatches=2, mode="auto"),
)

CASES = (
    *((name, layout) for name in ("ClippingAdam", "LBFGS", "Prodigy") for layout in LAYOUTS),
    ("LBFGS", Layout(dp=2, zero=1)),  # whose ranks have losses of their own
)


def _is_in_matrix(name: str, layout: Layout) -> bool:
    return layout.world_size > 2 and (name, layout.pp) not in (("LBFGS", 1), ("Prodigy", 2))


class FusedGPT(TinyGPT):
    """Has fused projections, a tied head, a vocabulary that does not divide, and a parameter that nothing reads."""

    def __init__(self, name: str) -> None:
        super().__init__(vocabulary=63, num_layers=1)
        self.blocks = nn.ModuleList([FusedQKV(), FusedQKV()])
        self.name = name
        self.unread = nn.Parameter(self.norm.weight.detach().clone())

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.name](self.parameters())


def _trained(
    name: str, layout: Layout | None, *, epochs: int = 1, begun: Path | None = None, saved: Path | None = None
) -> tuple[dict[str, Tensor], str, int]:
    """The weights after epochs, from a checkpoint if one is given; how it stepped, for which a rank received bytes."""
    trainer, _ = fitted(
        layout,
        partial(FusedGPT, name),
        data=partial(tokens, vocabulary=63),
        batches=2,
        epochs=epochs,
        precision="64-true",
        ckpt_path=begun,
    )
    if saved is not None:
        trainer.save_checkpoint(saved)
    plan = None if layout is None else trainer.strategy.plan.optimizers[0]
    return whole_state(trainer), str(plan), 0 if plan is None else plan.received_bytes


@cache
def _in_one_process(name: str) -> dict[str, Tensor]:
    return _trained(name, None)[0]


@pytest.mark.parametrize(("name", "layout"), some_in_matrix(CASES, _is_in_matrix), ids=str)
def test_steps_as_one_process(workers: WorkerPools, name: str, layout: Layout) -> None:
    expected = _in_one_process(name)
    L.seed_everything(1, verbose=False)
    initial = FusedGPT(name).state_dict()
    moved = max(float((expected[fqn] - value).abs().max()) for fqn, value in initial.items())
    num_ranks = layout.pp * layout.tp * (layout.dp if layout.zero == 3 else 1)  # each has a part
    num_bytes = sum(8 * parameter.numel() for parameter in FusedGPT(name).parameters())
    for weights, plan, received in workers(layout.world_size).run(_trained, name, layout):
        assert_same_state([weights], expected, tolerance=1e-12 * max(1.0, moved))
        assert plan.startswith(f"{name} steps all parameters together")
        assert received == round(2 * num_bytes * (num_ranks - 1) / num_ranks)


@pytest.mark.parametrize("name", ["LBFGS", "Prodigy"])
def test_checkpoints_go_on_in_other_layouts(workers: WorkerPools, name: str, tmp_path: Path) -> None:
    staged, sharded = Layout(pp=2, tp=2, num_microbatches=2, mode="auto"), Layout(dp=2, zero=3)
    paths = {of: tmp_path / f"{of}.ckpt" for of in ("one", "staged", "sharded")}
    _trained(name, None, saved=paths["one"])
    workers(4).run(partial(_trained, saved=paths["staged"]), name, staged)
    workers(2).run(partial(_trained, saved=paths["sharded"]), name, sharded)
    expected, *_ = _trained(name, None, epochs=2, begun=paths["one"])
    found = [
        *workers(4).run(partial(_trained, epochs=2, begun=paths["one"]), name, staged),
        *workers(2).run(partial(_trained, epochs=2, begun=paths["staged"]), name, sharded),
        _trained(name, None, epochs=2, begun=paths["sharded"]),
    ]
    assert_same_state([weights for weights, *_ in found], expected, tolerance=1e-10)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), Layout(pp=2)], ids=str)
def test_those_that_remember_parameters_are_refused_on_parts(workers: WorkerPools, layout: Layout) -> None:
    with pytest.raises(WorkerError, match=r"StepError: Sam tells parameters by what is in its attribute 'listed'"):
        workers(2).run(_trained, "Sam", layout)


class Perturbing(ByHand):
    """Goes a little way up, lets go of gradients, and steps from where it was by those of a closure, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = self.state[parameter]["old"]
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


class PerturbedGPT(FusedGPT):
    """Trains by hand, with gradients before the step."""

    def __init__(self) -> None:
        super().__init__("Prodigy")
        self.automatic_optimization = False

    def configure_optimizers(self) -> Optimizer:
        return Perturbing(self.parameters())

    def training_step(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = super(PerturbedGPT, self).training_step(*args)
            self.manual_backward(loss)
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()


def _perturbed(layout: Layout | None) -> dict[str, Tensor]:
    trainer, _ = fitted(
        layout, PerturbedGPT, data=partial(tokens, vocabulary=63), batches=2, epochs=1, precision="64-true"
    )
    return whole_state(trainer)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, mode="inline"), Layout(dp=2, zero=3)], ids=str)
def test_steps_that_begin_before_their_closure(workers: WorkerPools, layout: Layout) -> None:
    expected = _perturbed(None)
    assert_same_state(workers(2).run(_perturbed, layout), expected, tolerance=1e-12)
