"""Stage 3 under autocast: to gather weights in 16 bits changes no bit of what steps compute, whatever reads weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import ThreeDPrecision
from tests.models import Block, TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

DP = Layout(dp=2, zero=3)


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


class _Slices(Block):
    """Reads rows, columns and a transpose of its weight, each by itself, as experts do."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.mlp[0].weight
        x = x + F.linear(x, weight[16:32]) + x @ weight.T[:, :16] + x @ weight.view(4, 16, 16)[3]
        return super().forward(x)


class OddBlocks(Model):
    """Blocks that use their weights in some way besides, of which one is validated in fp32."""

    def __init__(self) -> None:
        super().__init__(_ReadsLate, _ClampsLate, _Slices)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x = self.tokens(batch[0])
        with torch.autocast("cpu", enabled=False):
            self.log("in_fp32", self.blocks[2](x).square().mean(), sync_dist=True)


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


def test_half_of_the_bytes_are_gathered(workers: WorkerPools) -> None:
    layout = replace(DP, activations={"recompute": "full"})
    gathered = workers(2).run(_both, layout, Model, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
    assert all(set(full) == {torch.float32} for full, _ in gathered)
    full, half = (sum(sum(of_rank[i].values()) for of_rank in gathered) for i in (0, 1))
    assert half < 0.65 * full


def test_reads(workers: WorkerPools) -> None:
    workers(2).run(_both, DP, OddBlocks, {})
