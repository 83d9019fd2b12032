"""The check that all ranks of a replica hold the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.config.settings import BatchConfig
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.objects import broadcast_object
from lightning_3d.errors import BatchError
from lightning_3d.pipeline.microbatches import leaves_of
from lightning_3d.torch_internals.process_groups import object_device

_START_STEPS = 4
"""Steps whose batches are compared before they run; those of later ones are one step later, so that nobody waits."""

_CHUNK = 1 << 22
"""Words of which a device sums up at once, so that a checksum takes little memory."""

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that nothing is lost


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """Checksums of one batch, on their way."""

    everyone: Tensor
    """By rank in the replica; int64, in host memory."""
    wait: Callable[[], object]


class BatchGuard:
    """Keeps the ranks of a replica on the same batch.

    Args:
        config: When to compare, and whether to broadcast.
        mesh: Its replica group is compared.
        device: Where broadcast tensors arrive.
    """

    def __init__(self, config: BatchConfig, mesh: Mesh, device: torch.device) -> None:
        self._config, self._mesh, self._device = config, mesh, device
        self._group = mesh.group("replica")
        self._num_sent = 0
        self._sent: _Sent | None = None  # not compared yet
        self._replica_size = mesh.shape.size("replica")

    def __call__(self, batch: object) -> object:
        """Broadcast or compare as configured; every rank of a replica calls it with its batch.

        Raises:
            BatchError: on all ranks of a replica, if two of them hold different batches, or did in the step before.
        """
        if self._replica_size == 1:
            return batch
        if self._config.broadcast:
            source = self._mesh.shape.replica_ranks(self._mesh.dp_rank)[0]
            return broadcast_object(batch, self._device, src=source, group=self._group)
        if self._config.check != "never":
            self.settle()
            self._sent = self._send(checksum(batch))
            self._num_sent += 1
            if self._config.check == "always" or self._num_sent <= _START_STEPS:
                self._compare(late=False)
        return batch

    def settle(self) -> None:
        """Compare the batch of the last step, where that is not done yet.

        Raises:
            BatchError: on all ranks of a replica, if two of them held different ones.
        """
        if self._sent is not None:
            self._compare(late=True)

    def _send(self, mine: Tensor) -> _Sent:
        mine = mine.reshape(1)
        if mine.device.type == "cpu":
            mine = mine.to(object_device(self._group))
        everyone = mine.new_empty(self._replica_size)
        work = dist.all_gather_single(everyone, mine, self._group, async_op=True)
        if everyone.device.type == "cpu":
            return _Sent(everyone=everyone, wait=work.wait)
        work.wait()  # only what the device runs from here on waits
        arrived = torch.Event(everyone.device)
        host = everyone.to("cpu", non_blocking=True)
        arrived.record()
        return _Sent(everyone=host, wait=arrived.synchronize)

    def _compare(self, *, late: bool) -> None:
        sent, self._sent = self._sent, None
        assert sent is not None
        sent.wait()
        sums: list[int] = sent.everyone.tolist()
        if len(set(sums)) == 1:
            return
        replica = self._mesh.dp_rank
        ranks = self._mesh.shape.replica_ranks(replica)
        listed = ", ".join(f"rank {rank}: {number % (1 << 64):08x}" for rank, number in zip(ranks, sums, strict=True))
        raise BatchError(
            f"The ranks of model replica {replica} got different batches"
            f"{' in the last step, whose update or result is wrong: go on from a checkpoint before it' if late else ''}"
            f" (checksums {listed}), but pipeline and tensor parallel ranks work on one batch together. Let dataset,"
            " sampler and augmentation depend on the replica only: in setup, in *_dataloader and where batches are read"
            " torch.distributed.get_rank() and get_world_size(), RANK and WORLD_SIZE tell it, elsewhere"
            " trainer.distributed_sampler_kwargs. Where every rank reads all samples of its replica,"
            " batch.broadcast=true sends the first rank's batch to the others."
        )


def checksum(batch: object) -> Tensor:
    """A number that differs if a leaf of the batch differs; 0-d int64, on the device of the batch, whose host does not
    wait for it.
    """
    value, on_devices = 0, list[Tensor]()
    for path, leaf in leaves_of(batch):
        value = zlib.crc32(path.encode(), value)
        if isinstance(leaf, Tensor):
            value = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), value)
            raw = leaf.detach().contiguous().view(-1).view(torch.uint8)
            if raw.device.type == "cpu":
                value = zlib.crc32(raw.numpy().data, value)
            else:
                on_devices.append(_sum_of_bytes(raw))
        elif isinstance(leaf, (str, bytes, int, float, bool, type(None))):
            value = zlib.crc32(repr(leaf).encode(), value)
    total = torch.tensor(value) if not on_devices else torch.full_like(on_devices[0], value)
    for number in on_devices:
        total = total * _FACTOR + number.to(total.device)
    return total


def _sum_of_bytes(raw: Tensor) -> Tensor:
    """A sum in which each place has another weight, modulo 2**64."""
    padded = torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for words in padded.split(_CHUNK):
        weights = torch.arange(1, len(words) + 1, device=raw.device) * _FACTOR
        total = total * _FACTOR + (words * weights).sum()
    return total
