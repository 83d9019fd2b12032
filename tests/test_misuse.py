"""Misuse: one clear error, alike on all ranks, exit code not 0, no hang, nothing accepted silently.

One mistake is made in a program that Lightning launches as a user would; the others in the worker pool, where the ranks
look as if torchrun had started them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ConfigError, ThreeDPrecision, ThreeDStrategy
from lightning_3d.errors import CheckpointError
from lightning_3d.torch_internals.launchers import ForkLauncher, ScriptLauncher
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET, assert_same_state, whole_state
from tests.scripts import start
from tests.workers import WorkerError, WorkerPools

LIMIT = 120.0
"""Seconds from the start of a program to the end of its last process, on a machine that does much else."""

STEPS = 4
BATCH_SIZE = 8

Batch = tuple[Tensor, Tensor]

# ------------------------------------------------------------------------------------- programs that Lightning launches


PROGRAM = """
import lightning as L
from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET

class Misspelt(TinyMLP):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return losss

strategy = ThreeDStrategy(pipeline_parallel_size=2)
trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_steps=4, enable_checkpointing=False)
trainer.fit(Misspelt(), loader(features(32), global_batch_size=8))
"""


def test_a_program_ends_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = start([str(tmp_path / "program.py")], timeout=LIMIT)
    assert ended.returncode != 0
    assert re.search(r"program.py.*in training_step\n(.*  )?return losss", ended.output.replace("[rank0]: ", ""))
    assert "NameError: name 'losss' is not defined" in ended.output
    assert "During handling of the above exception" not in ended.output, ended.output
    assert "to plan" not in ended.output


TAKEN = """
import os, socket
if "LOCAL_RANK" not in os.environ:
    taken = socket.create_server(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
"""


def test_no_rank_waits_for_one_that_could_not_begin(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TAKEN + PROGRAM)
    ended = start([str(tmp_path / "program.py")], timeout=LIMIT)  # until every rank has ended
    assert ended.returncode != 0
    assert "EADDRINUSE" in ended.output


# --------------------------------------------------------------------------------------------------------------- models


def model(change: Callable[[Any], object] = lambda made: None, **methods: Any) -> Callable[[], L.LightningModule]:
    """TinyMLP with other methods, changed once it is built."""

    def make() -> L.LightningModule:
        made = TinyMLP()
        made.__class__ = type("Model", (TinyMLP,), methods)
        change(made)
        return made

    return make


def branch_on_data(self: Any, x: Tensor) -> Tensor:
    x = self.layers[0](x)
    return self.layers[1:](2 * x if x.sum() > 0 else x)  # type: ignore[no-any-return]


def wrong_shape(self: Any, x: Tensor) -> Tensor:
    return self.layers[1](self.layers[0](x)[:, :5])  # type: ignore[no-any-return]


def plain(self: Any, batch: Batch) -> Tensor:
    return F.mse_loss(self(batch[0]), batch[1])


def nothing(self: Any, batch: Batch, batch_idx: int) -> None:
    plain(self, batch)


def nothing_later(self: Any, batch: Batch, batch_idx: int) -> Tensor | None:
    loss = plain(self, batch)
    return loss if self.global_step == 0 else None


def detached(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return plain(self, batch).detach()


def reduces(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """By torch itself."""
    loss = plain(self, batch)
    dist.all_reduce(loss.detach().clone())
    return loss


def _with_early_optimizer(made: Any) -> None:
    """One that makes states at once, before the strategy replaces the parameters."""
    made.optimizer = torch.optim.Adagrad(made.parameters(), lr=0.1)


class AnotherPath(TinyMLP):
    """Adds a call in its third step, which it counts."""

    num_begun = 0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.num_begun += 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, targets = batch
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and self.num_begun == 3:
                x = x.relu()
        return F.mse_loss(x, targets)


class WithoutBlocks(L.LightningModule):
    """All its parameters are used by glue."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.mse_loss(batch[0] @ self.weight, batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ----------------------------------------------------------------------------------------------------------------- data


def _differs_by_rank(shift: float = 1) -> Any:
    """As augmentation with a seed per rank makes it."""
    x = torch.arange(8.0 * STEPS * BATCH_SIZE).view(-1, 8).cos() + shift * dist.get_rank()
    return DataLoader(TensorDataset(x, x[:, :4]), batch_size=BATCH_SIZE)


def _batches(batch: Any) -> Any:
    dataset: Any = [batch] * STEPS
    return DataLoader(dataset, batch_size=None)


def _empty() -> Any:
    return DataLoader(TensorDataset(torch.ones(3, 8), torch.ones(3, 4)), batch_size=BATCH_SIZE, drop_last=True)


def _regression() -> Any:
    return loader(features(STEPS * BATCH_SIZE), global_batch_size=BATCH_SIZE)


# ------------------------------------------------------------------------------------------------------ the worker pool


@dataclass(frozen=True)
class Misuse:
    """A mistake, and the error that it must give on both of its ranks."""

    model: Callable[[], L.LightningModule]
    error: str
    """Name of the type, in `lightning_3d.errors` unless it is the user's own."""
    message: str
    """Regular expression for a part of it."""
    data: Callable[[], Any] = _regression
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"pipeline_parallel_size": 2})
    trainer: Mapping[str, Any] = field(default_factory=dict)


