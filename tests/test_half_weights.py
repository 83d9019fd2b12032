"""Stage 3 under autocast: to gather weights in 16 bits changes no bit of what steps compute, whatever reads weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import ThreeDPrecision
from tests.models import Block, TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

DP = Layout(dp=2, zero=3)
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "recomputed": (
        replace(DP, activations={"recompute": "full"}),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "fp16": (DP, {"precision": None, "plugins": [ThreeDPrecision("16-mixed")]}),
}
"""Layout, and settings of the Trainer."""


class _Shared(Block):
    """Computes with weights twice, of which gradients add up."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x)) + self.attention(self.norm2(x))
        output: Tensor = x + self.mlp(self.norm2(x)) + self.mlp[2](self.mlp[0](x))
        return output


class Model(TinyGPT):
    """A small GPT."""

    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__(width=16, num_layers=2, tied=False)
        self.blocks = nn.ModuleList(block(16, 4) for block in blocks or (_Shared, _Shared))


class _Late(Block):
    """Does something else from the third forward with gradients on."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += torch.is_grad_enabled()
        return super().forward(self.change(x) if self.num_calls > 2 else x)

    def change(self, x: Tensor) -> Tensor:
        """What it does."""
        raise NotImplementedError


class _ReadsLate(_Late):
    """A weight in fp32, whole, through a view, and by an operator that saves it for its backward."""

    def change(self, x: Tensor) -> Tensor:
        weight = self.mlp[0].weight
        assert isinstance(weight, nn.Parameter)
        assert weight.dtype == torch.float32
        return x * (1 + weight.pow(2).mean() + weight[1].exp().mean() + weight.T.double().sum())


class _ClampsLate(_Late):
    """In place, a weight and a view of one."""

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mlp[0].weight.clamp_(-0.1, 0.1)  # type: ignore[union-attr,operator]
            self.mlp[2].weight[:3].mul_(0.5)  # type: ignore[union-attr,index]
        return x


class _ChangesItsCast(Block):
    """From the first step on a cast is this code's own, and kept until the next step."""

    def forward(self, x: Tensor) -> Tensor:
        self.cast = self.mlp[0].weight.to(torch.bfloat16).detach().mul_(0.5)
        x = x + F.linear(F.linear(x, self.mlp[0].weight), self.cast.T.contiguous())  # type: ignore[arg-type]
        return super().forward(x) + 0 * self.cast.sum()


class _Slices(Block):
    """Reads rows, columns and a transpose of its weight, each by itself, as experts do."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.mlp[0].weight
        x = x + F.linear(x, weight[16:32]) + x @ weight.T[:, :16] + x @ weight.view(4, 16, 16)[3]
        return super().forward(x)


class _DiffersByReplica(Block):
    """The second replica's data read a weight in fp32 in the first step, where the first one's do not."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 1 and dist.get_rank() == 1:
            x = x + self.mlp[0].weight.pow(2).mean()  # type: ignore[operator,union-attr]
        return super().forward(x)


class _Linear(nn.Linear):
    """A linear layer whose forward is not torch's own, which torch refuses to compile by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _PartlyCompiled(Block):
    """Compiles the second layer of its MLP, whose weights stay in fp32."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.mlp[2] = _Linear(4 * width, width)
        self.mlp[2].compile(backend="eager", fullgraph=True)


class OddBlocks(Model):
    """Blocks that use their weights in some way besides, of which one is validated in fp32."""

    def __init__(self) -> None:
        super().__init__(_ReadsLate, _ClampsLate, _ChangesItsCast, _Slices, _DiffersByReplica, _PartlyCompiled)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x = self.tokens(batch[0])
        with torch.autocast("cpu", enabled=False):
            self.log("in_fp32", self.blocks[3](x).square().mean(), sync_dist=True)


class KeepsGraph(Model):
    """The loss of a step has a part of the step before."""

    automatic_optimization = False
    before: Any = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:
            self.before = loss
            return loss.detach()
        self.manual_backward(loss + self.before)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class _Sees(L.Callback, TorchDispatchMode):
    """The losses, and the bytes gathered in the last step of training, by dtype."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.losses: list[float] = []
        self.gathered: Counter[torch.dtype] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.gathered[args[0].dtype] += args[0].nbytes
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            self.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            self.__exit__(None, None, None)
        self.losses.append(float(outputs["loss"]))


def _trained(
    layout: Layout, model: Callable[[], L.LightningModule], is_half: bool, trainer: dict[str, Any]
) -> tuple[dict[str, Tensor], Counter[torch.dtype], tuple[str, ...]]:
    seen = _Sees()
    settings: dict[str, Any] = {"precision": "bf16-mixed", **trainer}
    casts_to = ThreeDPrecision.casts_to if is_half else None
    with mock.patch.object(ThreeDPrecision, "casts_to", casts_to):
        runs, _ = fitted(layout, model, callbacks=[seen], **settings)
    numbers = {f"loss {i}": torch.tensor(loss) for i, loss in enumerate(seen.losses)}
    numbers.update({name: value.detach() for name, value in runs.callback_metrics.items()})
    return {**numbers, **whole_state(runs)}, seen.gathered, runs.strategy.plan.gathers  # type: ignore[attr-defined]


def _both(
    layout: Layout, model: Callable[[], L.LightningModule], trainer: dict[str, Any]
) -> tuple[Counter[torch.dtype], Counter[torch.dtype]]:
    """What is gathered in fp32 and in 16 bits, where it makes no difference."""
    (full, in_fp32, none), (half, in_half, lines) = (
        _trained(layout, model, is_half, trainer) for is_half in (False, True)
    )
    assert full.keys() == half.keys()
    assert not [name for name, value in full.items() if not torch.equal(value, half[name])]
    assert not none
    assert "gathered in" in lines[0]
    return in_fp32, in_half


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(workers: WorkerPools, name: str) -> None:
    layout, trainer = LAYOUTS[name]
    gathered = workers(layout.world_size).run(_both, layout, Model, trainer)
    assert all(set(full) == {torch.float32} for full, _ in gathered)
    full, half = (sum(sum(of_rank[i].values()) for of_rank in gathered) for i in (0, 1))
    assert half < 0.65 * full


@pytest.mark.parametrize("model", [OddBlocks, KeepsGraph])
def test_reads(workers: WorkerPools, model: Callable[[], L.LightningModule]) -> None:
    workers(2).run(_both, DP, model, {})
