"""Sending less at ZeRO stage 0: compressed gradients, parameters averaged every few steps; against torch by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tests.models import ADAM_EPS, TinyMLP, features
from tests.parity import QUIET, Layout, fitted
from tests.workers import WorkerError, WorkerPools

STEPS, START, RANK, PERIOD, CLIP = 7, 3, 2, 3, 0.05
State = dict[str, Tensor]
CUT = "layers.3"
"""The block with which the second of two pipeline stages begins."""


def _batches(dp_rank: int) -> DataLoader[tuple[Tensor, ...]]:
    data = features(STEPS * 8)
    return DataLoader(Subset(data, range(dp_rank, len(data), 2)), batch_size=4)  # type: ignore[arg-type]


def _fit(layout: Layout, model: type[L.LightningModule] = TinyMLP, **settings: Any) -> State:
    """The weights after training."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=layout.strategy(),
        devices=layout.world_size,
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        **{**QUIET, **settings},
    )
    module = model()
    trainer.fit(module, _batches(dist.get_rank() % layout.dp))  # the dp axis comes after the pp axis
    path = Path("final.ckpt")
    trainer.save_checkpoint(path)
    state: State = torch.load(path, weights_only=True)["state_dict"]
    own = dict(module.named_parameters())
    for fqn, value in state.items():  # replicas agree
        if not own[fqn].is_meta:
            torch.testing.assert_close(own[fqn].detach(), value, atol=0, rtol=0)
    return state


def _compress_by_hand() -> State:
    """DDP for each stage, with torch's hook."""
    L.seed_everything(1, verbose=False)
    module, parts = TinyMLP(), []
    for layers in (module.layers[:3], module.layers[3:]):  # type: ignore[operator]
        group = dist.new_group()  # or gloo mixes up what the hooks of two stages send
        part = DistributedDataParallel(layers, process_group=group)
        state = PowerSGDState(group, RANK, START, orthogonalization_epsilon=1e-8)  # type: ignore[no-untyped-call]
        part.register_comm_hook(state, powerSGD_hook)
        parts.append(part)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=ADAM_EPS)
    for x, y in _batches(dist.get_rank()):
        optimizer.zero_grad()
        F.mse_loss(nn.Sequential(*parts)(x), y).backward()
        optimizer.step()
    return module.state_dict()


def _close(actual: Sequence[State], expected: State) -> None:
    for state in actual:
        assert state.keys() == expected.keys()
        for fqn, value in expected.items():
            torch.testing.assert_close(state[fqn], value, atol=1e-5, rtol=0)


def test_power_sgd_is_that_of_ddp(workers: WorkerPools) -> None:
    settings = {"power_sgd_rank": RANK, "power_sgd_start": START}
    expected, _ = workers(2).run(_compress_by_hand)
    _close(workers(4).run(_fit, Layout(pp=2, dp=2, zero=0, partition=(CUT,), zero_settings=settings)), expected)
    exact, _ = workers(2).run(_fit, Layout(dp=2, zero=0))
    assert max(float((exact[fqn] - value).abs().max()) for fqn, value in expected.items()) > 1e-3


def _average_by_hand() -> State:
    L.seed_everything(1, verbose=False)
    module = TinyMLP()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=ADAM_EPS)
    for step, (x, y) in enumerate(_batches(dist.get_rank()), start=1):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        if step % PERIOD == 0 or step == STEPS:
            for parameter in module.parameters():
                dist.all_reduce(parameter.detach())
                parameter.detach().div_(2)
    return module.state_dict()


def test_parameters_are_averaged_every_few_steps(workers: WorkerPools) -> None:
    expected, _ = workers(2).run(_average_by_hand)
    _close(workers(2).run(_fit_clipped, Layout(dp=2, zero=0, zero_settings={"averaging_period": PERIOD})), expected)
    exact, _ = workers(2).run(_fit_clipped, Layout(dp=2, zero=0))
    assert max(float((exact[fqn] - value).abs().max()) for fqn, value in expected.items()) > 1e-4


def _fit_clipped(layout: Layout) -> State:
    return _fit(layout, gradient_clip_val=CLIP)


class _Compares(L.Callback):
    """Whether replicas agree in validation, and differ before."""

    def __init__(self) -> None:
        self.differs: list[bool] = []

    def _note(self, pl_module: L.LightningModule) -> None:
        flat = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        self.differs.append(not torch.equal(*both))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._note(pl_module)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._note(pl_module)


AVERAGED = Layout(dp=2, zero=0, zero_settings={"averaging_period": 4})


def _validate_between() -> list[bool]:
    compares = _Compares()
    how: dict[str, Any] = {"batches": 6, "epochs": 1, "val_check_interval": 2, "limit_val_batches": 1}
    fitted(AVERAGED, TinyMLP, callbacks=[compares], data=features, **how)
    return compares.differs


def test_replicas_agree_where_they_are_looked_at(workers: WorkerPools) -> None:
    for differs in workers(2).run(_validate_between):
        assert differs == [True, True, False] * 3, "two steps and a validation"


def _average_twice() -> None:
    fitted(AVERAGED, TinyMLP, callbacks=[EMAWeightAveraging()], data=features)


def test_averages_of_what_differs_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match="EMAWeightAveraging averages what each replica has stepped on its own"):
        workers(2).run(_average_twice)
