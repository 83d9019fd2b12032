"""Plans: what each partition method balances, which blocks are opened for balance, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import PlanError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.observer import ExampleStep, Observer
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import decide
from lightning_3d.planning.split_blocks import split_blocks
from lightning_3d.trace.trace import Trace
from tests.models import TinyGPT
from tests.parity import plan_text

CPU = torch.device("cpu")


class Chain(L.LightningModule):
    """Layers in a row, (B, D) -> (B, D'), with the mean as loss."""

    width = 8

    def __init__(self, *layers: nn.Module, calls_of_first: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls_of_first = calls_of_first

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in [self.layers[0]] * (self.calls_of_first - 1) + list(self.layers):
            x = layer(x)
        return x.mean()


def _example(module: L.LightningModule) -> Any:
    if isinstance(module, TinyGPT):
        return (torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    return torch.zeros(4, module.width)


def _observer(module: L.LightningModule) -> Observer:
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
    step = ExampleStep(name="training_step", microbatch=_example(module), modes=nullcontext)
    return Observer(module, step, CPU, StepEffects)


def _traced(module: L.LightningModule, blocks: dict[str, nn.Module]) -> Trace:
    trace = _observer(module).of_blocks(blocks).trace
    assert trace is not None
    return trace


def _plan(
    module: L.LightningModule,
    partition: str | Sequence[str] = "parameters",
    *,
    pp: int = 2,
    tp: int = 1,
    **settings: Any,
) -> Plan:
    config = ThreeDConfig.from_mapping({"pipeline_parallel_size": pp, "pipeline": {"partition": partition}, **settings})
    shape = MeshShape(pp=pp, dp=1, cp=1, tp=tp)
    return decide(_observer(module).observe(config, shape), config, shape, CPU)


def _stages(plan: Plan) -> list[list[str]]:
    return [[block.fqn for block in plan.blocks_of(stage)] for stage in range(plan.num_stages)]


# ------------------------------------------------------------------------------------------------------ deciding


def test_deciding_leaves_the_model_and_says_the_same_again() -> None:
    assert not dist.is_initialized(), "it needs no process group"
    model = TinyGPT(num_layers=3)
    observer = _observer(model)
    before = {fqn: (type(inner), dict(vars(inner))) for fqn, inner in model.named_modules()}
    config = ThreeDConfig.from_mapping(
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "tensor": {"sequence_parallel": True}}
    )
    shape = MeshShape(pp=2, dp=1, cp=1, tp=2)
    observed = observer.observe(config, shape)
    plan = decide(observed, config, shape, CPU)
    assert {fqn: (type(inner), vars(inner)) for fqn, inner in model.named_modules()} == before
    assert decide(observer.observe(config, shape), config, shape, CPU) == plan
    assert plan.blocks_in(model) == observed.blocks
    assert any(block.tensor is not None and block.tensor.is_sequence_parallel for block in plan.blocks)


# ------------------------------------------------------------------------------------------------------- methods


def test_each_method_balances_what_it_says() -> None:
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False), nn.Linear(24, 8)]
    by_parameters = _plan(Chain(*layers))
    assert [stage.load for stage in by_parameters.stages] == [64 + 64 + 192, 200]
    assert f"{320 / 260:.2f} x the mean load" in plan_text(by_parameters)
    uniform = _plan(Chain(*layers), "uniform")
    assert _stages(uniform) == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    assert [stage.load for stage in uniform.stages] == [2, 2]
    assert uniform.load_unit == "calls"


class Counts(nn.Linear):
    """Chooses by data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if (x > 0).any().item() else -x)


def test_auto_balances_time_within_a_budget() -> None:
    layers = [nn.Linear(256, 256) for _ in range(5)]
    layers[0].register_parameter("idle", nn.Parameter(torch.zeros(2**18)))  # takes 4 MiB of state and no time

    def wide(**settings: Any) -> Plan:
        model = Chain(*layers)
        model.width = 256
        return _plan(model, "auto", **settings)

    plan = wide()
    assert _stages(plan) == [["layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4"]]
    assert plan.load_unit == "operations"
    assert "load in operations" in plan_text(plan)
    budgeted = wide(activations={"budget": 8.5 / 1024})  # by time the first rank takes 9 MiB
    assert _stages(budgeted) == [["layers.0", "layers.1"], ["layers.2", "layers.3", "layers.4"]]
    assert sum(stage.load for stage in budgeted.stages) == sum(stage.load for stage in plan.stages)
    hopeless = wide(activations={"budget": 0.5 / 1024})  # less than any stage needs
    assert sum(stage.load for stage in hopeless.stages) == sum(stage.load for stage in plan.stages)


def test_auto_goes_by_parameters_where_a_block_needs_data() -> None:
    model = Chain(nn.Linear(8, 8), Counts(8, 8), nn.Linear(8, 8))
    plan = _plan(model, "auto")
    assert plan.load_unit == "parameters"
    assert "load in parameters" in plan_text(plan)


class Differentiates(nn.Linear):
    """Adds a gradient, by torch.func, which refuses hooks on saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        gradient: Tensor = torch.func.grad(lambda z: (z**2).sum())(y)
        return y + gradient


