"""Misuse: one clear error, alike on all ranks, exit code not 0, no hang, nothing accepted silently.

The mistakes of `SCRIPTS` are made in programs that Lightning launches as a user would; the others in the worker pool,
where the ranks look as if torchrun had started them. What looks like misuse but is supported is shown at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_3d import ConfigError, ThreeDPrecision, ThreeDStrategy
from lightning_3d.errors import CheckpointError
from tests.models import TinyMLP, features, loader
from tests.scripts import Ended, start
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

LIMIT = 120.0
"""Seconds from the start of a program to the end of its last process, on a machine that does much else."""

STEPS = 4
BATCH_SIZE = 8

Batch = tuple[Tensor, Tensor]

# ------------------------------------------------------------------------------------- programs that Lightning launches


@dataclass(frozen=True, kw_only=True)
class Program:
    """A mistake of `tests/scripts/misuse.py`."""

    name: str
    errors: Mapping[int, str]
    """What each rank that gets so far raises: the beginning of `Type: message`."""


def _alike(error: str) -> dict[int, str]:
    return {0: error, 1: error}


LOST = "RankError: rank "
"""How a rank reports that another one is gone; `tests/test_run_ends.py` tells what it says of it."""

PROGRAMS = [
    # Found before the other processes are started.
    Program(name="world size", errors={0: "ConfigError: world size 3 is not divisible by pipeline 2 x context 1"}),
    Program(
        name="key", errors={0: "ConfigError: unknown config key 'zero.stge': the nearest valid key is 'zero.stage'"}
    ),
    Program(
        name="value",
        errors={0: "ConfigError: pipeline.schedule='1f1bb' is not allowed: use 'gpipe', '1f1b'"},
    ),
    Program(
        name="size", errors={0: "ConfigError: pipeline_parallel_size=0 is not allowed: use an integer of at least 1"}
    ),
    # Found on all ranks.
    Program(
        name="stages",
        errors=_alike("PlanError: 2 pipeline stages: the model has only 1 calls of blocks to share out (layers)."),
    ),
    Program(
        name="microbatches",
        errors=_alike("BatchError: A batch of 2 samples can't be split into 4 microbatches. Raise the batch size"),
    ),
    Program(
        name="no loss", errors=_alike("StepError: training_step returned NoneType, not a loss. Return a 0-d tensor")
    ),
    Program(name="misspelt", errors=_alike("NameError: name 'losss' is not defined")),
    # One rank fails or is killed in the middle of training: the others lose their connection and end, too.
    Program(name="user's error", errors={0: LOST, 1: "ArithmeticError: the model's own error"}),
    Program(name="first stage dies", errors={1: LOST}),
    Program(name="last replica dies", errors={0: LOST}),
]

ALIKE = ("value", "size", "microbatches", "no loss", "last replica dies")
"""Programs that end as others do, and that are left to `make test-matrix`."""


Runs = Mapping[str, tuple[Future[Ended], Path]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The programs of this session, two at a time, as one waits most of its time for one process to import; and where
    errors go.
    """
    executor = ThreadPoolExecutor(max_workers=2)
    name = test_program_ends_with_one_clear_error.__name__
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == name]
    programs = [item.callspec.params["program"] for item in chosen]
    directories = {program.name: tmp_path_factory.mktemp("program") for program in programs}
    yield {
        name: (executor.submit(start, ["tests/scripts/misuse.py", name, str(directory)], timeout=LIMIT), directory)
        for name, directory in directories.items()
    }
    executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "program", some_in_matrix(PROGRAMS, lambda program: program.name in ALIKE), ids=lambda program: program.name
)
def test_program_ends_with_one_clear_error(program: Program, runs: Runs) -> None:
    run, directory = runs[program.name]
    ended = run.result()
    assert ended.returncode != 0
    errors = {int(file.name.removeprefix("rank")): file.read_text() for file in directory.iterdir()}
    assert errors.keys() == program.errors.keys(), errors
    for rank, expected in program.errors.items():
        assert errors[rank].startswith(expected)
        assert expected in ended.output
    if len(set(program.errors.values())) == 1:
        assert len(set(errors.values())) == 1, errors
    is_started = len(program.errors) > 1 or LOST in program.errors.values()
    has_traceback = LOST not in program.errors.values() or len(program.errors) > 1  # none where a rank is killed
    assert ended.output.count("Traceback (most recent call last)") == has_traceback, ended.output
    if is_started:  # before that the frames are few
        assert "/lightning_3d/" not in ended.output.replace("/lightning_3d/errors", ""), ended.output
    if program.name == "misspelt":
        assert re.search(r"misuse.py.*in training_step\n\s+return losss", ended.output)
        assert "to plan" not in ended.output


