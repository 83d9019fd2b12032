"""Where parameters and optimizer states are offloaded to, settled before training, alike on all ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.agreement import raise_on_all_ranks
from lightning_3d.torch_internals.fsdp import move_shards, shards_of, when_gathered
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.offload.steps import OffloadedSteps
from lightning_3d.zero.offload.store import Advice, Store

_WINDOW = 64  # MiB


def offload_policy(place: str, device: torch.device) -> OffloadPolicy:
    """FSDP2's policy for ``zero.offload_params``."""
    if place == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=place == "cpu" and device.type != "cpu")  # a file can't be pinned


def offload_parameters(place: str, root: nn.Module) -> Store:
    """Move FSDP2's shards to where ``zero.offload_params`` says; every rank calls it.

    Returns:
        What holds them.

    Raises:
        OffloadError: the directory can't be written or has no room, on any rank.
    """
    store = Store()
    if place in ("none", "cpu"):
        return store
    units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
    with raise_on_all_ranks():
        store = Store.at(place)
        for unit in units:
            move_shards(unit, store.zeros)
            store.advise(shards_of(unit), Advice.NOT_FOR_A_WHILE)
            when_gathered(unit, partial(store.advise, advice=Advice.NOT_FOR_A_WHILE))
    return store


def offloaded_steps(config: ZeroConfig, zero: Zero, device: torch.device) -> OffloadedSteps | None:
    """How optimizers step elsewhere than on the device, if they do; every rank calls it.

    Raises:
        OffloadError: the directory can't be written, on any rank.
    """
    if config.offload_optimizer == "none":
        return None
    store: Store | None = None
    with raise_on_all_ranks():
        store = Store.at(config.offload_optimizer)
    assert store is not None
    zero.keep_states(store.zeros)
    window_bytes = 2**20 * (_WINDOW if config.offload_window == "auto" else config.offload_window)
    return OffloadedSteps(store, zero.parameter_store, window_bytes=window_bytes, device=device)
