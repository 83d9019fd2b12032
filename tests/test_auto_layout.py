"""Layouts that a fit chooses by itself: the search on given machines, and fits that equal one process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.cli import main
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.machine import Link, Machine, given_machine
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import MemoryPlanError
from lightning_3d.planning.layouts import Choice, Layout, Prediction, candidates, search
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.decide import auto_layout
from lightning_3d.run.decide.dry_run import DryRun, search_layout
from tests.models import TinyGPT, TinyMLP, features
from tests.parity import QUIET, assert_same_state, whole_state
from tests.workers import WorkerPools

BATCH, STEPS = 8, 3
FAST = given_machine(tflops=400, inside=300, between=40, ranks_per_node=8)
SLOW = {kind: Link(bandwidth=1e7, latency=1e-5) for kind in FAST.inside}  # 10 MB/s
SLOW_LINKS = replace(FAST, inside=SLOW, between=SLOW)


class Wide(TinyMLP):
    """4 MiB of weights, on few samples: replicas send much and compute little."""

    def __init__(self) -> None:
        super().__init__(width=512, lr=1e-3)


def _chosen(
    machine: Machine, world_size: int, *, samples: int = BATCH, memory: float | None = None, **kept: Any
) -> Choice:
    with torch.device("meta"):
        module = Wide()
    batch, config = (torch.zeros(samples, 8), torch.zeros(samples, 4)), ThreeDConfig(layout="planned", **kept)
    ahead = DryRun.without_trainer(module, batch, config, ThreeDPrecision(), 2)
    size = None if memory is None else int(memory * 2**20)
    return search_layout(ahead, config, machine, world_size, size, num_samples=samples)


def test_the_search() -> None:
    """On machines that are known."""
    plenty = _chosen(FAST, 4, samples=2**16)
    assert plenty.layout == Layout(shape=MeshShape(dp=4))
    assert "compute in 9" in plenty.reason
    slow = _chosen(SLOW_LINKS, 4)
    assert slow.layout.replicas == 1  # whose replicas would wait for gradients
    assert slow.predicted[slow.layout].seconds < slow.predicted[Layout(shape=MeshShape(dp=4))].seconds / 4
    bound = _chosen(replace(SLOW_LINKS, inside={**SLOW, "all-reduce": Link(bandwidth=2e7, latency=1e-5)}), 4)
    assert bound.predicted.keys() & {
        Layout(shape=MeshShape(tp=4)),
        Layout(shape=MeshShape(pp=4), num_microbatches=4),
    }  # where stage 0 is the best of replicas
    # 4.1 MiB of weights: 16.4 with gradients and AdamW's states.
    small = _chosen(FAST, 4, samples=256, memory=12)
    assert Layout(shape=MeshShape(dp=4), zero_stage=0) in small.refused
    assert "at least 16" in small.refused[Layout(shape=MeshShape(dp=4), zero_stage=0)]
    assert all(seen.peak <= 12 * 2**20 for seen in small.predicted.values())
    nothing = _chosen(FAST, 4, memory=1)
    assert (nothing.layout, nothing.predicted) == (Layout(shape=MeshShape(dp=4), zero_stage=3), {})
    kept = _chosen(FAST, 8, tensor_parallel_size=4)
    assert {layout.shape.tp for layout in (*kept.predicted, *kept.refused)} == {4}
    full: dict[str, Any] = {"activations": ActivationsConfig(recompute="full"), "zero": ZeroConfig(bucket_size=1)}
    recomputed = _chosen(SLOW_LINKS, 4, samples=256, memory=24, **full)
    assert recomputed.of(ThreeDConfig(layout="planned", **full)).activations.recompute == "full"
    assert {layout.zero_stage for layout in recomputed.predicted} >= {0, 1}
    assert max(seen.peak for seen in recomputed.predicted.values()) < max(
        seen.peak for seen in _chosen(SLOW_LINKS, 4, samples=256, memory=24).predicted.values()
    )
    given = _chosen(FAST, 4, samples=256, activations=ActivationsConfig(budget=12 / 1024))
    assert given.layout == small.layout


def test_a_misfit_rules_out_what_takes_more() -> None:
    layouts = [Layout(shape=MeshShape(dp=8), zero_stage=3)]
    layouts += [
        Layout(shape=MeshShape(pp=pp, dp=8 // pp), num_microbatches=pp * n) for pp in (2, 4, 8) for n in (1, 2, 4)
    ]
    planned: list[Layout] = []

    def predict(layout: Layout) -> Prediction:
        planned.append(layout)
        if layout.shape.pp < 8:
            raise MemoryPlanError("it needs more")
        return Prediction(seconds=1 / layout.num_microbatches, computing=0.0, peak=1, recomputes=False)

    choice = search(layouts, predict, lambda layout: None, 32)
    assert choice.layout == Layout(shape=MeshShape(pp=8, dp=1), num_microbatches=32)
    assert Layout(shape=MeshShape(pp=2, dp=4), num_microbatches=4) not in planned  # after the one of 8 microbatches
    assert (
        "takes no less memory than pipeline 2"
        in choice.refused[Layout(shape=MeshShape(pp=2, dp=4), num_microbatches=4)]
    )


def test_sequences_are_cut_where_no_rank_has_room_for_one() -> None:
    """A GPT of one sample of 2048 tokens, where ranks have less and less memory."""
    with torch.device("meta"):
        module = TinyGPT(context=2048, width=64, num_layers=4)
    batch = torch.zeros(1, 2048, dtype=torch.long), torch.zeros(1, 2048, dtype=torch.long)
    config = ThreeDConfig(layout="planned", activations=ActivationsConfig(recompute="full"))
    ahead = DryRun.without_trainer(module, batch, config, ThreeDPrecision(), 2)
    plenty = search_layout(ahead, config, FAST, 4, 2**30, num_samples=1)
    assert {layout.shape.cp for layout in (*plenty.predicted, *plenty.refused)} == {1}
    whole, cut = min(seen.peak for seen in plenty.predicted.values()), set[bool]()
    for share in (0.9, 0.5, 0.45, 0.43):
        choice = search_layout(ahead, config, FAST, 4, int(share * whole), num_samples=1)
        if choice.predicted:
            assert choice.predicted[choice.layout].peak <= share * whole
            is_cut = choice.layout.shape.cp > 1
            assert choice.reason.startswith("no rank has room for whole sequences") == is_cut
            cut.add(is_cut)
    assert cut == {False, True}


def test_what_is_set_is_kept() -> None:
    assert ThreeDConfig().is_planned
    assert all(
        ThreeDStrategy.from_config(unset).config.is_planned for unset in ({}, {"zero": {}}, {"layout": "planned"})
    )
    for given in (
        {"layout": "given"},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"zero": {"stage": 1}},  # the default, which is kept where it is set
        {"activations": {"budget": "auto"}},
    ):
        assert not ThreeDStrategy.from_config(given).config.is_planned
    pinned = ThreeDConfig.from_mapping({"layout": "planned", "zero": {"stage": 2}, "pipeline_parallel_size": 2})
    found = candidates(pinned, 8, 4, 16)
    assert {(each.shape.pp, each.zero_stage) for each in found} == {(2, 2)}
    assert {each.shape.tp for each in found} == {1, 2, 4}  # within a node
    assert {each.num_microbatches for each in found} == {2, 4, 8}
    for layout in found:
        assert not layout.of(pinned).is_planned


def _fitted(links: str, layout: Any, model: type[L.LightningModule] = Wide) -> tuple[Any, str, str, Any]:
    """On every rank: the state, the layout, why, and the number of parameters that it holds."""
    with pytest.MonkeyPatch.context() as patched:
        machine = SLOW_LINKS if links == "slow" else FAST
        patched.setattr(auto_layout, "measured_machine", lambda *args: machine)
        L.seed_everything(1, verbose=False)
        module, strategy = model(), ThreeDStrategy(layout=layout)
        trainer = L.Trainer(strategy=strategy, devices=2, max_steps=STEPS, enable_checkpointing=False, **QUIET)
        trainer.fit(module, DataLoader(features(64), BATCH, shuffle=True), DataLoader(features(16), BATCH))
    assert strategy.choice is not None
    held = strategy.report()[0].num_parameters
    return whole_state(trainer), str(strategy.choice.layout), strategy.choice.reason, held


def test_a_fit_equals_one_process(workers: WorkerPools) -> None:
    """Where it is cut, and the samples are drawn as if its ranks had never been taken for replicas."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(devices=1, max_steps=STEPS, enable_checkpointing=False, **QUIET)
    module = Wide()
    trainer.fit(module, DataLoader(features(64), BATCH, shuffle=True), DataLoader(features(16), BATCH))
    ranks = workers(2).run(_fitted, "slow", "planned")
    assert_same_state([state for state, *_ in ranks], whole_state(trainer))
    for _, layout, _, held in ranks:
        assert layout.startswith(("tensor 2", "pipeline 2"))
        assert held < sum(p.numel() for p in module.parameters())


class Manual(Wide):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_where_ranks_stay_replicas(workers: WorkerPools) -> None:
    for model, reason in ((Manual, "manual optimization"), (Wide, "as many samples as with DDP")):
        for _, layout, why, _ in workers(2).run(_fitted, "slow", "planned" if model is Manual else "auto", model):
            assert layout.startswith("data 2")
            assert reason in why


def a_model() -> L.LightningModule:
    """For the command."""
    return Wide()


def a_batch() -> Any:
    """For the command."""
    return torch.zeros(64, 8), torch.zeros(64, 4)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = "tests.test_auto_layout"
    arguments = ["plan", f"{module}.a_model", f"{module}.a_batch", "--world_size", "4", "--inside", "0.01"]
    main([*arguments, "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["data_parallel_size"] < 4
    assert planned["seconds"] == pytest.approx(planned["layout"]["predicted"][planned["layout"]["chosen"]]["seconds"])
    settings = ThreeDConfig.from_mapping(OmegaConf.create(planned["layout"]["settings"]))
    assert settings.pipeline_parallel_size == planned["pipeline_parallel_size"]
    main(arguments)
    assert "predicted steps" in capsys.readouterr().out
