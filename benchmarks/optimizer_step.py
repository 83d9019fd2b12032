"""An optimizer that needs whole parameters: its step, what it sends and holds, against owners written by hand.

    python -m benchmarks.optimizer_step

Muon steps the matrices of the GPT of `examples/gpt.py` on 4 processes; vectors stay. The
peer is plain DDP after which each rank steps every fourth matrix and all ranks gather them, as in
https://github.com/KellerJordan/Muon. Contenders take turns in rounds; a step is the time from one batch to the next, so
the Trainer's own work counts, in CPU seconds of all ranks and in wall time. The bars: CPU time at most 1.05 of the
peer's, states at most 1.1 of their even share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launch import run_ranks
from benchmarks.models import random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from examples.gpt import GPT
from lightning_3d import ThreeDStrategy

RANKS, BATCH, WARM_UP, STEPS, ROUNDS, MIB = 4, 8, 3, 6, 3, 2**20
PEER = "owners by hand on DDP"
SENDS = {
    "allreduce_": 2,
    "_allgather_base_": 1,
    "allgather_": 1,
    "_reduce_scatter_base_": 1,
    "alltoall_base_": 1,
    "reduce_": 1,
    "broadcast_": 1,
}
"""Collective -> how often its full tensor goes over the wire, but for the share of one rank."""

Figures = Mapping[str, float]
"""CPU and wall seconds of a step, bytes that rank 0 sends in one, and the most states of a rank over their share."""


class _Model(GPT):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Optimizer:  # type: ignore[override]
        return Muon(_matrices(self))


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


class _Meter(L.Callback, TorchDispatchMode):
    """Times steps from one batch to the next, and counts what the last of the warm-up sends."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._times: list[tuple[float, float]] = []
        self._sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in SENDS:
            given = torch.utils._pytree.tree_leaves(args[:2])
            whole = [tensor.nbytes for tensor in given if isinstance(tensor, Tensor)]
            self._sent += SENDS[name] * (sum(whole) if name in ("allreduce_", "reduce_", "broadcast_") else max(whole))
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self._times.append((time.process_time(), time.perf_counter()))
        if len(self._times) == WARM_UP:
            self.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self._times) == WARM_UP:
            self.__exit__(None, None, None)

    def figures(self, model: nn.Module, optimizer: Optimizer) -> Figures:
        """Of all ranks."""
        steps = [
            (b[0] - a[0], b[1] - a[1]) for a, b in zip(self._times[WARM_UP:], self._times[WARM_UP + 1 :], strict=False)
        ]
        cpu, wall = (statistics.median(step[of] for step in steps) for of in range(2))
        states = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        found = torch.tensor([cpu, wall, float(states)])
        everyone = [torch.empty_like(found) for _ in range(RANKS)]
        dist.all_gather(everyone, found)
        total = sum(float(of_rank[2]) for of_rank in everyone)
        return {
            "cpu": sum(float(of_rank[0]) for of_rank in everyone),
            "wall": wall,
            "sent": self._sent,
            "states": max(float(of_rank[2]) for of_rank in everyone) * RANKS / total,
        }


def _ours(**settings: Any) -> Figures:
    torch.manual_seed(0)
    model, meter = _Model(), _Meter()
    trainer = quiet_trainer(ThreeDStrategy(**settings), RANKS, WARM_UP + STEPS, meter, use_distributed_sampler=False)
    trainer.fit(model, random_tokens(WARM_UP + STEPS, BATCH, 64, 256))
    return meter.figures(model, trainer.optimizers[0])


class _Forward(nn.Module):
    """A forward that is the training step, as DDP runs nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Model()

    def forward(self, batch: Any) -> Tensor:
        return self.model.training_step(batch, 0)


def _by_hand() -> Figures:
    torch.manual_seed(0)
    model, meter = DistributedDataParallel(_Forward()), _Meter()
    matrices = sorted(_matrices(model), key=Tensor.numel, reverse=True)
    rank = dist.get_rank()
    optimizer = Muon(matrices[rank::RANKS])
    for batch in random_tokens(WARM_UP + STEPS, BATCH, 64, 256):
        meter.on_train_batch_start()
        loss = model(batch)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        for first in range(0, len(matrices), RANKS):
            group = [parameter.detach().view(-1) for parameter in matrices[first : first + RANKS]]
            room = [torch.empty_like(group[0]) for _ in range(RANKS)]
            if rank < len(group):
                room[rank][: len(group[rank])] = group[rank]
            dist.all_gather(room, room[rank])
            for parameter, new in zip(group, room, strict=False):
                parameter.copy_(new[: len(parameter)])
        loss.item()
        meter.on_train_batch_end()
    return meter.figures(model, optimizer)


CONTENDERS: dict[str, Callable[[], Figures]] = {
    PEER: _by_hand,
    "stage 1": partial(_ours, zero={"stage": 1}),
    "stage 3": partial(_ours, zero={"stage": 3}),
    "tensor 2 x data 2": partial(_ours, tensor_parallel_size=2, zero={"stage": 1}),
}


def _rounds() -> list[dict[str, Figures]]:
    return [{name: run() for name, run in CONTENDERS.items()} for _ in range(ROUNDS)]


def main() -> None:
    """Print the table."""
    rounds = run_ranks(_rounds, RANKS)
    table = Table(
        "", "CPU time", "by round", "wall time", "MiB sent", "states / even", title="one step, against the peer's"
    )
    for name in CONTENDERS:
        cpu, wall = ([each[name][of] / each[PEER][of] for each in rounds] for of in ("cpu", "wall"))
        listed = " ".join(f"{ratio:.2f}" for ratio in cpu)
        last = rounds[-1][name]
        ratios = [f"{statistics.median(of):.3f}" for of in (cpu, wall)]
        table.add_row(name, ratios[0], listed, ratios[1], f"{last['sent'] / MIB:.1f}", f"{last['states']:.2f}")
    Console(width=120).print(table)
    times = {name: f"{statistics.median(each[name]['cpu'] for each in rounds) * 1e3:.0f} ms" for name in CONTENDERS}
    Console().print(times)


if __name__ == "__main__":
    main()
