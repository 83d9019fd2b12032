"""A budget of memory: peaks are predicted as they are measured, and no more is recomputed than the budget asks for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.measured_memory import MeasuredPeak
from lightning_3d import ThreeDStrategy
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.errors import ConfigError, PlanError, StepError
from lightning_3d.planning.plan import Plan
from tests.models import TinyGPT
from tests.parity import QUIET, Layout, fitted
from tests.workers import WorkerPools

GIB = 2**30
LENGTH = 64
LARGE = {"budget": 100.0}
GPT = partial(TinyGPT, context=LENGTH, width=128, num_layers=6)


def long_tokens(num_samples: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Random tokens."""
    drawn = torch.randint(64, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def _plan(layout: Layout, model: Any = GPT, **trainer: Any) -> Plan:
    settings = {"batches": 3, "epochs": 1, "limit_val_batches": 0, **trainer}
    runs, _ = fitted(layout, model, **{"data": long_tokens, **settings})
    assert isinstance(runs.strategy, ThreeDStrategy)
    return runs.strategy.plan


def _peaks(layout: Layout, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes at most of this rank, predicted and measured."""
    measured = MeasuredPeak()
    plan = _plan(layout, callbacks=[measured], **settings)
    return plan.memory[dist.get_rank() * layout.pp // layout.world_size].peak, measured.peak


PEAKS: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "pp2-zbv": (Layout(pp=2, num_microbatches=4, schedule="zbv"), "none", {}),
    "tp2": (Layout(tp=2), "none", {}),
    "tp2-sequence": (Layout(tp=2, sequence_parallel=True), "none", {"model": partial(GPT, width=32)}),
    "cp2": (Layout(cp=2, zero=3), "none", {}),
    "compiled": (Layout(compile_backend="aot_eager"), "selective", {}),
    "zero3": (Layout(dp=2, zero=3), "full", {"precision": "64-true"}),
    "copies of weights by autocast": (
        Layout(pp=2, num_microbatches=8, schedule="gpipe"),
        "none",
        {"model": partial(GPT, width=256), "precision": "bf16-mixed"},
    ),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_predicted_peak_is_the_measured_one(workers: WorkerPools, name: str) -> None:
    layout, mode, settings = PEAKS[name]
    layout = replace(layout, activations={**LARGE, "recompute": mode})
    for predicted, measured in workers(layout.world_size).run(_peaks, layout, settings):
        assert 0.95 < predicted / measured < 1.1


def _warnings_of_batches(layout: Layout, sizes: list[int]) -> list[str]:
    """Of two fits, the second of which gets the larger half of batches of these sizes."""
    trainer = L.Trainer(strategy=layout.strategy(), devices=layout.world_size, **{**QUIET, "max_epochs": 1})
    model, half = GPT(num_layers=1), len(sizes) // 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch, part in enumerate((sizes[:half], sizes[half:])):
            trainer.fit_loop.max_epochs = epoch + 1
            trainer.fit(model, DataLoader(long_tokens(max(part)), batch_sampler=[list(range(size)) for size in part]))
    return [str(each.message) for each in caught if "activations.budget was planned" in str(each.message)]


@pytest.mark.parametrize("layout", [Layout(pp=2, num_microbatches=2)], ids=str)
def test_a_batch_that_is_larger_than_the_planned_one_is_told_of(workers: WorkerPools, layout: Layout) -> None:
    layout = replace(layout, activations=LARGE)
    bytes_of_four = 4 * 2 * 8 * LENGTH
    for told in workers(layout.world_size).run(_warnings_of_batches, layout, [4, 2, 4, 4, 6, 8]):
        (warning,) = told
        assert f"A batch of {bytes_of_four * 6 // 4} bytes comes after a first one of {bytes_of_four} bytes" in warning
    for told in workers(layout.world_size).run(_warnings_of_batches, layout, [4, 2, 4, 2]):
        assert told == []


def _answers(layout: Layout, shares: tuple[float, ...]) -> list[Any]:
    """Peak without recomputation and with all; for budgets between and beside them what is recomputed, or the error."""
    none, full = (
        _plan(replace(layout, activations={**LARGE, "recompute": mode}), max_steps=1) for mode in ("none", "full")
    )
    most, least = (max(row.peak for row in plan.memory) for plan in (none, full))
    answers: list[Any] = []
    for share in shares:
        budget = (least + share * (most - least)) / GIB
        try:
            plan = _plan(replace(layout, activations={"recompute": "auto", "budget": budget}), max_steps=1)
        except PlanError as error:
            answers.append(str(error))
        else:
            assert all(row.peak <= row.budget for row in plan.memory)
            modes = [Counter(block.recompute for block in plan.blocks_of(s)) for s in range(plan.num_stages)]
            answers.append([{mode: num for mode, num in stage.items() if mode != "none"} for stage in modes])
    return answers


SHARES = (1.0, 0.9, 0.3, 0.01, -0.5)


def test_a_budget_asks_for_nothing_up_to_everything_and_then_for_an_error(workers: WorkerPools) -> None:
    ((nothing, *some, everything, error),) = workers(1).run(_answers, Layout(), SHARES)
    assert nothing == [{}]
    costs = [stage.get("selective", 0) + 4 * stage.get("full", 0) for (stage,) in some]
    assert 0 < costs[0] < costs[1]
    assert "selective" in some[0][0]
    assert everything[0]["full"] >= 5
    assert "Rank 0 of the pipeline needs at least" in error
    for words in ("of weights", "of activations and buffers", "What would help: ", "tensor_parallel_size above 1"):
        assert words in error


class Manual(TinyGPT):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def _refused(activations: dict[str, Any], **settings: Any) -> str:
    with pytest.raises((StepError, ConfigError, PlanError)) as raised:
        _plan(Layout(activations=activations), **settings)
    return str(raised.value)


def _refusals() -> list[str]:
    return [
        _refused({"budget": 1e-3, "recompute": "none"}),
        _refused(LARGE | {"recompute": "auto"}, model=Manual),
    ]


def test_what_can_not_be_planned_is_refused(workers: WorkerPools) -> None:
    ((too_little, manual),) = workers(1).run(_refusals)
    assert "with 0 blocks recomputed, but activations.budget is 1.0 MiB" in too_little
    assert "activations.recompute='auto'" in too_little
    assert "manual optimization" in manual
    assert "activations.budget=100.0 is planned by a trace" in manual
    assert "eave out activations.budget" in manual


@pytest.mark.parametrize("budget", [0, -1.0, "most", "0%", "120%", "nan", "inf"])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(ConfigError, match=r"activations\.budget=.* is not allowed: use 'auto', a number of GiB"):
        ActivationsConfig(budget=budget)


@pytest.mark.parametrize("settings", [{"recompute": "auto"}, {"budget": 2}])
def test_a_budget_does_not_count_what_is_offloaded(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"activations\.offload=True .* was not measured on an accelerator yet"):
        ActivationsConfig(offload=True, **settings)


@pytest.mark.parametrize(
    ("override", "expected"), [("80%", "80%"), ("auto", "auto"), ("2", 2), ("1.5", 1.5), ("null", "auto")]
)
def test_a_budget_in_a_file_or_on_a_command_line(tmp_path: Path, override: str, expected: Any) -> None:
    (tmp_path / "3d.yaml").write_text("activations: {recompute: auto, budget: 50%}")
    assert ThreeDConfig.from_file(tmp_path / "3d.yaml").activations.budget == "50%"
    config = ThreeDConfig.from_file(tmp_path / "3d.yaml", [f"activations.budget={override}"])
    assert config.activations.budget == expected
    parser = ArgumentParser()
    parser.add_class_arguments(ThreeDStrategy, "strategy", fail_untyped=False)
    parsed = parser.parse_args(["--strategy.activations.recompute=auto", f"--strategy.activations.budget={override}"])
    assert ActivationsConfig(**parsed.strategy.activations).budget == expected
