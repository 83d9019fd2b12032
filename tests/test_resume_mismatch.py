"""States of other classes of optimizers and schedulers, and of other parameter groups, are named, and not loaded."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam, lr_scheduler

from lightning_3d import CheckpointError
from lightning_3d.checkpoint.match import check_classes, class_names
from tests.models import TinyMLP, features
from tests.parity import Layout, fitted
from tests.workers import WorkerPools

trained = partial(fitted, data=features)


class MyAdamW(AdamW):
    """The same optimizer, by a class of the user's."""


class Lookahead(Optimizer):
    """Wraps an optimizer, and shares its groups and states."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.state = optimizer.state


class Model(TinyMLP):
    """Has the optimizer and the scheduler that it is told."""

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler
        self.strict_loading = True

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(list(self.parameters()), lr=0.01)
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])


class Loose(Model):
    """Asks for no strictness."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strict_loading = False


class Anew(Model):
    """Lets its optimizer and scheduler begin anew."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []


def _resumed(layout: Layout | None, first: list[Any], second: list[Any], model: type[Model] = Model) -> str | None:
    """Train with one optimizer, go on with another; the error, if any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The checkpoint has")
        trainer, _ = trained(layout, lambda: Model(*first), epochs=1)
        trainer.save_checkpoint("first.ckpt")
        try:
            trained(layout, lambda: model(*second), epochs=2, ckpt_path="first.ckpt")
        except CheckpointError as error:
            return str(error)
    return None


StepLR = partial(lr_scheduler.StepLR, step_size=1)
Cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=4)


def _split(optimizer: type[Optimizer], parameters: list[nn.Parameter], **settings: Any) -> Optimizer:
    return optimizer([{"params": parameters[:5]}, {"params": parameters[5:]}], **settings)


OTHERS = [
    ([AdamW], [RAdam], "optimizer 0 is torch.optim.radam.RAdam now, and "),
    ([AdamW, StepLR], [AdamW, Cosine], "scheduler 0 is torch.optim.lr_scheduler.CosineAnnealingLR now, and "),
    ([SGD], [partial(_split, SGD)], "parameter groups"),
    ([AdamW, StepLR], [AdamW], "the states of 1 learning-rate schedulers, but 0 are to be restored"),
]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    OTHERS,
)
def test_states_of_others_are_named(workers: WorkerPools, first: list[Any], second: list[Any], words: str) -> None:
    errors = workers(2).run(_resumed, Layout(dp=2, save_distributed_checkpoint=True), first, second)
    assert errors[0] is not None
    assert words in errors[0]
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("second", "model"),
    [([MyAdamW], Model), ([partial(AdamW, foreach=True, fused=False)], Model), ([RAdam], Loose), ([SGD], Anew)],
)
def test_the_same_and_what_is_asked_for_are_loaded(workers: WorkerPools, second: list[Any], model: type[Model]) -> None:
    assert workers(2).run(_resumed, Layout(dp=2), [AdamW], second, model) == [None] * 2


def test_names_of_classes() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert class_names(MyAdamW(parameters)) == class_names(AdamW(parameters)) == ["torch.optim.adamw.AdamW"]
    assert class_names(Adam(parameters)) == ["torch.optim.adam.Adam"]
    wrapped = class_names(Lookahead(AdamW(parameters)))
    assert wrapped == [f"{__name__}.Lookahead", "torch.optim.adamw.AdamW"]
    for saved in (wrapped, ["torch.optim.adamw.AdamW"], ["__main__.Lookahead"]):
        check_classes({"optimizers": [saved]}, [Lookahead(AdamW(parameters))], [], strict=True)
    with pytest.raises(CheckpointError, match=r"optimizer 0 is .*RAdam now, and torch.optim.adamw.AdamW in the"):
        check_classes({"optimizers": [["torch.optim.adamw.AdamW"]]}, [RAdam(parameters)], [], strict=True)
    with pytest.warns(UserWarning, match="They are loaded all the same"):
        check_classes({"optimizers": [["torch.optim.adamw.AdamW"]]}, [RAdam(parameters)], [], strict=False)


def _with_precision(before: str, after: str) -> list[str]:
    first, _ = trained(Layout(), TinyMLP, epochs=1, precision=before)
    first.save_checkpoint("first.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(Layout(), TinyMLP, epochs=2, precision=after, ckpt_path="first.ckpt")
    return [str(warning.message) for warning in caught if "loss scale" in str(warning.message)]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("16-true", "bf16-true", "has no use for"),
        ("bf16-true", "16-true", "has no loss scale"),
        ("16-true", "16-true", None),
    ],
)
def test_other_scalers_are_named(workers: WorkerPools, before: str, after: str, words: str | None) -> None:
    (messages,) = workers(1).run(_with_precision, before, after)
    assert len(messages) == (0 if words is None else 1)
    assert words is None or words in messages[0]
