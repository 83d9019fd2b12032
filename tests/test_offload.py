"""Offloaded optimizer states and parameters: where they lie, how much of them is in memory, disks, and what is refused.

That the numbers are those of one process the law shows (`offloaded`).
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import OffloadError
from lightning_3d.zero.offload import steps
from lightning_3d.zero.offload.copies import HostCopies
from lightning_3d.zero.offload.store import Advice, Store
from tests.models import TinyGPT, TinyMLP, features
from tests.optimizers import ClippingAdam
from tests.parity import QUIET, Layout, fitted
from tests.workers import WorkerError, WorkerPools

FILES = {"offload_optimizer": "states", "offload_window": 0.005}

# ------------------------------------------------------------------------------------------------------ where they lie


def _mapped(tensor: Tensor, directory: str) -> bool:
    """Whether a tensor's memory is that of a deleted file in a directory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return f"/{directory}/" in line
    return False


@dataclass
class _Places:
    states: list[bool] = field(default_factory=list)
    parameters: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    on_device: int = -1
    offloaded: int = -1
    num_windows: int = 0


class _Where(L.Callback):
    def __init__(self) -> None:
        self.places = _Places()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        held = [p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters()]
        states = [t for state in optimizer.state.values() for t in state.values() if t.nbytes >= 4096]
        assert len(states) > 10
        places, folders = self.places, [Path("states"), Path("parameters")]
        places.states += [_mapped(t, "states") for t in states]
        places.parameters += [_mapped(t, "parameters") for t in held if t.nbytes >= 4096]
        places.names += [str(path) for folder in folders if folder.exists() for path in folder.iterdir()]
        assert isinstance(trainer.strategy, ThreeDStrategy)
        report = trainer.strategy.report()[trainer.global_rank]
        places.on_device, places.offloaded = report.optimizer_bytes, report.offloaded_bytes


def _where(zero: dict[str, Any]) -> _Places:
    where, step = _Where(), steps.step_without_hooks

    def counted(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        where.places.num_windows += 1
        step(optimizer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "step_without_hooks", counted)
        fitted(Layout(dp=2, zero=3, zero_settings=zero), TinyGPT, callbacks=[where], batches=3, epochs=1)
    return where.places


def test_states_and_parameters_lie_in_files_without_names(workers: WorkerPools) -> None:
    for places in workers(2).run(_where, {**FILES, "offload_params": "parameters"}):
        assert all(places.states)
        assert places.parameters
        assert all(places.parameters)
        assert places.names == []
        assert places.num_windows > 3 * 10
        assert places.on_device == 0
        assert places.offloaded > 100_000


class _Large(L.LightningModule):
    """40 MiB of parameters, 2 MiB in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 512, bias=False) for _ in range(20))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = sum(layer(batch[0]).square().mean() for layer in self.layers)  # type: ignore[assignment]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _memory(window: float) -> tuple[list[int], int]:
    """After the step of each window, where it is largest, what the process holds of files; and MiB of all states."""
    module, give_back, in_files = _Large(), HostCopies.give_back, list[int]()

    def measured(*args: Any) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        in_files.append(int(status["RssFile"].split()[0]) // 1024)
        give_back(*args)

    strategy = ThreeDStrategy(zero={"stage": 0, "offload_optimizer": "states", "offload_window": window})
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, enable_checkpointing=False, **QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopies, "give_back", measured)
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 1024)), batch_size=4))
    (optimizer,) = trainer.optimizers
    num_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    return in_files, num_bytes // 2**20


def test_memory_holds_a_window_of_states(workers: WorkerPools) -> None:
    ((seen, num_mib),) = workers(1).run(_memory, 2.0)
    assert num_mib >= 80, "AdamW's state"
    assert len(seen) > 4 * 15
    assert max(seen) - min(seen) <= 2 * 2 + 4, "twice the window"
    ((seen, _),) = workers(1).run(_memory, 100.0)
    assert max(seen) - min(seen) >= 70, "a window as large as the model"


class Clipping(TinyMLP):
    def configure_optimizers(self) -> Any:
        return ClippingAdam(self.parameters(), lr=0.01)


def _refused() -> None:
    fitted(Layout(dp=2, zero_settings={"offload_optimizer": "cpu"}), Clipping, data=features)


def test_optimizers_that_step_all_together_are_refused(workers: WorkerPools) -> None:
    message = "StepError: ClippingAdam steps all parameters together.*offload_optimizer='cpu'"
    with pytest.raises(WorkerError, match=message):
        workers(2).run(_refused)


# ------------------------------------------------------------------------------------------------------------ failures


def _without_permission() -> None:
    """Train where rank 1 has no right to make files."""

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("lightning_3d.zero.offload.store.os.posix_fallocate", refuse)
        fitted(Layout(dp=2, zero_settings=FILES), TinyGPT, batches=3, epochs=1)


def test_a_directory_that_one_rank_may_not_write_ends_all(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"can't offload to states: Permission.*bytes are free") as caught:
        workers(2).run(_without_permission)
    assert caught.value.failures.keys() == {0, 1}
    assert all("OffloadError: can't offload to states" in report for report in caught.value.failures.values())


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    store, (before, most) = Store(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, most))
    try:
        with pytest.raises(OffloadError, match=r"A file of 2,097,152 bytes was to be made there"):
            store.zeros(torch.Size([2**21]), torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    kept = store.zeros(torch.Size([4096]), torch.float32)
    kept.add_(1)
    store.advise([kept], Advice.NOT_FOR_A_WHILE)
    assert kept.sum() == 4096
    assert os.listdir(tmp_path) == []