def test_auto_goes_by_parameters_where_memory_can_not_be_noted() -> None:
    plan = _plan(Chain(nn.Linear(8, 8), Differentiates(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), "auto")
    assert plan.load_unit == "parameters"
    assert [len(blocks) for blocks in _stages(plan)] == [2, 2]


# ---------------------------------------------------------------------------------------------------- cut points


@pytest.mark.parametrize(
    ("cut_points", "message"),
    [
        (
            ("blocks.22",),
            "names the block 'blocks.22', but TinyGPT has no module of that name. The nearest is 'blocks.2'",
        ),
        (("blok",), "The nearest is 'blocks'"),
        (("",), "names the block ''"),
        (("tokens",), "'tokens' is the first block that the step calls, so stage 0 would be empty"),
        (("blocks.1.mlp.1",), "'blocks.1.mlp.1' is no block: it has no parameters"),
        (("blocks.2", "blocks.1"), "is not in the order in which the step calls the blocks first: tokens, positions"),
        (("blocks.2", "blocks.2.mlp"), "'blocks.2.mlp' is no block"),
    ],
)
def test_wrong_cut_points_are_refused(cut_points: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        _plan(TinyGPT(), cut_points, pp=len(cut_points) + 1)


# --------------------------------------------------------------------------------------------------- split blocks


class Gives(Chain):
    """Gives rows besides its loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = self.layers[1](self.layers[0](batch))
        return {"loss": x.mean(), "rows": x.detach()}


def test_what_is_no_number_takes_the_code_after_the_blocks_once_more() -> None:
    for model, told in ((Chain, 0), (Gives, 1)):
        plan = _plan(model(nn.Linear(8, 8), nn.Linear(8, 8)))
        assert " ".join(plan_text(plan).split()).count("the code after the blocks runs once more") == told


def _layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def _wrapped() -> Chain:
    return Chain(nn.Sequential(nn.Sequential(*(_layers(8, 8, 8) for _ in range(2)))))


OPENED = ["tokens", "positions", "blocks.0", *(f"blocks.1.{n}" for n in ("norm1", "attention", "norm2", "mlp"))]
SPLITS: list[tuple[L.LightningModule, int, list[str]]] = [
    (TinyGPT(), 2, list(find_blocks(TinyGPT()))),  # balanced
    (TinyGPT(num_layers=3), 2, [*OPENED, "blocks.2", "norm", "head"]),  # the one in the way
    (Chain(_layers(8, 8, 8, 8, 8)), 3, [f"layers.0.{i}" for i in range(4)]),  # fewer blocks than stages
    (Chain(nn.Linear(8, 8)), 2, ["layers.0"]),  # nothing inside
    (_wrapped(), 2, ["layers.0.0.0", "layers.0.0.1"]),  # wrappers are looked through
    (_wrapped(), 4, [f"layers.0.0.{i}.{j}" for i in (0, 1) for j in (0, 1)]),  # and opened again
    (Chain(_layers(8, 8, 8), calls_of_first=6), 3, ["layers.0"]),  # one block, but six calls
]


@pytest.mark.parametrize("number", range(len(SPLITS)))
def test_blocks_that_are_opened_for_balance(number: int) -> None:
    module, num_stages, expected = SPLITS[number]
    blocks = find_blocks(module)
    imbalances = (1.25, float("inf")) if len(blocks) < num_stages else (1.25,)  # the latter for partition="uniform"
    for imbalance in imbalances:
        found = split_blocks(module, blocks, num_stages, imbalance, lambda finer: _traced(module, dict(finer)))
        assert list(found) == expected
    assert not any("forward" in vars(inner) for inner in module.modules()), "nothing stays routed"
