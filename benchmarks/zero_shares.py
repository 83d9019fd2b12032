"""Bytes that each rank holds and sends at every ZeRO stage, against the formulas (Rajbhandari et al. 2020).

    python -m benchmarks.zero_shares

The GPT of `benchmarks.models` with a vocabulary of 8192 and AdamW, on 1, 2, 4 and 8 processes, in fp32, bf16-mixed
and bf16-true.
Parameters, gradients, optimizer states and what is sent in a step are in multiples of the parameters' bytes, the
formula behind each; peak memory is that of the rank's process, and above what it held before the model was made.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

BATCH, LENGTH, VOCABULARY, MIB = 2, 64, 8192, 2**20
SENDS = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "alltoall_base_": 1}
"""Collective -> how often its full tensor goes over the wire, but for the share of one rank."""


class _WeighedAdamW(torch.optim.AdamW):
    """Weighs the gradients that it steps, and those of the whole module."""

    module: L.LightningModule | None = None
    num_bytes = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        if self.module is not None:
            stepped = [p.grad for group in self.param_groups for p in group["params"]]
            self.num_bytes = _num_bytes([*stepped, *(p.grad for p in self.module.parameters())])
        return loss


class _WeighedGPT(GPT):
    def configure_optimizers(self) -> Any:
        optimizer = _WeighedAdamW(self.parameters())
        optimizer.module = self
        return optimizer


class _Sent(L.Callback, TorchDispatchMode):
    """Counts what the second step sends."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in SENDS:
            lists = [value if isinstance(value, list) else [value] for value in args[:2]]
            self.num_bytes += SENDS[name] * max(sum(t.nbytes for t in ts if isinstance(t, Tensor)) for ts in lists)
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.__exit__(None, None, None)


def _num_bytes(tensors: Iterable[object]) -> int:
    """Bytes of distinct memory."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum({(t.untyped_storage().data_ptr(), t.storage_offset()): t.nbytes for t in local if t.numel()}.values())


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(stage: int, precision: Any) -> dict[str, float]:
    """The shares of rank 0."""
    before, sent = _peak(), _Sent()
    model, num_ranks = _WeighedGPT(VOCABULARY), dist.get_world_size()
    full = 4 * sum(parameter.numel() for parameter in model.parameters())
    trainer = quiet_trainer(
        ThreeDStrategy(zero={"stage": stage, "show_gradients": False}),
        num_ranks,
        3,
        sent,
        precision=precision,
        use_distributed_sampler=False,
    )
    trainer.fit(model, random_tokens(3, BATCH, LENGTH, VOCABULARY))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, _WeighedAdamW)
    states = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor) and t.dim()]
    return {
        "parameters": _num_bytes(model.parameters()) / full,
        "gradients": optimizer.num_bytes / full,
        "states": _num_bytes(states) / full,
        "sent": sent.num_bytes / full,
        "peak": _peak(),
        "above": _peak() - before,
    }


def formula(stage: int, num_ranks: int, precision: str) -> dict[str, float]:
    """The shares by ZeRO's formulas; gradients at stage 1 once they are reduced, and where optimizers step them.

    In bf16-true weights are sent in 16 bits, and gradients in fp32.
    """
    share = 1 / num_ranks
    weights, states = (0.5, 3) if precision == "bf16-true" else (1, 2)
    gathered = {0: 1, 1: weights, 2: weights, 3: 2 * weights}[stage]  # at stage 0 by the all-reduce of gradients
    return {
        "parameters": weights * (share if stage == 3 else 1),
        "gradients": share if stage > 0 else 1,
        "states": states * (share if stage > 0 else 1),
        "sent": 0 if num_ranks == 1 else gathered + 1,
    }


def main() -> None:
    """Print the table."""
    table = Table("ranks", "precision", "stage", title="what a rank holds and sends, and by formula")
    for column in ("parameters", "gradients", "states", "sent", "peak MiB", "above start"):
        table.add_column(column, justify="right")
    for num_ranks in (1, 2, 4, 8):
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            for stage in range(4):
                found, wanted = run_ranks(measure, num_ranks, stage, precision), formula(stage, num_ranks, precision)
                shares = [f"{found[name]:.3f} / {wanted[name]:.3f}" for name in wanted]
                memory = [f"{found['peak']:.0f}", f"{found['above']:.0f}"]
                table.add_row(str(num_ranks), precision, str(stage), *shares, *memory)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
