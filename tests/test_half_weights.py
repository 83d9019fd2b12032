"""Stage 3 under autocast: to gather weights in 16 bits changes no bit of what steps compute."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import ThreeDPrecision
from tests.models import Block, TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools


class _Shared(Block):
    """Computes with weights twice, of which gradients add up."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x)) + self.attention(self.norm2(x))
        output: Tensor = x + self.mlp(self.norm2(x)) + self.mlp[2](self.mlp[0](x))
        return output


class Model(TinyGPT):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=2, tied=False)
        self.blocks = nn.ModuleList(_Shared(16, 4) for _ in range(2))


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


def _trained(is_half: bool) -> tuple[dict[str, Tensor], Counter[torch.dtype], tuple[str, ...]]:
    seen, layout = _Sees(), Layout(dp=2, zero=3, activations={"recompute": "full"})
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}
    casts_to = ThreeDPrecision.casts_to if is_half else None
    with mock.patch.object(ThreeDPrecision, "casts_to", casts_to):
        runs, _ = fitted(layout, Model, callbacks=[seen], **settings)
    numbers = {f"loss {i}": torch.tensor(loss) for i, loss in enumerate(seen.losses)}
    numbers.update({name: value.detach() for name, value in runs.callback_metrics.items()})
    return {**numbers, **whole_state(runs)}, seen.gathered, runs.strategy.plan.findings.gathers  # type: ignore[attr-defined]


def _both() -> tuple[Counter[torch.dtype], Counter[torch.dtype]]:
    """What is gathered in fp32 and in 16 bits, where it makes no difference."""
    (full, in_fp32, none), (half, in_half, lines) = map(_trained, (False, True))
    assert full.keys() == half.keys()
    assert not [name for name, value in full.items() if not torch.equal(value, half[name])]
    assert not none
    assert "gathered in" in lines[0]
    return in_fp32, in_half


def test_half_of_the_bytes_are_gathered(workers: WorkerPools) -> None:
    gathered = workers(2).run(_both)
    assert all(set(full) == {torch.float32} for full, _ in gathered)
    full, half = (sum(sum(of_rank[i].values()) for of_rank in gathered) for i in (0, 1))
    assert half < 0.65 * full
