"""Plans that are made ahead, in one process and without weights, against those of the ranks that run them."""

from __future__ import annotations

import base64
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_3d.cli import main
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import resolve_mesh_shape
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.memory.rank_memory import GIB, size_text
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.timing import makespan
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.decide.dry_run import DryRun, DryRunPlan
from tests.models import TinyGPT
from tests.parity import Layout
from tests.scripts import start
from tests.test_budget import GPT, LARGE, _plan, long_tokens
from tests.workers import WorkerPools

LAYOUTS: dict[str, tuple[Layout, str]] = {
    "pp2-dp2-zero1": (Layout(pp=2, dp=2, num_microbatches=2, zero=1), "32-true"),
    "zero2": (Layout(dp=2, zero=2), "bf16-true"),
    "zero3": (Layout(dp=2, zero=3), "32-true"),
    "tp2-interleaved": (Layout(pp=2, tp=2, num_microbatches=2, schedule="interleaved"), "bf16-mixed"),
}


def _planned(
    module: L.LightningModule, batch: Any, config: ThreeDConfig, world_size: int, precision: Any = "32-true"
) -> DryRunPlan:
    ahead = DryRun.without_trainer(module, batch, config, ThreeDPrecision(precision), optimizer=2)
    return ahead.plan(config, resolve_mesh_shape(config, world_size), memory=None)