MICROBATCHED: Mapping[str, Any] = {"pipeline_parallel_size": 2, "pipeline": {"mode": "microbatched"}}
DP: Mapping[str, Any] = {"zero": {"stage": 1}}

HERE = r"test_misuse.py:\d+ in"
NEEDS = rf" at .*{HERE} \w+ needs the data of a tensor that comes from a block"
NO_GRAD = "a loss that does not require grad"

MISUSES = {
    "optimizer made too early": Misuse(
        model(_with_early_optimizer, configure_optimizers=lambda self: self.optimizer),
        "StepError",
        r"Adagrad holds 12 parameters that are not the module's \(the first of shape \(32, 8\)\)",
        strategy={"zero": {"stage": 3}},
    ),
    "sync_batchnorm": Misuse(
        model(lambda made: made.layers.append(nn.BatchNorm1d(4))),
        "StepError",
        r"Trainer\(sync_batchnorm=True\) for layers.6 needs torch's SyncBatchNorm, which does not run on CPUs",
        strategy=DP,
        trainer={"sync_batchnorm": True},
    ),
    "SyncBatchNorm": Misuse(
        model(lambda made: made.layers.append(nn.SyncBatchNorm(4))),
        "StepError",
        "layers.6, a SyncBatchNorm, communicates inside of a block, but with pipeline_parallel_size=2",
    ),
    "branch on data": Misuse(model(forward=branch_on_data), "TraceError", "__bool__" + NEEDS, strategy=MICROBATCHED),
    "wrong shape": Misuse(
        model(forward=wrong_shape),
        "TraceError",
        rf"Block layers.1 at .*{HERE} wrong_shape failed on fake and on random tensors.*\(4x5 and 32x32\)",
        strategy=MICROBATCHED,
    ),
    "another path": Misuse(
        AnotherPath,
        "TraceError",
        r"Pipeline stage 0: it took another path .*: it called relu, where the trace has layers.1 \(at",
        strategy=MICROBATCHED,
    ),
    "collective in a step": Misuse(
        model(training_step=reduces),
        "TraceError",
        rf"torch.distributed.all_reduce was called in a step \(at .*{HERE}",
        strategy=MICROBATCHED,
    ),
    "no loss": Misuse(
        model(training_step=nothing), "StepError", "training_step returned NoneType, not a loss. Return a 0-d tensor"
    ),
    "no loss after a while": Misuse(
        model(training_step=nothing_later), "StepError", "A step can't be skipped by returning None", strategy=DP
    ),
    "detached loss": Misuse(model(training_step=detached), "StepError", NO_GRAD),
    "lazy layer": Misuse(
        model(lambda made: made.layers.insert(0, nn.LazyLinear(8))),
        "StepError",
        "layers.0.weight of Model has no shape yet",
        strategy=DP,
    ),
    "no blocks": Misuse(
        WithoutBlocks,
        "PlanError",
        r"2 pipeline stages: the model has only 0 blocks to share out \(none\)",
    ),
    "another model on each rank": Misuse(
        lambda: TinyMLP(num_layers=2 + dist.get_rank()),
        "PlanError",
        r"where rank 0 has layers.3.weight \(4, 32\) torch.float32, rank 1 has layers.3.0.weight \(32, 32\)",
    ),
    "no block of this name": Misuse(
        TinyMLP,
        "PlanError",
        "'type:Transformer' matches no class of TinyMLP that has parameters. Its classes: Linear, Sequential",
        strategy={"pipeline_parallel_size": 2, "pipeline": {"partition": "type:Transformer"}},
    ),
    "more microbatches than samples": Misuse(
        TinyMLP,
        "TooFewSamplesError",
        "A batch of 8 samples can't be split into 16 microbatches. Raise the batch size",
        strategy={"pipeline_parallel_size": 2, "pipeline": {"num_microbatches": 16}},
    ),
    "another batch on each rank": Misuse(
        TinyMLP,
        "BatchError",
        r"The ranks of model replica 0 got different batches \(checksums rank 0: \w+, rank 1: \w+\)",
        data=_differs_by_rank,
    ),
    "batch of different lengths": Misuse(
        TinyMLP,
        "SplitError",
        r"The tensors of this batch differ: batch\[0\] \(8, 8\), batch\[1\] \(7, 4\)",
        strategy=MICROBATCHED,
        data=lambda: _batches((torch.ones(8, 8), torch.ones(7, 4))),
    ),
    "empty dataloader": Misuse(TinyMLP, "BatchError", "A dataloader is empty", data=_empty),
}


