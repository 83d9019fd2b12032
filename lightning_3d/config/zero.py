"""The settings of ZeRO."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from lightning_3d.config.checks import Size, check_values
from lightning_3d.config.values import AtLeast
from lightning_3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How much of the training state the data-parallel ranks share (ZeRO, Rajbhandari et al. 2020)."""

    section: ClassVar[str] = "zero"

    stage: Literal[0, 1, 2, 3] = 1
    """0: replicate everything; 1: shard the optimizer state; 2: and the gradients; 3: and the parameters. Up to stage 2
    parameters are plain and whole on every rank, as under DDP; at stage 3 they are FSDP2's."""

    optimizer_steps: Literal["auto", "elements", "parameters", "all"] = "auto"
    """How much of a parameter an optimizer has to see at once. ``"elements"``: it works element by element, so that any
    part of one will do (AdamW). ``"parameters"``: whole parameters (Muon, LAMB). ``"all"``: all parameters together
    (LBFGS). ``"auto"`` tries each optimizer on small tensors. At stages 1 and 2 ranks share the elements, or the
    parameters, each of which one rank steps; with ``"all"`` every rank steps everything."""

    show_gradients: bool | Literal["auto"] = "auto"
    """Whether stages 1 and 2 gather the reduced gradients, so that ``grad`` is whole before the optimizer's step as
    under DDP, which sends the parameters' size once more. ``"auto"``: where your module or a callback of yours
    overrides a hook from the backward to the end of the batch, or optimizes manually. Else ``grad`` is None there."""

    communication_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype in which gradients are reduced; ``"auto"`` is their own, but float32 for 16-bit ones. They are divided
    by the number of replicas before, so that float16 does not overflow where the mean does not."""

    bucket_size: Annotated[float, AtLeast(0)] | Literal["auto"] = "auto"
    """MiB of parameters whose gradients are reduced together at stages 0 to 2; ``"auto"`` is 25 as in DDP, or less so
    that there are four buckets, but at least 1. At stage 3 a block is a bucket."""

    power_sgd_rank: Size | None = None
    """Compress gradients at stage 0 to matrices of this rank, with error feedback (PowerSGD, Vogels et al. 2019), by
    torch's hook for DDP. What is remembered of gradients for the next step is in no checkpoint, as under DDP: a resumed
    run begins anew, uncompressed reductions included. ``None`` compresses nothing."""

    power_sgd_start: Annotated[int, AtLeast(2)] | Literal["auto"] = "auto"
    """Reductions that go before without compression; ``"auto"`` is 1000, as in torch."""

    offload_optimizer: str = "none"
    """Where optimizer states lie and optimizers step. ``"none"``: the device. ``"cpu"``: host memory. Any other string
    is a directory, for fast disks: states lie in memory-mapped files there, which have no names and are gone with the
    process. The fused implementations of torch's optimizers (``fused=True``) are the fastest on CPUs."""

    offload_params: str = "none"
    """Where the shards of parameters lie at stage 3: as ``offload_optimizer``, which must not be ``"none"`` then, as
    parameters are stepped where they lie."""

    offload_window: Annotated[float, AtLeast(0)] | Literal["auto"] = "auto"
    """MiB of parameters, at least one of them, that an offloaded optimizer steps at a time, while those before and
    after them are copied; ``"auto"`` is 64."""

    shard_size: Annotated[int, AtLeast(2)] | Literal["auto"] = "auto"
    """How many consecutive data-parallel ranks share the training state; each such group holds all of it (hybrid
    sharding, as FSDP's HSDP). With the ranks of a node, parameters are gathered inside of nodes, and only each rank's
    part of the gradients crosses them. ``"auto"``: all data-parallel ranks."""

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether stage 3 frees the gathered parameters of a block after its forward. ``True`` holds the fewest: each
    backward gathers them again and reduces its gradients; with a pipeline every microbatch does. ``False`` is faster,
    and holds this rank's parameters whole from their first forward to the end of the backward. With a pipeline that is
    the end of the step: it gathers once, adds up whole gradients, and reduces them once. ``"auto"`` is ``False`` with
    a pipeline, else ``True``."""

    prefetch: Size | Literal["auto"] = "auto"
    """How many blocks ahead stage 3 gathers parameters, in forward and backward; more hides slow networks and holds
    more. ``"auto"`` is FSDP2's own: the next one, as soon as the host gets there."""

    def __post_init__(self) -> None:
        check_values(self)
        _check_offload(self)
        _check_zero(self)

    def is_fully_sharded(self, num_ranks: int) -> bool:
        """Whether each rank holds shards of the parameters, or they lie elsewhere than on the device.

        Args:
            num_ranks: Those that would hold the same parameters.
        """
        return self.stage == 3 and (num_ranks > 1 or self.offload_params != "none")

    def keeps_gathered(self, *, is_microbatched: bool) -> bool:
        """Whether stage 3 keeps parameters gathered from their first forward to the end of the step."""
        return is_microbatched if self.reshard_after_forward == "auto" else not self.reshard_after_forward

    @property
    def dtype(self) -> torch.dtype | None:
        """``communication_dtype``; None for that of the gradients."""
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return dtypes.get(self.communication_dtype)