def _run(layout: Layout, precision: str) -> Plan:
    return _plan(layout, GPT, precision=precision)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_the_plan_that_runs(workers: WorkerPools, name: str) -> None:
    layout, precision = LAYOUTS[name]
    layout = Layout(**{**vars(layout), "activations": LARGE})
    runs = workers(layout.world_size).run(_run, layout, precision)[0]
    with torch.device("meta"):
        module = GPT()
    tokens, targets = zip(*[long_tokens(8 // layout.dp)[i] for i in range(8 // layout.dp)], strict=True)
    batch = torch.stack(tokens), torch.stack(targets)
    planned = _planned(module, batch, layout.strategy().config, layout.world_size, precision)
    assert (planned.plan.blocks, planned.plan.stages) == (runs.blocks, runs.stages)
    for ahead, row in zip(planned.plan.memory, runs.memory, strict=True):
        for kind in ("weights", "gradients", "optimizer_states", "batch"):
            assert getattr(ahead.held, kind) == pytest.approx(getattr(row.held, kind), rel=0.02), kind
        assert ahead.peak == pytest.approx(row.peak, rel=0.05)  # which test_budget compares with what is measured


@pytest.mark.parametrize(("tp", "zero_stage", "schedule"), [(1, 1, "1f1b"), (2, 3, "1f1b"), (1, 1, "interleaved")])
def test_a_partition_counts_the_memory_that_the_plan_reports(tp: int, zero_stage: int, schedule: str) -> None:
    """With a budget of just what its ranks are said to take a pipeline is cut by time; with a byte less it is not."""
    with torch.device("meta"):
        module = TinyGPT(context=32, width=32, num_layers=6)
    settings = {"pipeline_parallel_size": 2, "tensor_parallel_size": tp, "zero": {"stage": zero_stage}}
    config = ThreeDConfig.from_mapping({**settings, "pipeline": {"num_microbatches": 4, "schedule": schedule}})
    batch = torch.zeros(16, 32, dtype=torch.long), torch.zeros(16, 32, dtype=torch.long)
    ahead = DryRun.without_trainer(module, batch, config, ThreeDPrecision(), optimizer=2)

    def planned(num_bytes: int | None) -> tuple[list[int], int]:
        memory = None if num_bytes is None else num_bytes / GIB
        plan = ahead.plan(config, resolve_mesh_shape(config, 4 * tp), memory).plan
        return [len(plan.blocks_of(stage)) for stage in range(plan.num_stages)], max(row.peak for row in plan.memory)

    by_time, peak = planned(None)
    assert planned(peak) == (by_time, peak)
    within, less = planned(peak - 1)
    assert within != by_time
    assert less < peak


def test_idle_time_is_that_of_the_schedule() -> None:
    """The bubbles of Narayanan et al. 2021."""
    for num_ranks, num in ((2, 4), (4, 8)):
        ranks = list(range(num_ranks))
        for schedule in ("gpipe", "1f1b"):
            total, idle = makespan(schedule, ranks, num, [3.0] * num_ranks)
            assert total == pytest.approx(3.0 * (num + num_ranks - 1))
            assert idle == pytest.approx((num_ranks - 1) / (num + num_ranks - 1))
        _, idle = makespan("interleaved", ranks * 2, num, [1.5] * 2 * num_ranks)
        assert idle == pytest.approx((num_ranks - 1) / 2 / (num + (num_ranks - 1) / 2))
        assert makespan("zbv", [*ranks, *reversed(ranks)], num, [1.5] * 2 * num_ranks)[1] < idle


def a_batch() -> Any:
    """For the command."""
    return torch.zeros(8, 16, dtype=torch.long), torch.zeros(8, 16, dtype=torch.long)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["plan", "tests.models.TinyGPT", "tests.test_plan_ahead.a_batch", "--world_size", "16"]
    for setting in ("pipeline_parallel_size=2", "tensor_parallel_size=2", "zero.stage=3"):
        arguments += ["--set", setting]
    main([*arguments, "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert (planned["data_parallel_size"], len(planned["stages"]), len(planned["memory"])) == (4, 2, 2)
    assert set(planned["sent"]) == {"pp", "tp", "dp"}
    main([*arguments, "--set=context_parallel_size=2", "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert (planned["context_parallel_size"], planned["data_parallel_size"]) == (2, 2)
    main([*arguments, f"--report={tmp_path / 'page.html'}", f"--pictures={tmp_path / 'pictures'}"])
    assert "ranks of the pipeline wait" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert page.count('src="data:image/png;base64,') == 5
    pictures = {file.stem: file.read_bytes() for file in (tmp_path / "pictures").iterdir()}
    assert set(pictures) == {"memory", "weights", "schedule", "budgets", "scaling"}
    assert all(base64.b64encode(picture).decode() in page for picture in pictures.values())
    assert "ranks of the pipeline wait" in page
    with pytest.raises(SystemExit):
        main([*arguments, "--memory", "0.0001"])
    assert "but activations.budget is 0.1 MiB" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--world_size=-1"])
    assert "-1 ranks" in capsys.readouterr().err
    for model, reason in {
        "tests.models.Nothing": "can't be imported",
        "Nothing": "is no import path",
        "tests.parity.assert_same_state": "takes arguments",
    }.items():
        with pytest.raises(SystemExit):
            main(["plan", model, "tests.test_plan_ahead.a_batch", "--world_size", "16"])
        assert f"{model} {reason}" in capsys.readouterr().err


def test_an_optimizer_is_planned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = [
        "plan",
        "tests.models.TinyGPT",
        "tests.test_plan_ahead.a_batch",
        "--world_size=4",
        "--set=zero.stage=3",
    ]
    states = {}
    for name in ("AdamW", "muon", "tests.optimizers.ClippingAdam"):
        main([*arguments, f"--optimizer={name}", "--json"])
        states[name] = json.loads(capsys.readouterr().out)["memory"][0]["optimizer_states"]
    assert states["AdamW"] == states["tests.optimizers.ClippingAdam"] == 2 * states["muon"] > 0
    main([*arguments, "--optimizer=muon"])
    received = size_text(round(3 * 4 * sum(p.numel() for p in TinyGPT().parameters()) * 3 / 16))
    whole = f"Muon steps whole parameters (tried on small tensors), for which a rank receives {received} per step"
    assert whole in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main([*arguments, "--optimizer=torch.nn.ParameterList"])
    assert "name a torch.optim.Optimizer" in capsys.readouterr().err


CLI_CONFIG = """
trainer:
  accelerator: gpu
  devices: 8
  num_nodes: 2
  precision: bf16-true
  callbacks: {class_path: tests.test_plan_ahead.NotMade}
  strategy: {class_path: lightning_3d.ThreeDStrategy, init_args: {pipeline_parallel_size: 2, zero: {stage: 2}}}
"""
CLASSES = {"model": "tests.models.TinyMLP", "data": "tests.test_cli.Regression"}


class NotMade(L.Callback):
    """No plan needs the callbacks of a Trainer."""

    def __init__(self) -> None:
        raise AssertionError


class Rated(TinyGPT):
    """Takes rates of dropout from a tensor, as many vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]


def test_a_model_whose_code_reads_values_is_planned() -> None:
    model = ("tests.test_plan_ahead.Rated", "tests.test_plan_ahead.a_batch")
    command = ["-c", "from lightning_3d.cli import main; main()", "plan", *model, "--world_size=2", "--json"]
    ended = start(command, timeout=120)
    assert '"data_parallel_size": 2' in ended.output
    assert "made in host memory with its weights, as its code reads values: Tensor.item()" in ended.output


@pytest.mark.parametrize("names_classes", [True, False])
def test_a_file_of_lightning_cli_is_planned(
    names_classes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program whose files name the classes, and of one that names them itself."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "config.yaml"
    named = [f"{key}: {{class_path: {value}}}" for key, value in CLASSES.items()] if names_classes else []
    path.write_text("\n".join([CLI_CONFIG, *named]))
    arguments = ["plan", *([] if names_classes else CLASSES.values()), f"--cli_config={path}", "--json"]
    main(arguments)
    planned = json.loads(capsys.readouterr().out)
    assert (planned["world_size"], planned["data_parallel_size"], planned["zero_stage"]) == (16, 8, 2)
    main([*arguments, "--set", "zero.stage=3", "--world_size", "4", "--precision", "32-true"])
    other = json.loads(capsys.readouterr().out)
    assert (other["world_size"], other["data_parallel_size"], other["zero_stage"]) == (4, 2, 3)
    assert 1.9 < other["memory"][0]["weights"] * 2 / planned["memory"][0]["weights"] < 2.1
    path.write_text("\n".join([CLI_CONFIG, "model: {width: 8}"]))
    with pytest.raises(SystemExit):
        main(["plan", f"--cli_config={path}"])
    *_, line = capsys.readouterr().err.splitlines()
    assert "config.yaml: " in line
    assert "Option 'width' is not accepted" in line
    assert line.endswith("name classes that the program gives LightningCLI: plan MODEL [DATA] --cli_config FILE")
    path.write_text("\n".join(["trainer: {strategy: ddp}", *named]))
    with pytest.raises(SystemExit):
        main(arguments)
    assert "trainer.strategy: ddp, which is no ThreeDStrategy" in capsys.readouterr().err


class Summing(TinyGPT):
    """Stages can't follow its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach())
        return loss


def test_what_trains_inline_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["plan", "tests.test_plan_ahead.Summing", "tests.test_plan_ahead.a_batch", "--world_size=2"]
    arguments += ["--set", "pipeline_parallel_size=2"]
    told = r"torch.distributed.all_reduce was called in a step \(at .*test_plan_ahead.py:"
    inline = "Summing: only .* are planned ahead, but steps run inline, .*: as stages can't follow it. "
    for mode, before in (("auto", inline), ("microbatched", "")):
        with pytest.raises(SystemExit):
            main([*arguments, "--set", f"pipeline.mode={mode}"])
        *_, line = capsys.readouterr().err.splitlines()  # after those of a long wait
        assert re.fullmatch(f"lightning-3d: {before}{told}.*", line), line


def test_what_cannot_be_planned_is_refused() -> None:
    planned = partial(_planned, TinyGPT(), a_batch())
    with pytest.raises(ConfigError, match="world size 3 is not divisible"):
        planned(ThreeDConfig(pipeline_parallel_size=2), 3)
    with pytest.raises(PlanError, match="training_step fails without weights"):
        _planned(TinyGPT(), "text", ThreeDConfig(), 2)
    with pytest.raises(PlanError, match="inline"):
        planned(ThreeDConfig.from_mapping({"pipeline_parallel_size": 2, "pipeline": {"mode": "inline"}}), 2)
