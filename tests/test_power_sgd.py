"""Sending less at ZeRO stage 0: compressed gradients, against torch by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tests.models import ADAM_EPS, TinyMLP, features
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

STEPS, START, RANK = 7, 3, 2
State = dict[str, Tensor]
CUT = "layers.3"
"""The block with which the second of two pipeline stages begins."""


def _batches(dp_rank: int) -> DataLoader[tuple[Tensor, ...]]:
    data = features(STEPS * 8)
    return DataLoader(Subset(data, range(dp_rank, len(data), 2)), batch_size=4)  # type: ignore[arg-type]


def _fit(layout: Layout) -> State:
    """The weights after training."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=layout.strategy(),
        devices=layout.world_size,
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        **QUIET,
    )
    module = TinyMLP()
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
