"""Parameters that arrive while the next forward runs: `zero.overlap_gather` at stages 1 and 2."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from lightning_3d.zero.gathering import PendingParameter
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET
from tests.workers import WorkerPools

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
