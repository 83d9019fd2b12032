"""Synchronising less often: replicas step on their own gradients and average their parameters now and then.

This is post-local SGD (Lin et al. 2018). torch's ``PeriodicModelAverager`` gives parameters other memory, which breaks
what refers to the old one (flat weights of RNNs, views), and averages those that this rank has gradients of, which may
differ from rank to rank; so this copies, and averages all that were stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_3d.zero.replicas import Replicas
from lightning_3d.zero.shard import plain


class PeriodicAveraging:
    """Averages parameters over the replicas.

    Args:
        period: Steps of an optimizer after which its parameters are averaged.
    """

    def __init__(self, replicas: Replicas, period: int) -> None:
        self._replicas, self._period = replicas, period
        self._num_steps: Counter[nn.Parameter] = Counter()  # since they were averaged

    def stepped(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer has stepped these; every rank calls it."""
        self._num_steps.update(parameters)
        self._average([parameter for parameter, num in self._num_steps.items() if num >= self._period])

    def average(self) -> None:
        """Average all that were stepped since; every rank calls it."""
        self._average(list(self._num_steps))

    @torch.no_grad()
    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            del self._num_steps[parameter]
            held = plain(parameter.detach())
            alike.setdefault((held.dtype, held.device), []).append(held)
        for tensors in alike.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(self._replicas.size)
            mean = self._replicas.all_reduce(flat.unsqueeze(0))()
            for tensor, own in zip(tensors, mean.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(own.view(tensor.shape))