# --------------------------------------------------------------------------------------------------------------- models


class ManualOptimization(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]  # returns no loss
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


class WithLBFGS(TinyMLP):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=self.lr, max_iter=3)


class WithBatchNorm(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(super().forward(x))
        return y


class WithSyncBatchNorm(WithBatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)


class WithPenalty(TinyMLP):
    """A gradient penalty."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        output = self(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return F.mse_loss(output, batch[1]) + slope.square().mean()


class EarlyOptimizer(TinyMLP):
    """Makes its optimizer, which makes states at once, before the strategy replaces the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class BranchOnData(TinyMLP):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and x.sum() > 0:
                x = 2 * x
        return x


class ItemInTheMiddle(TinyMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        scale = x.std().item()
        y: Tensor = self.layers[1:](x)
        return y * scale


class NumpyInTheMiddle(TinyMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        scale = float(x.detach().numpy().std())
        y: Tensor = self.layers[1:](x)
        return y * scale


class WrongShape(TinyMLP):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](self.layers[0](x)[:, :5])
        return y


class _Misspelt(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.offest


class WithMisspeltBlock(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = _Misspelt(32, 32)


class AnotherPath(TinyMLP):
    """In one step adds a call after the layer with the given index; on one rank only, if told."""

    def __init__(self, after: int, only_rank: int | None = None) -> None:
        super().__init__()
        self.after, self.only_rank = after, only_rank
        self.num_begun = 0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.num_begun += 1

    def adds_call(self, batch_idx: int) -> bool:
        return self.num_begun == 3 and self.only_rank in (None, dist.get_rank())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, targets = batch
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.after and self.adds_call(batch_idx):
                x = x.relu()
        return F.mse_loss(x, targets)


class Generates(TinyMLP):
    """Trains after calls each of which depends on what the one before it gave."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, loss = batch[0], super().training_step(batch, batch_idx)
        while self(x).sum() < 100:
            x = x + 1
        return loss


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.Module) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        return cast(Tensor, layers(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layers(x).backward(gradients[0])
        return cast(Tensor, x.grad), None


class WithReversibleLayers(TinyMLP):
    """Its blocks are called by a custom autograd function, in its backward again."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Reversible.apply(x, self.layers))  # type: ignore[no-untyped-call]  # torch 2.13


class TracedPath(AnotherPath):
    """Decides by the number of the batch, and the rank."""

    def adds_call(self, batch_idx: int) -> bool:
        return batch_idx == 2 and self.only_rank == dist.get_rank()


class RanksFlag(AnotherPath):
    """Decides by a flag that is set on one rank."""

    is_told = False

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.is_told = batch_idx == 2 and self.only_rank == dist.get_rank()

    def adds_call(self, batch_idx: int) -> bool:
        return self.is_told


class Opaque:
    """A result that is no pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OpaqueBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.linear(x))


class WithOpaqueBlock(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.first = OpaqueBlock()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x).value)


class ReturnsNothing(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]  # the mistake under test
        super().training_step(batch, batch_idx)


class ReturnsNothingLater(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:  # type: ignore[override]  # likewise
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_step == 0 else None


class ReturnsManyLosses(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1], reduction="none")


class ReturnsDetachedLoss(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class AllFrozen(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class WithLazyLayer(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.LazyLinear(32)


class WithoutParameters(L.LightningModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return batch[0].square().mean()

    def configure_optimizers(self) -> None:
        return None


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


def _on_meta() -> L.LightningModule:
    with torch.device("meta"):
        return TinyMLP()


def _of_another_depth_on_each_rank() -> L.LightningModule:
    return TinyMLP(num_layers=2 + dist.get_rank())


# ----------------------------------------------------------------------------------------------------------------- data


class DiffersByRank(Dataset[Batch]):
    """Samples that depend on the rank, as augmentation with a seed per rank makes them."""

    def __len__(self) -> int:
        return STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> Batch:
        x = torch.full((8,), float(index)).cos() + dist.get_rank()
        return x, x[:4]


def _differs_by_rank() -> Any:
    return DataLoader(DiffersByRank(), batch_size=BATCH_SIZE)


def _batches(batch: Any) -> Any:
    dataset: Any = [batch] * STEPS
    return DataLoader(dataset, batch_size=None)


def _of_different_lengths() -> Any:
    return _batches((torch.ones(8, 8), torch.ones(7, 4)))


def _without_tensors() -> Any:
    return _batches(("a", "b"))


def _empty() -> Any:
    return DataLoader(TensorDataset(torch.ones(3, 8), torch.ones(3, 4)), batch_size=BATCH_SIZE, drop_last=True)


def _regression() -> Any:
    return loader(features(STEPS * BATCH_SIZE), global_batch_size=BATCH_SIZE)


# ------------------------------------------------------------------------------------------------------ the worker pool


@dataclass(frozen=True, kw_only=True)
class Misuse:
    """A mistake, and the error that it must give on both of its ranks."""

    name: str
    error: str
    """Name of the type, in `lightning_3d.errors` unless it is the user's own."""
    message: str
    """Regular expression for a part of it."""
    model: Callable[[], L.LightningModule] = TinyMLP
    data: Callable[[], Any] = _regression
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"pipeline_parallel_size": 2})
    trainer: Mapping[str, Any] = field(default_factory=dict)
    only_rank: int | None = None
    """The rank that raises, if the other can't know; it ends when it loses the connection."""


DP: Mapping[str, Any] = {"zero": {"stage": 1}}
TP: Mapping[str, Any] = {"tensor_parallel_size": 2}

MISUSES = [
    Misuse(
        name="manual optimization in a pipeline",
        model=ManualOptimization,
        error="StepError",
        message="ManualOptimization uses manual optimization .* traced before there are optimizers",
    ),
    Misuse(
        name="manual optimization in tensor parallel",
        model=ManualOptimization,
        strategy=TP,
        error="StepError",
        message="ManualOptimization uses manual optimization .* traced before there are optimizers",
    ),
    Misuse(
        name="LBFGS in a pipeline",
        model=WithLBFGS,
        error="StepError",
        message="LBFGS steps all parameters together, or runs training_step several times per step",
    ),
    Misuse(
        name="gradient penalty in a pipeline",
        model=WithPenalty,
        error="TraceError",
        message=r"grad \(called at .*test_misuse.py.* in training_step\) differentiates tensors of blocks inside",
    ),
    Misuse(
        name="optimizer made too early",
        model=EarlyOptimizer,
        strategy={"zero": {"stage": 3}},
        error="StepError",
        message=r"Adagrad holds 12 parameters that are not the module's \(the first of shape \(32, 8\)\)",
    ),
    Misuse(
        name="sync_batchnorm",
        model=WithBatchNorm,
        trainer={"sync_batchnorm": True},
        strategy=DP,
        error="StepError",
        message=r"Trainer\(sync_batchnorm=True\) for norm needs torch's SyncBatchNorm, which does not run on CPUs",
    ),
    Misuse(
        name="SyncBatchNorm in a pipeline",
        model=WithSyncBatchNorm,
        error="StepError",
        message="norm, a SyncBatchNorm, communicates inside of a block, but with pipeline_parallel_size=2",
    ),
    Misuse(
        name="branch on data",
        model=BranchOnData,
        error="TraceError",
        message=r"__bool__ at .*test_misuse.py:\d+ in forward needs the data of a tensor that comes from a block",
    ),
    Misuse(
        name="item in the middle",
        model=ItemInTheMiddle,
        error="TraceError",
        message=r"item at .*test_misuse.py:\d+ in forward needs the data of a tensor that comes from a block",
    ),
    Misuse(
        name="numpy in the middle",
        model=NumpyInTheMiddle,
        error="TraceError",
        message=r"numpy at .*test_misuse.py:\d+ in forward needs the data of a tensor that comes from a block",
    ),
    Misuse(
        name="wrong shape",
        model=WrongShape,
        error="TraceError",
        message=r"Block layers.1 at .*test_misuse.py:\d+ in forward failed on fake and on random tensors"
        r".*\(4x5 and 32x32\)",
    ),
    Misuse(
        name="misspelt attribute in a block",
        model=WithMisspeltBlock,
        error="AttributeError",
        message="'_Misspelt' object has no attribute 'offest'",
    ),
    Misuse(
        name="another path on the first stage",
        model=lambda: AnotherPath(after=0),
        error="TraceError",
        message=r"Pipeline stage 0: it took another path .*: it called relu, where the trace has layers.1 \(at",
        only_rank=0,
    ),
    Misuse(
        name="another path on the last stage",
        model=lambda: AnotherPath(after=5),
        error="TraceError",
        message=r"Pipeline stage 1: it took another path .*: it called relu, where the trace has mse_loss \(at",
        only_rank=1,
    ),
    Misuse(
        name="another path on one rank",
        model=lambda: AnotherPath(after=0, only_rank=1),
        error="TraceError",
        message=r"Pipeline stage 1: it took another path .*: it called relu, where the trace has layers.1 \(at",
        only_rank=1,
    ),
    Misuse(
        name="generation in a training step",
        model=Generates,
        error="TraceError",
        message=r"layers.0 was called after code that reads data of blocks \(__bool__ at .*test_misuse.py:\d+ in"
        r" training_step.*\), as generate\(\) does .* Do it in a hook",
        only_rank=1,
    ),
    Misuse(
        name="reversible layers in a pipeline",
        model=WithReversibleLayers,
        error="TraceError",
        message=r"_Reversible \(called at .*test_misuse.py:\d+ in forward\) is a torch.autograd.Function that gets the"
        r" blocks layers.0, layers.1, ... and calls them by itself",
    ),
    Misuse(
        name="another traced path on one rank",
        model=lambda: TracedPath(after=0, only_rank=1),
        error="TraceError",
        message=r"training_step takes another path on pipeline stage 1 .*: its call 2 .* is relu .* has layers.1",
    ),
    Misuse(
        name="another path by a flag of one rank",
        model=lambda: RanksFlag(after=0, only_rank=0),
        error="TraceError",
        message=r"training_step takes another path on pipeline stage 1 .*: its call 2 .* is layers.1 .* has relu",
    ),
    Misuse(
        name="opaque output of a block",
        model=WithOpaqueBlock,
        error="TraceError",
        message="first .* returned a Opaque that holds tensors and is not a pytree",
    ),
    Misuse(name="no loss in data parallel", model=ReturnsNothing, strategy=DP, error="StepError", message="NoneType"),
    Misuse(name="no loss in tensor parallel", model=ReturnsNothing, strategy=TP, error="StepError", message="NoneType"),
    Misuse(
        name="no loss after a while",
        model=ReturnsNothingLater,
        strategy=DP,
        error="StepError",
        message="A step can't be skipped by returning None",
    ),
    Misuse(
        name="no loss after a while in a pipeline",
        model=ReturnsNothingLater,
        error="StepError",
        message="A step can't be skipped by returning None",
        only_rank=1,
    ),
    Misuse(
        name="many losses",
        model=ReturnsManyLosses,
        error="StepError",
        message=r"training_step returned a loss of shape \(4, 4\); reduce it to a 0-d tensor",
    ),
    Misuse(
        name="detached loss in a pipeline",
        model=ReturnsDetachedLoss,
        error="StepError",
        message="a loss that does not require grad",
    ),
    Misuse(
        name="detached loss in data parallel",
        model=ReturnsDetachedLoss,
        strategy=DP,
        error="StepError",
        message="a loss that does not require grad",
    ),
    Misuse(
        name="lazy layer",
        model=WithLazyLayer,
        strategy=DP,
        error="StepError",
        message="layers.0.weight of WithLazyLayer has no shape yet",
    ),
    Misuse(name="all frozen", model=AllFrozen, error="StepError", message="a loss that does not require grad"),
    Misuse(
        name="no parameters", model=WithoutParameters, error="StepError", message="a loss that does not require grad"
    ),
    Misuse(
        name="no blocks",
        model=WithoutBlocks,
        error="PlanError",
        message=r"2 pipeline stages: the model has only 0 calls of blocks to share out \(none\)",
    ),
    Misuse(
        name="weights on meta",
        model=_on_meta,
        error="PlanError",
        message=r"12 parameters or buffers are on the meta device \(layers.0.weight, layers.0.bias",
    ),
    Misuse(
        name="another model on each rank",
        model=_of_another_depth_on_each_rank,
        error="PlanError",
        message=r"where rank 0 has layers.3.weight \(4, 32\) torch.float32, rank 1 has layers.3.0.weight \(32, 32\)",
    ),
    Misuse(
        name="no block of this name",
        strategy={"pipeline_parallel_size": 2, "pipeline": {"partition": "type:Transformer"}},
        error="PlanError",
        message="'type:Transformer' matches no class of TinyMLP that has parameters. Its classes: Linear, Sequential",
    ),
    Misuse(
        name="another batch on each rank of a pipeline",
        data=_differs_by_rank,
        error="BatchError",
        message=r"The ranks of model replica 0 got different batches \(checksums rank 0: \w+, rank 1: \w+\)",
    ),
    Misuse(
        name="another batch on each tensor-parallel rank",
        data=_differs_by_rank,
        strategy=TP,
        error="BatchError",
        message="set batch.broadcast=true to send the first rank's batch",
    ),
    Misuse(
        name="batch of different lengths",
        data=_of_different_lengths,
        error="BatchError",
        message=r"The tensors of this batch differ: batch\[0\] \(8, 8\), batch\[1\] \(7, 4\)",
    ),
    Misuse(name="batch without tensors", data=_without_tensors, error="BatchError", message="this batch are none"),
    Misuse(
        name="limit_train_batches=0",
        trainer={"limit_train_batches": 0},
        error="BatchError",
        message=r"no dataloader for trainer.fit\(\), or its number of batches is limited to 0",
    ),
    Misuse(name="empty dataloader", data=_empty, error="BatchError", message="A dataloader is empty"),
]


def _trainer(strategy: ThreeDStrategy, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": STEPS, **arguments},
    )


def _make(name: str) -> None:
    misuse = {misuse.name: misuse for misuse in MISUSES}[name]
    L.seed_everything(0, verbose=False)
    _trainer(ThreeDStrategy(**misuse.strategy), **misuse.trainer).fit(misuse.model(), misuse.data())


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.name)
def test_misuse_is_refused_alike_on_all_ranks(workers: WorkerPools, misuse: Misuse) -> None:
    with pytest.raises(WorkerError) as caught:
        workers(2).run(_make, misuse.name, timeout=LIMIT)
    errors = {rank: report.rstrip().rpartition("\n")[2] for rank, report in caught.value.failures.items()}
    raising = range(2) if misuse.only_rank is None else [misuse.only_rank]
    for rank in raising:
        assert errors[rank].removeprefix("lightning_3d.errors.").startswith(f"{misuse.error}: "), errors[rank]
        assert re.search(misuse.message, errors[rank]), errors[rank]


def test_more_devices_than_processes_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"does not match the world size \(2\)") as caught:
        workers(2).run(_fit_on_three, timeout=LIMIT)
    assert len(set(caught.value.failures.values())) == 1