def _trainer(strategy: ThreeDStrategy, devices: int = 2, **arguments: Any) -> L.Trainer:
    settings = {**QUIET, "max_steps": STEPS, "enable_checkpointing": False, **arguments}
    return L.Trainer(devices=devices, strategy=strategy, **settings)


def _make(name: str) -> str:
    """What a rank raises."""
    misuse = MISUSES[name]
    L.seed_everything(0, verbose=False)
    try:
        _trainer(ThreeDStrategy(**misuse.strategy), **misuse.trainer).fit(misuse.model(), misuse.data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_alike_on_all_ranks(workers: WorkerPools, name: str) -> None:
    misuse = MISUSES[name]
    for error in workers(2).run(_make, name, timeout=LIMIT):
        assert error.startswith(f"{misuse.error}: "), error
        assert re.search(misuse.message, error, re.DOTALL), error


def test_more_devices_than_processes_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"does not match the world size \(2\)") as caught:
        workers(2).run(_fit_on_three, timeout=LIMIT)
    assert len(set(caught.value.failures.values())) == 1


def _trained(axis: str, data: Callable[[], Any], broadcast: bool) -> dict[str, Tensor]:
    L.seed_everything(0, verbose=False)
    trainer = _trainer(ThreeDStrategy(**{axis: 2}, batch={"broadcast": broadcast}))  # type: ignore[arg-type]
    trainer.fit(TinyMLP(), data())
    return whole_state(trainer)


@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_broadcasting_repairs_batches_that_differ(workers: WorkerPools, axis: str) -> None:
    alike = workers(2).run(_trained, axis, partial(_differs_by_rank, 0), False)
    assert_same_state(workers(2).run(_trained, axis, _differs_by_rank, True), alike[0])


def _fit_on_three() -> None:
    _trainer(ThreeDStrategy(), devices=3).fit(TinyMLP(), _regression())


def _resume_from_weights() -> str:
    if dist.get_rank() == 0:
        torch.save(TinyMLP().state_dict(), "weights.pt")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        _trainer(ThreeDStrategy()).fit(TinyMLP(), _regression(), ckpt_path="weights.pt")
    return str(caught.value)


def test_what_no_trainer_wrote_is_no_checkpoint(workers: WorkerPools) -> None:
    first, second = workers(2).run(_resume_from_weights, timeout=LIMIT)
    assert re.search(r"weights.pt is no checkpoint of Lightning.*its keys are layers.0.weight", first)
    assert second == first


# ------------------------------------------------------------------------------------------------------------ precision


def _one_process(**arguments: Any) -> L.Trainer:
    """A Trainer that fits nothing."""
    return _trainer(ThreeDStrategy(), devices=1, **arguments)


class OtherPrecision(Precision):
    """Somebody's own plugin."""

    precision = "32-true"


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        *((lambda precision=precision: {"precision": precision}, precision) for precision in ("64-true", "bf16-mixed")),
        (lambda: {"plugins": [DoublePrecision()]}, "64-true"),
        (lambda: {"plugins": [HalfPrecision("bf16-true")]}, "bf16-true"),
    ],
)
def test_precision_of_lightning_becomes_ours(arguments: Callable[[], dict[str, Any]], precision: str) -> None:
    plugin = _one_process(**arguments()).precision_plugin
    assert isinstance(plugin, ThreeDPrecision)
    assert plugin.precision == precision


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _one_process(plugins=[OtherPrecision()]),
            r"precision='32-true' \(OtherPrecision\) is not built for strategy='3d'",
        ),
        (
            lambda: _one_process(
                plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]
            ),
            r"a GradScaler with settings of its own would.*precision\.initial_scale_power",
        ),
        (lambda: ThreeDPrecision("transformer-engine"), "'transformer-engine' is not built for strategy='3d'.*fp8"),
    ],
)
def test_precisions_of_others_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("method", "launcher"), [("popen", ScriptLauncher), ("fork", ForkLauncher)])
def test_ranks_start_as_asked(method: Any, launcher: type) -> None:
    assert type(_trainer(ThreeDStrategy(start_method=method)).strategy.launcher) is launcher


def test_ranks_start_in_no_other_way() -> None:
    with pytest.raises(ConfigError, match="start_method='spawn': it is one of popen, fork"):
        ThreeDStrategy(start_method="spawn")  # type: ignore[arg-type]


def test_fp16_on_cpu_becomes_bf16_as_in_lightning() -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
        trainer = _one_process(precision="16-mixed")
    assert isinstance(trainer.precision_plugin, ThreeDPrecision)
    assert trainer.precision_plugin.precision == "bf16-mixed"
