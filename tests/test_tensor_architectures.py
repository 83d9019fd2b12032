"""Tensor parallel finds Megatron's plan for any architecture: its collectives, and that nearly everything is sharded.

Planned in one process; that the plans are carried out, and give one process's numbers, are cases of `tests/law`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import default_collate

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.observer import ExampleStep, Observer
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import decide
from lightning_3d.tensor import WeightPlan
from tests.law.models import MODELS
from tests.parity import Job
from tests.tables import some_in_matrix


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Of every block of one class."""

    forward: int = 2
    """All-reduces in the forward."""
    backward: int | Mapping[int, int] = 2
    """All-reduces in the backward, of any size or by size: what ranks share gets the sum of its gradients, too."""
    others: int = 0
    """Other collectives in the forward."""
    share: float = 0.94
    """Least share of parameters that is sharded; the rest are norms and biases of row weights."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An architecture, and what planning finds for its classes of blocks."""

    blocks: Mapping[str, Expected]
    """By class of the block, or by a part of its FQN."""
    held: float = 0.65
    """Greatest share of the single process's parameters that a rank of two holds."""


OPTIMUM = Expected()
CROSS = Expected(forward=3, backward=4)
"""Self-attention, cross-attention (its keys and values read another input) and MLP."""
PARALLEL = Expected(forward=2, backward=1)
"""Attention and MLP read the same norm."""
SHARED_EXPERT = Expected(forward=3, backward=3)
"""Attention, the experts that a token is routed to, and the one that all tokens go to."""
NARROW_EXPERTS = Expected(forward=3, backward=4, share=0.9)
"""Latent attention, and a shared expert."""
POOLED = Expected(forward=0, backward=0, others=2, share=1.0)
"""A stem that gathers what its pooling leaves, and running statistics; images need no gradient."""
EXPANDED = Expected(others=1, share=0.98)
"""An inverted residual with squeeze and excitation."""

TABLE = {
    "llama": Row(blocks={"LlamaDecoderLayer": OPTIMUM}),
    "llama-tied": Row(blocks={"LlamaDecoderLayer": OPTIMUM}),
    "llama-one-kv-head": Row(blocks={"LlamaDecoderLayer": Expected(backward=4, share=0.84)}),
    "qwen3": Row(blocks={"Qwen3DecoderLayer": Expected(backward=4)}),
    "phi": Row(blocks={"PhiDecoderLayer": PARALLEL}),
    "gpt2": Row(blocks={"GPT2Block": OPTIMUM}),
    "mixtral": Row(blocks={"MixtralDecoderLayer": Expected(backward={2: 2, 4: 4})}),
    "mixtral-grouped": Row(blocks={"MixtralDecoderLayer": OPTIMUM}),
    "qwen3-moe": Row(blocks={"Qwen3MoeDecoderLayer": Expected(backward=4)}),
    "llama4": Row(blocks={"Llama4TextDecoderLayer": SHARED_EXPERT}),
    "gpt-oss": Row(blocks={"GptOssDecoderLayer": OPTIMUM}),
    "bert": Row(blocks={"BertLayer": OPTIMUM}),
    "deberta-v2": Row(blocks={"DebertaV2Layer": Expected(backward=3)}),
    "t5": Row(blocks={"encoder.block.": OPTIMUM, "decoder.block.": CROSS}),
    "bart": Row(blocks={"BartEncoderLayer": OPTIMUM, "BartDecoderLayer": CROSS}),
    "deepseek-v3": Row(blocks={"layers.0": Expected(backward=3, share=0.9), "layers.1": NARROW_EXPERTS}),
    "olmo2": Row(blocks={"Olmo2DecoderLayer": Expected(forward=4, backward=4)}),
    "swin": Row(blocks={"SwinStage": Expected(forward=4, backward=4, share=0.7)}),
    "vit": Row(blocks={"ViTLayer": OPTIMUM}),
    "clip": Row(blocks={"CLIPEncoderLayer": OPTIMUM}),
    "resnet": Row(blocks={"ResNetEmbeddings": POOLED, "ResNetStage": Expected(others=1, share=0.97)}, held=0.52),
    "convnext": Row(blocks={"ConvNextStage": Expected(share=0.7)}),
    "efficientnet": Row(blocks={f"encoder.blocks.{index}": EXPANDED for index in range(1, 8)}, held=0.6),
    "segformer": Row(
        blocks={
            "stages.0": Expected(forward=4, backward=6, share=0.6),
            "stages.1": Expected(forward=4, backward=4, share=0.84),
        }
    ),
    "nn-transformer": Row(
        blocks={
            "encoder.layers.0": Expected(backward=1),
            "encoder.layers.1": OPTIMUM,
            "decoder.layers.0": Expected(forward=3, backward=3),
            "decoder.layers.1": CROSS,
        }
    ),
}
CASES = [(name, 2) for name in TABLE] + [(name, 4) for name in ("llama-tied", "llama-one-kv-head", "mixtral")]
"""Architecture and number of ranks."""


@pytest.mark.parametrize(("name", "size"), some_in_matrix(CASES, lambda name, _: MODELS[name].alike is not None))
def test_architecture_is_sharded(name: str, size: int) -> None:
    row, job = TABLE[name], MODELS[name].job
    plan, total = _plan(job, size)
    assert_planned(row, plan)
    saved = sum((size - 1) * weight.num_elements // size for weight in _sharded(plan))
    assert total - saved <= (row.held if size == 2 else row.held - 0.15) * total


def _plan(job: Job, size: int) -> tuple[Plan, int]:
    """The plan of the first batch, and the number of parameters."""
    torch.manual_seed(0)
    module, samples = job.model(), job.data(job.global_batch_size)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
    batch = (job.collate or default_collate)([samples[index] for index in range(job.global_batch_size)])
    step = ExampleStep(name="training_step", microbatch=batch, modes=nullcontext)
    config = ThreeDConfig.from_mapping({"tensor_parallel_size": size})
    shape, device = MeshShape(pp=1, dp=1, cp=1, tp=size), torch.device("cpu")
    observed = Observer(module, step, device, StepEffects).observe(config, shape)
    return decide(observed, config, shape, device), sum(parameter.numel() for parameter in module.parameters())


def _sharded(plan: Plan) -> list[WeightPlan]:
    """The sharded parameters; ties once."""
    found = {
        f"{block.fqn}.{weight.fqn}": weight
        for block in plan.blocks
        for weight in (block.tensor.weights if block.tensor is not None else ())
        if weight.shard_dim is not None
    }
    return [weight for fqn, weight in found.items() if plan.ties.get(fqn, fqn) == fqn]


def assert_planned(row: Row, plan: Plan) -> None:
    """The collectives of every block, and the share of its parameters that is sharded."""
    expectations = [(name, block) for name in row.blocks for block in plan.blocks]
    matching = [(name, block) for name, block in expectations if name == block.kind or name in block.fqn]
    assert {name for name, _ in matching} == row.blocks.keys()
    for name, block in matching:
        expected, tensor = row.blocks[name], block.tensor
        assert tensor is not None
        assert tensor.is_sharded, f"{block.fqn}: {tensor}"
        backward = expected.backward if isinstance(expected.backward, int) else expected.backward[tensor.size]
        counts = (tensor.num_all_reduces_forward, tensor.num_all_reduces_backward, tensor.num_other_collectives_forward)
        assert counts == (expected.forward, backward, expected.others), f"{block.fqn}: {tensor}"
        assert tensor.sharded_share >= expected.share, f"{block.fqn}: {tensor}"