def _fit_on_three() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=ThreeDStrategy(), logger=False, barebones=True)
    trainer.fit(TinyMLP(), _regression())


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


@pytest.fixture
def one_process() -> Callable[..., L.Trainer]:
    """Makes a Trainer of one process, which fits nothing."""

    def make(**arguments: Any) -> L.Trainer:
        return L.Trainer(accelerator="cpu", devices=1, strategy=ThreeDStrategy(), logger=False, **arguments)

    return make


@pytest.mark.parametrize("precision", ["32-true", "64-true", "16-true", "bf16-true", "bf16-mixed"])
def test_precision_of_the_trainer_is_that_of_the_plugin(one_process: Callable[..., L.Trainer], precision: str) -> None:
    plugin = one_process(precision=precision).precision_plugin
    assert isinstance(plugin, ThreeDPrecision)
    assert plugin.precision == precision


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [(DoublePrecision, "64-true"), (lambda: HalfPrecision("bf16-true"), "bf16-true")],
    ids=["double", "half"],
)
def test_precision_plugin_of_lightning_becomes_ours(
    one_process: Callable[..., L.Trainer], plugin: Callable[[], Any], precision: str
) -> None:
    translated = one_process(plugins=[plugin()]).precision_plugin
    assert isinstance(translated, ThreeDPrecision)
    assert translated.precision == precision


