"""Rules by hand, ``tensor.plan``: they override what planning finds, are refused where wrong, and train right."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.tensor import check_roles, plan_block, roles_by_hand
from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout
from tests.test_tensor_plan import tokens
from tests.workers import WorkerPools


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {f"blocks.{i}": block for i, block in enumerate(model.blocks)}  # type: ignore[arg-type]


def test_patterns_name_parameters_and_modules_and_the_last_rule_holds() -> None:
    model = TinyGPT()
    rules = [("blocks.*.mlp", "replicate"), ("blocks.1.mlp.0", "column"), ("*.attention.out.weight", "row")]
    roles = roles_by_hand(rules, model, _blocks(model))
    assert roles["blocks.0"] == {
        "mlp.0.weight": "replicate",
        "mlp.0.bias": "replicate",
        "mlp.2.weight": "replicate",
        "mlp.2.bias": "replicate",
        "attention.out.weight": "row",
    }
    assert roles["blocks.1"]["mlp.0.weight"] == "column"
    assert roles["blocks.1"]["mlp.2.weight"] == "replicate"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "blocks.*.atention",
            r"'blocks.\*.atention' names no parameter and no module. The nearest name is 'blocks.0.att",
        ),
        ("positions", "names positions.weight, which lies outside of blocks"),
        ("blocks.*.norm1", r"asks for 'row' of blocks.0.norm1.weight \[32\], but biases and norms go with the weights"),
    ],
)
def test_rule_without_a_match_is_refused(pattern: str, message: str) -> None:
    model = TinyGPT()
    with pytest.raises(PlanError, match=message):
        roles_by_hand([(pattern, "row")], model, _blocks(model))


def test_role_that_a_weight_can_not_have_is_refused() -> None:
    block = Block(32, 4)
    reasons = {
        "column": r"\[128, 32\].* 128 output features are not",
        "row": "32 input features are not divisible by 3",
    }
    for role, reason in reasons.items():
        roles: Any = {"mlp.0.weight": role}
        plan = plan_block(block, (tokens(),), {}, size=3, by_hand=roles)
        with pytest.raises(PlanError, match=reason):
            check_roles(plan, roles, "blocks.0")


RULES = (
    ("positions", "vocabulary"),
    ("tokens", "replicate"),
    ("blocks.*.mlp.0", "row"),  # not what planning finds
    ("blocks.*.mlp.2", "column"),
    ("blocks.1", "replicate"),
    ("blocks.2.attention.out", "replicate"),
)


def test_layout_by_hand_equals_one_process(workers: WorkerPools) -> None:
    job = Job(model=partial(TinyGPT, tied=False))
    ranks = run_layout(workers, job, Layout(tp=2, tensor_plan=RULES))
    assert_parity(job, ranks)
    assert ranks[0].plan is not None
    plans: Any = {block.fqn: block.tensor for block in ranks[0].plan.blocks}
    roles = {fqn: plans[fqn].weight("weight").role for fqn in ("positions", "tokens", "head")}
    assert roles == {"positions": "vocabulary", "tokens": "replicate", "head": "vocabulary"}
    sizes = {"blocks.0.mlp.0.weight": 2048, "blocks.1.mlp.0.weight": 4096, "blocks.2.mlp.2.bias": 16}
    for rank in ranks:
        assert {fqn: rank.held.parameters[fqn] for fqn in sizes} == sizes, "halves, but for the second block's"


def test_unknown_style_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor.plan gives 'a' the style 'colwise': use 'column', 'row'"):
        Layout(tensor_plan=(("a", "colwise"),)).strategy()
    with pytest.raises(ConfigError, match="use pairs of an FQN pattern and a style"):
        Layout(tensor_plan=(("a",),)).strategy()  # type: ignore[arg-type]
