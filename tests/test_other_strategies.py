"""Training that goes on elsewhere: from Lightning's own strategies to this one and back, with the states of optimizers.

torch's FSDP, and so FSDPStrategy, trains on no CPU. Its folders are written and read here by its own code, with the
shards of FSDP2.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, fsdp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint import export_checkpoint
from tests.models import TinyGPT, tokens, training_loader
from tests.parity import QUIET, Layout
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

BATCHES = 4
LAYOUTS = [Layout(pp=2), Layout(dp=2, zero=3), Layout(tp=2)]
STRATEGIES = ("one process", "ddp", "model parallel", "fsdp")
IN_TEST = [("one process", LAYOUTS[0]), ("model parallel", LAYOUTS[0]), ("ddp", LAYOUTS[1]), ("fsdp", LAYOUTS[1])]
"""What `make test` has of all strategies with all layouts."""


class ShardedGPT(TinyGPT):
    """The model as ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        if not isinstance(self.tokens.weight, DTensor):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)


class FSDPFolders(ModelParallelStrategy):
    """Saves and loads by the code of FSDPStrategy, but for what concerns flat parameters."""

    _state_dict_type = "sharded"
    save_checkpoint = FSDPStrategy.save_checkpoint

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "_get_sharded_state_dict_context", lambda module: nullcontext())
            patch.setattr(FullyShardedDataParallel, "optim_state_dict_to_load", _for_dtensors)
            return FSDPStrategy.load_checkpoint(self, checkpoint_path, weights_only)  # type: ignore[arg-type]


def _for_dtensors(*, optim_state_dict: dict[str, Any], model: L.LightningModule, optim: Optimizer) -> dict[str, Any]:
    """States by FQN, in rows of each rank, for parameters that are sharded so."""
    parameters = dict(model.named_parameters())
    fqns = {parameter: fqn for fqn, parameter in parameters.items()}
    order = [fqns[parameter] for group in optim.param_groups for parameter in group["params"]]

    def placed(value: Any, parameter: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        rows = value.local_shards()[0].tensor
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(rows, mesh, placements, shape=parameter.shape, stride=parameter.stride())

    state = {
        order.index(fqn): {name: placed(value, parameters[fqn]) for name, value in values.items()}
        for fqn, values in optim_state_dict["state"].items()
    }
    groups = [
        {**group, "params": [order.index(fqn) for fqn in group["params"]]} for group in optim_state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


class Losses(L.Callback):
    """The loss of every step, over all replicas."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["loss_step"]))


def _strategy(how: Layout | str) -> Any:
    if isinstance(how, Layout):
        return how.strategy()
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return {
        "one process": lambda: "auto",
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "model parallel": lambda: ModelParallelStrategy(**sizes),
        "fsdp": lambda: FSDPFolders(**sizes),
    }[how]()


def _train(
    how: Layout | str, *, epochs: int = 2, ckpt_path: Path | None = None, save: Path | None = None
) -> tuple[list[float], dict[str, Any]]:
    """The losses of the steps that were made, and the learning rates and counts at the end."""
    num_ranks, dp = (how.world_size, how.dp) if isinstance(how, Layout) else (2, 2) if how != "one process" else (1, 1)
    L.seed_everything(1, verbose=False)
    losses = Losses()
    module = (ShardedGPT if how in ("model parallel", "fsdp") else TinyGPT)(num_layers=2)
    trainer = L.Trainer(
        **QUIET,
        strategy=_strategy(how),
        devices=num_ranks,
        max_epochs=epochs,
        enable_checkpointing=False,
        callbacks=[losses],
    )
    data = training_loader(tokens(8 * BATCHES), global_batch_size=8, data_parallel_size=dp)
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return losses.seen, {"lr": rates, "steps": trainer.global_step, "epochs": trainer.current_epoch}


def _world_size(how: Layout | str) -> int:
    return how.world_size if isinstance(how, Layout) else 1 if how == "one process" else 2


def _assert_goes_on(workers: WorkerPools, how: Layout | str, ckpt_path: Path) -> None:
    """The losses of the second epoch are those of a run that was not interrupted."""
    whole, at_end = workers(1).run(partial(_train, "one process"))[0]
    for losses, state in workers(_world_size(how)).run(partial(_train, how, ckpt_path=ckpt_path)):
        assert state == at_end
        torch.testing.assert_close(losses, whole[BATCHES:], atol=2e-5, rtol=0)
    fresh = whole[:BATCHES]
    assert max(abs(a - b) for a, b in zip(fresh, whole[BATCHES:], strict=True)) > 0.05  # starting anew would show


# ---------------------------------------------------------------------------------------------------- to this strategy


@pytest.mark.parametrize(
    ("before", "after"),
    some_in_matrix(itertools.product(STRATEGIES, LAYOUTS), lambda before, after: (before, after) not in IN_TEST),
    ids=str,
)
def test_training_goes_on_here(workers: WorkerPools, tmp_path: Path, before: str, after: Layout) -> None:
    path = tmp_path / "first.ckpt"
    workers(_world_size(before)).run(partial(_train, before, epochs=1, save=path))
    assert path.is_dir() == (before in ("model parallel", "fsdp"))
    _assert_goes_on(workers, after, path)


# -------------------------------------------------------------------------------------------------- from this strategy


@pytest.mark.parametrize(
    ("after", "before"),
    some_in_matrix(itertools.product(STRATEGIES, LAYOUTS), lambda after, before: (after, before) not in IN_TEST),
    ids=str,
)
def test_training_goes_on_there(workers: WorkerPools, tmp_path: Path, before: Layout, after: str) -> None:
    path = tmp_path / "first.ckpt"
    folders = Layout(**{**vars(before), "save_distributed_checkpoint": True})
    workers(2).run(partial(_train, folders, epochs=1, save=path))
    if after != "model parallel":  # which reads our folders as they are
        export_checkpoint(path, tmp_path / "out", format="fsdp" if after == "fsdp" else "file")
        path = tmp_path / "out"
    _assert_goes_on(workers, after, path)


def _weights(module: type[L.LightningModule], path: Path) -> dict[str, Tensor]:
    return dict(module.load_from_checkpoint(path, weights_only=False).state_dict())


def test_load_from_checkpoint_reads_folders_of_lightning(workers: WorkerPools, tmp_path: Path) -> None:
    states = []
    for before in ("model parallel", "fsdp"):
        workers(2).run(partial(_train, before, epochs=1, save=tmp_path / before))
        states.append(_weights(TinyGPT, tmp_path / before))
    assert states[0].keys() == states[1].keys() == TinyGPT(num_layers=2).state_dict().keys()
    assert all(torch.equal(states[0][fqn], states[1][fqn]) for fqn in states[0])
