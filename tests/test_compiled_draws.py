"""Blocks that draw random numbers, compiled on shards: the numbers of eager blocks, and generators that go on alike."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_3d.config.compile import CompileConfig
from lightning_3d.tensor import BlockCompiler, apply_block, plan_block
from tests.workers import WorkerPools

SHAPE = (2, 8, 32)  # (B, T, D)


class Dropping(nn.Module):
    """Dropout on shards, on what is replicated and in the attention; (B, T, 32) -> (B, T, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout, self.default = nn.Dropout(0.2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.default(self.attend(self.norm1(x)))
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        dropout_p = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


class Noisy(Dropping):
    """Noise of many kinds besides."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x + 0.0, 0.1, self.training, inplace=True)
        x = super().forward(x * torch.rand(()) + 0.1 * torch.randn_like(x)) + x.new_empty(32).uniform_(-0.1, 0.1)
        x = torch.native_dropout(x, 0.1, True)[0]  # as dropout on a GPU does
        x = F.dropout1d(F.alpha_dropout(x, 0.1, self.training), 0.1, self.training)
        return x[:, torch.randperm(x.shape[1])] * torch.normal(1.0, 0.1, (32,))


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "again": lambda block, x: block(x),
    "twice": lambda block, x: block(block(x)),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "without gradient": lambda block, x: torch.no_grad()(block)(x),
    "in inference mode": lambda block, x: torch.inference_mode()(block)(x.detach().clone()).clone(),
    "in evaluation": lambda block, x: block.eval()(x),
    "in training again": lambda block, x: block.train()(x),
}


def _run(block: nn.Module, inputs: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Outputs and gradients by way to run a block; the generator's states afterwards."""
    torch.manual_seed(3)
    found, states = {}, {}
    for name, way in WAYS.items():
        leaf = inputs.clone().requires_grad_()
        output = way(block, leaf * 1.0)
        found[name] = [output.detach()]
        if output.requires_grad:
            block.zero_grad()
            output.sin().sum().backward()
            found[name] += [leaf.grad, *(p.grad.to_local() for p in block.parameters())]
        states[name] = torch.get_rng_state()
    return found, states


def _against_eager(make: type[nn.Module], backend: str) -> tuple[float, int, list[str]]:
    """Greatest difference of compiled shards from eager ones, kinds of calls compiled, warnings."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dense, inputs = make(), torch.randn(SHAPE)
    plan = plan_block(dense.eval(), (inputs,), {}, size=2)
    assert plan.is_sharded
    compiler = BlockCompiler(mesh, CompileConfig(backend=backend))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = []
        for by in (None, compiler):
            block = copy.deepcopy(dense.train())
            apply_block(block, plan, mesh, compiler=by)
            runs.append(_run(block, inputs))
    (eager, eager_states), (compiled, states) = runs
    for name in WAYS:
        assert torch.equal(states[name], eager_states[name]), f"{name}: the generator has drawn something else"
    differences = [
        float((found - wanted).abs().max())
        for name in WAYS
        for found, wanted in zip(compiled[name], eager[name], strict=True)
    ]
    told = [str(warning.message) for warning in caught if "compile.enabled" in str(warning.message)]
    return max(differences), compiler.num_compiled, told


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (Noisy, "aot_eager"),
        pytest.param(
            Dropping,
            "inductor",
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
        ),
    ],
)
def test_numbers_are_those_of_eager_shards(workers: WorkerPools, make: type[nn.Module], backend: str) -> None:
    for difference, num_compiled, told in workers(2).run(_against_eager, make, backend):
        assert difference < 1e-5
        assert num_compiled == 4, "training with and without gradient and in inference mode, evaluation"
        assert not told