class OtherPrecision(Precision):
    """Somebody's own plugin."""

    precision = "32-true"


def test_precision_plugin_of_another_kind_is_refused(one_process: Callable[..., L.Trainer]) -> None:
    with pytest.raises(ConfigError, match="precision='32-true' \\(OtherPrecision\\) is not built for strategy='3d'"):
        one_process(plugins=[OtherPrecision()])


def test_scaler_of_the_user_is_refused(one_process: Callable[..., L.Trainer]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with pytest.raises(ConfigError, match=r"init_scale=1024.*precision\.initial_scale_power"):
        one_process(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    with pytest.raises(ConfigError, match="a GradScaler with enabled=False would be ignored"):
        one_process(plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))])


def _fit_with_fp16_weights() -> None:
    model = TinyMLP()
    model.layers[1].half()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ThreeDStrategy(),
        plugins=[ThreeDPrecision("16-mixed")],
        max_epochs=1,
        logger=False,
    )
    trainer.fit(model, _regression(), _regression())


def test_trained_fp16_weights_are_refused_under_autocast(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"layers\.1\.0\.weight, with 1 others, is fp16 and is trained with"):
        workers(1).run(_fit_with_fp16_weights)


@pytest.mark.parametrize("precision", ["transformer-engine", "8-mixed"])
def test_fp8_is_refused_with_a_reason(precision: Any) -> None:
    with pytest.raises(ConfigError, match=f"precision='{precision}' is not built for strategy='3d'.*fp8"):
        ThreeDPrecision(precision)


def _fit_with_hysteresis() -> None:
    strategy = ThreeDStrategy(precision={"hysteresis": 4})
    trainer = L.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", precision="bf16-mixed", max_steps=1, barebones=True
    )
    trainer.fit(TinyMLP(), _regression(), _regression())


def test_settings_that_the_precision_does_not_use_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"precision\.hysteresis=4 would do nothing: precision='bf16-mixed'"):
        workers(1).run(_fit_with_hysteresis)


def test_fp16_on_cpu_becomes_bf16_as_in_lightning(one_process: Callable[..., L.Trainer]) -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
        trainer = one_process(precision="16-mixed")
    assert isinstance(trainer.precision_plugin, ThreeDPrecision)
    assert trainer.precision_plugin.precision == "bf16-mixed"


@pytest.mark.parametrize("clip", [None, 1.0])
def test_our_precision_under_another_strategy_is_refused(clip: float | None) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[ThreeDPrecision("16-mixed")],
        gradient_clip_val=clip,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ConfigError, match=r"ThreeDPrecision\('16-mixed'\) works with strategy='3d' alone"):
        trainer.fit(WithoutBlocks(), _regression())
