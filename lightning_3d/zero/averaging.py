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

from lightning_3d.zero.master_weights import MasterWeights, is_half
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
        self.masters: MasterWeights | None = None
        """Step 16-bit parameters in fp32, if there are such."""

    def stepped(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer has stepped these; every rank calls it."""
        self._num_steps.update(parameters)
        self._average([parameter for parameter, num in self._num_steps.items() if num >= self._period])

    def average(self) -> None:
        """Average all that were stepped since; every rank calls it."""
        self._average(list(self._num_steps))

    @torch.no_grad()
    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in parameters:
            del self._num_steps[parameter]
            values = self._values(parameter)
            alike.setdefault((values.dtype, values.device), []).append((parameter, values))
        for pairs in alike.values():
            flat = torch.cat([values.reshape(-1) for _, values in pairs]).div_(self._replicas.size)
            mean = self._replicas.all_reduce(flat.unsqueeze(0))()
            for (parameter, values), own in zip(pairs, mean.split([v.numel() for _, v in pairs]), strict=True):
                self._set(parameter, own.view(values.shape))

    def _values(self, parameter: nn.Parameter) -> Tensor:
        """The values to average: in fp32 for 16-bit parameters, whose mean else would be rounded to where they were."""
        held = plain(parameter.detach())
        if not is_half(held):
            return held
        return held.float() if self.masters is None else self.masters.values(parameter, held)

    def _set(self, parameter: nn.Parameter, mean: Tensor) -> None:
        held = plain(parameter.detach())
        if self.masters is None or not is_half(held):
            held.copy_(mean)
        else:
            self.masters.set_values(parameter, held, mean)
