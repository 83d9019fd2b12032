"""Parameters that arrive while the next forward runs: `zero.overlap_gather` at stages 1 and 2."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_3d import ThreeDStrategy
from lightning_3d.zero.gathering import PendingParameter
from tests.models import TinyGPT, TinyMLP, features, loader
from tests.parity import QUIET, Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

Stage = Literal[1, 2]


class Recurrent(TinyMLP):
    """An LSTM, whose operator gets a list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x[:, None])[0][:, 0])


class Attending(TinyMLP):
    """torch's encoder layer, which evaluates in one fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.encoder(x[:, None])[:, 0])


class Functional(TinyMLP):
    """Weights are read where their module is not called."""

    def forward(self, x: Tensor) -> Tensor:
        first, *_, last = self.layers
        x = F.linear(x, first.weight, first.bias)
        x = torch.stack([x, x @ self.layers[1][0].weight]).sum(0)  # type: ignore[index,union-attr]
        x = functional_call(self.layers[2], dict(self.layers[2].named_parameters()), (x,))  # type: ignore[index,union-attr,arg-type]
        return last(x)  # type: ignore[no-any-return]


class Scripted(TinyMLP):
    """TorchScript reads parameters beneath torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns((DeprecationWarning, FutureWarning), match="jit.script"):
            self.layers = torch.jit.script(self.layers)


class Compiled(TinyMLP):
    """Compiled code reads parameters beneath torch's functions; one layer is compiled by a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].compile(backend="aot_eager")  # type: ignore[operator,union-attr]
        self.layers[2] = torch.compile(self.layers[2], backend="aot_eager")  # type: ignore[assignment]


class Custom(TinyMLP):
    """A weight goes through an autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Scale.apply(x, self.layers[-1].weight))  # type: ignore[no-any-return]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight.sum(), (gradient * x).sum().expand_as(weight)


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "LSTM": Recurrent,
    "encoder layer": Attending,
    "functional": Functional,
    "TorchScript": Scripted,
    "compiled": Compiled,
    "autograd function": Custom,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch.compile
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_forwards_wait_for_what_they_read(workers: WorkerPools, name: str, stage: Stage) -> None:
    job = Job(model=MODELS[name], data=features, sees_gradients=False)
    layout = Layout(dp=2, zero=stage, zero_settings={"overlap_gather": True})
    assert_parity(run_reference(job), run_layout(workers, job, layout), tolerance=1e-5)


@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout(dp=2, tp=2), Layout(dp=2, zero=2)], ids=str)
def test_layouts_overlap(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=TinyGPT, accumulate_grad_batches=2, gradient_clip_val=0.3)
    overlapping = Layout(**{**vars(layout), "zero_settings": {"overlap_gather": True}})
    assert_parity(run_reference(job), run_layout(workers, job, overlapping))


_READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": lambda parameter: parameter.detach().numpy(),
    "asarray": lambda parameter: np.asarray(parameter.detach()),
    "data": lambda parameter: parameter.data,
    "dlpack": lambda parameter: torch.from_dlpack(parameter.detach()),
    "foreach": lambda parameter: torch._foreach_mul([parameter], 1.0)[0],
    "deepcopy": copy.deepcopy,
    "pickle": lambda parameter: pickle.loads(pickle.dumps(parameter)),
    "tolist": lambda parameter: parameter.tolist(),
    "no_grad": lambda parameter: torch.no_grad()(parameter.clone)(),
    "stack": lambda parameter: torch.stack([parameter])[0],
    "saved": lambda parameter: torch.load(_saved(parameter), weights_only=True)["weight"],
    "operator": lambda parameter: torch.ops.aten.clone(parameter),
    "data_ptr": lambda parameter: (parameter.data_ptr(), parameter.detach())[1],
    "item": lambda parameter: [float(value) for value in parameter.flatten()],
}


def _saved(parameter: nn.Parameter) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save({"weight": parameter}, buffer)
    buffer.seek(0)
    return buffer


class _Reads(L.Callback):
    """Reads a parameter that is on its way in a way of its own in each batch."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.num_pending = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            return
        name, read = list(_READS.items())[batch_idx - 1]
        weight = pl_module.layers[0].weight
        self.num_pending += type(weight) is PendingParameter
        value = read(weight)
        assert not isinstance(weight, PendingParameter)
        assert not isinstance(value, PendingParameter)
        self.values[name] = torch.as_tensor(value).detach().clone().view(weight.shape)
        torch.testing.assert_close(self.values[name], weight.detach())


def _read() -> tuple[dict[str, Tensor], int]:
    reads = _Reads()
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=ThreeDStrategy(zero={"overlap_gather": True}),
        devices=2,
        max_epochs=1,
        callbacks=[reads],
        enable_checkpointing=False,
        **QUIET,
    )
    data = features(8 * (len(_READS) + 1))
    trainer.fit(TinyMLP(), loader(data, global_batch_size=8, data_parallel_size=2))
    return reads.values, reads.num_pending


def test_code_waits_for_what_it_reads(workers: WorkerPools) -> None:
    (first, num_first), (second, num_second) = workers(2).run(_read)
    assert num_first == num_second == len(_READS)
    assert list(first) == list(_READS)
    for name, value in first.items():  # each rank stepped half of it
        torch.testing.assert_close(second[name], value, atol=0, rtol=0)
