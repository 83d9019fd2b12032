"""Blocks in transforms of ``torch.func`` are refused with tensor parallel; transforms inside of a block are planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.distributed.mesh import resolve_mesh_shape
from lightning_3d.errors import TraceError
from lightning_3d.planning.plan import Plan
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.decide.dry_run import DryRun
from tests.models import Regression
from tests.parity import Layout


class Mapped(nn.Module):
    """A net whose layers get one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.vmap(layer)(x)
        return x


class Written(nn.Module):
    """A net whose weights another writes, for each sample its own."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.write = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 212))

    def forward(self, x: Tensor) -> Tensor:
        shapes = {name: parameter.shape for name, parameter in self.main.named_parameters()}
        flat = self.write(x).split([shape.numel() for shape in shapes.values()], -1)
        weights = {name: w.unflatten(-1, shape) for (name, shape), w in zip(shapes.items(), flat, strict=True)}
        output: Tensor = torch.vmap(lambda w, x: torch.func.functional_call(self.main, w, (x,)))(weights, x)
        return output


class Program(Regression):
    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__()
        self.net, self.last = net, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.net(x))
        return output


PROGRAMS = {"Mapped": lambda: Program(Mapped(), 8), "Written": lambda: Program(Written(), 4)}


def _planned(inner: str, layout: Layout) -> Plan:
    config, batch = layout.strategy().config, (torch.randn(4, 8), torch.randn(4, 4))
    ahead = DryRun.without_trainer(PROGRAMS[inner](), batch, config, ThreeDPrecision("32-true"), optimizer=2)
    return ahead.plan(config, resolve_mesh_shape(config, 2), memory=None).plan


@pytest.mark.parametrize("inner", PROGRAMS)
def test_a_transform_is_planned_inside_of_a_block_alone(inner: str) -> None:
    with pytest.raises(TraceError, match=r"runs inside of a transform of torch.func .* leaves it replicated"):
        _planned(inner, Layout(tp=2))
    for layout in (Layout(tp=2, partition=f"type:{inner}|Linear"), Layout(pp=2, partition=f"type:{inner}|Linear")):
        net, _ = _planned(inner, layout).blocks
        assert (net.fqn, net.tensor is None or not net.tensor.is_sharded) == ("net", True)
