"""Which rank steps which whole parameter: one owner each, with balanced sizes.

Pure, and made from what every rank knows of all parameters, so that all ranks come to the same result without
communication: also ranks of other pipeline stages, since parameters that several stages hold have one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from lightning_3d.zero.optimizer_kind import KINDS, OptimizerKind


def kinds_of(
    parameters: Iterable[nn.Parameter], kinds: Mapping[Optimizer, OptimizerKind]
) -> dict[nn.Parameter, OptimizerKind]:
    """How much of each parameter its optimizers have to see; of one that none has yet, what any of them has to."""
    most = max(kinds.values(), key=KINDS.index, default=KINDS[0])
    found: dict[nn.Parameter, OptimizerKind] = {}
    for optimizer, kind in sorted(kinds.items(), key=lambda item: KINDS.index(item[1])):
        found.update((parameter, kind) for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: found.get(parameter, most) for parameter in parameters}


def choose_owners(
    parameters: Iterable[nn.Parameter], num_ranks: int, stages: Mapping[nn.Parameter, tuple[int, ...]]
) -> dict[nn.Parameter, int]:
    """The largest parameter first, each to the rank that has the least so far; those that are trained come first.

    Args:
        stages: Parameter -> the ranks of the pp axis that hold it, each of which has ranks of its own to choose from.
    """
    loads: Counter[tuple[int, int]] = Counter()
    owners: dict[nn.Parameter, int] = {}
    for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.numel())):
        holders = stages.get(parameter, (0,))
        owner = min(range(num_ranks), key=lambda rank: max(loads[stage, rank] for stage in holders))
        loads.update({(stage, owner): parameter.numel() for stage in holders})
        owners[parameter] = owner
    return owners


def bytes_received(num_bytes: float, num_ranks: int, *, has_owner: bool) -> float:
    """Bytes that a rank receives in the mean for the step of a parameter of which so many ranks have parts.

    Args:
        num_bytes: Of the parameter.
        has_owner: Whether one of them gets values and gradients, and the others new values; else all get the former.
    """
    apart = num_bytes * (num_ranks - 1) / num_ranks
    return 3 * apart / num_ranks if has_owner else 2 * apart