def _check_offload(config: ZeroConfig) -> None:
    """Refuse places to offload to that are no directories, and those that do not go together."""
    for name, place in (("offload_optimizer", config.offload_optimizer), ("offload_params", config.offload_params)):
        reserved = place.strip().lower()
        if place not in ("none", "cpu") and reserved in ("", "none", "cpu", "nvme", "disk", "gpu", "cuda"):
            raise ConfigError(
                f"zero.{name}={place!r} is not allowed: use 'none', 'cpu' or a directory, such as"
                f" './{reserved or 'dir'}'"
            )
        if place not in ("none", "cpu") and sys.platform != "linux":
            raise ConfigError(f"zero.{name}={place!r}: offloading to files needs Linux; use 'cpu' or 'none'")
    if config.offload_params != "none" and config.stage != 3:
        raise ConfigError(
            f"zero.offload_params={config.offload_params!r} needs zero.stage=3: at stage {config.stage} every rank's"
            " forward uses whole parameters all the time. Use stage 3, or offload_params='none'"
        )
    if config.offload_window != "auto" and config.offload_optimizer == "none":
        raise ConfigError(
            f"zero.offload_window={config.offload_window} needs zero.offload_optimizer: without it optimizers step all"
            " parameters at once. Leave it out, or offload"
        )
    if config.offload_params != "none" and config.offload_optimizer == "none":
        raise ConfigError(
            f"zero.offload_params={config.offload_params!r} does not go with zero.offload_optimizer='none': parameters"
            " are stepped where they lie. Set zero.offload_optimizer='cpu' or to a directory, too"
        )


_STAGES_OF: Mapping[str, tuple[tuple[int, ...], str]] = {
    "bucket_size": ((0, 1, 2), "at stage 3 each block is a bucket"),
    "show_gradients": ((0, 1, 2), "at stage 3 grad is the shard of a gradient"),
    "power_sgd_rank": ((0,), "torch's hook approximates the sum of gradients as a whole, which others scatter"),
    "shard_size": ((1, 2, 3), "stage 0 shards nothing"),
    "reshard_after_forward": ((3,), "up to stage 2 all parameters are whole on every rank"),
    "prefetch": ((3,), "up to stage 2 all parameters are whole on every rank"),
}
"""Keys of ``zero`` -> the stages at which they can be set to more than their default, and why."""


def _check_zero(zero: ZeroConfig) -> None:
    """Refuse what a stage of ZeRO can't do, and settings that contradict each other."""
    for name, (stages, reason) in _STAGES_OF.items():
        value = getattr(zero, name)
        turns_off = value is False and name != "reshard_after_forward"
        is_set = value is not None and value != "auto" and not turns_off
        if is_set and zero.stage not in stages:
            raise ConfigError(
                f"zero.{name}={value!r} does not go with zero.stage={zero.stage}: {reason}; leave it out, or use stage"
                f" {' or '.join(map(str, stages))}"
            )
    if zero.power_sgd_rank is None and zero.power_sgd_start != "auto":
        raise ConfigError(
            f"zero.power_sgd_start={zero.power_sgd_start} delays a compression that is not asked for: set"
            " zero.power_sgd_rank, or leave it out"
        )
    if zero.power_sgd_rank is not None and zero.communication_dtype != "auto":
        raise ConfigError(
            f"zero.communication_dtype={zero.communication_dtype!r} with zero.power_sgd_rank={zero.power_sgd_rank}:"
            " gradients are compressed in one way; leave one of them out"
        )
