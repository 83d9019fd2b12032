"""One plain Lightning file for any layout: gather full tensors on rank 0, or take this rank's part out of them.

What is gathered has the structure that a single-process Trainer writes, so a plain Trainer resumes from it. How values
come to rank 0 is in `gathering`; that they come while the file is written, in `late`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.atomic import replacing
from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.checkpoint.damage import check_files
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.folder import check_no_others
from lightning_3d.checkpoint.gathering import Gather, gather
from lightning_3d.checkpoint.lazy import save_lazily
from lightning_3d.checkpoint.manifest import checksummed
from lightning_3d.checkpoint.match import check_model
from lightning_3d.checkpoint.own_state import (
    filled_from,
    has_no_parameters,
    held_names,
    like_state,
    model_shares,
    parameter_fqns,
    restore_model,
    state_of,
    tied_fqns,
    unwrapped,
)
from lightning_3d.checkpoint.share import optimizer_shares, shares
from lightning_3d.tensor.placement import marked

# ------------------------------------------------------------------------------------------------------------- gather


def full_model_state(module: nn.Module, gathered: Gather = gather) -> dict[str, Any]:
    """The full `module.state_dict()`, of all stages; a collective of all ranks.

    Args:
        module: The whole module; blocks of other stages are on the meta device.
        gathered: Brings the values to rank 0.

    Returns:
        On global rank 0 CPU tensors by FQN in the order of `state_dict()`; tied FQNs share one tensor. Elsewhere `{}`.

    """
    state, first, parts = state_of(module), tied_fqns(module), marked(module)
    held = held_names(state)
    own = {fqn: value for fqn, value in state.items() if fqn in held and first.get(fqn) not in held}
    full = gathered(shares(own, parts))
    sources = {fqn: fqn if fqn in full else first.get(fqn, fqn) for fqn in state}
    return like_state(state, {fqn: full[source] for fqn, source in sources.items() if source in full})


def whole_optimizer_state(
    own: Mapping[str, Any],
    module: nn.Module,
    optimizer: Optimizer | LightningOptimizer,
    gathered: Gather = gather,
) -> dict[str, Any]:
    """The full `optimizer.state_dict()`, of all stages, keyed by torch's indices; a collective of all ranks.

    Args:
        own: This rank's part, from `optimizer_state`.
        module: The whole module; the same that `optimizer` was made for.
        optimizer: An optimizer whose parameters come in the same order on all ranks.
        gathered: Brings the values to rank 0.

    Returns:
        `{"state": {index: {name: CPU tensor}}, "param_groups": [...]}`, without states but on global rank 0.

    Raises:
        CheckpointError: A state that can't be gathered; on all ranks.

    """
    if has_no_parameters(optimizer):
        return {**own}
    held: dict[str, dict[str, Any]] = {}
    with failing_alike("gather the optimizer's state"):
        held = optimizer_shares(own["state"], marked(module))
    full = gathered({(fqn, name): value for fqn, values in held.items() for name, value in values.items()})
    index = {fqn: i for i, fqn in enumerate(parameter_fqns(module, optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for (fqn, name), value in sorted(full.items(), key=lambda item: index[item[0][0]]):
        state.setdefault(index[fqn], {})[name] = value
    return {"state": state, "param_groups": unwrapped(optimizer).state_dict()["param_groups"]}


def write_full(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a `.ckpt` file, in place of a file or checkpoint folder there; on one rank.

    Args:
        checkpoint: What is written, where tensors may be lazy.
        path: The path of the file.

    Raises:
        CheckpointError: There is a folder with files of others; nothing is changed.
        OSError: It can't be written; what was there stays.

    """
    check_no_others(path)
    with replacing(path, lambda file: True) as staged, staged.open("wb") as file, checksummed(file) as written:
        save_lazily(checkpoint, cast(BinaryIO, written))


# --------------------------------------------------------------------------------------------------------------- load


def read_full(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a `.ckpt` file; tensors stay in the file (memory-mapped) until they are used.

    Args:
        path: The same on all ranks, readable on all of them.
        weights_only: As in `torch.load`.

    Raises:
        CheckpointError: The file can't be read; on all ranks.

    """
    checkpoint: dict[str, Any] = {}
    check_files(path)
    with failing_alike(f"read the checkpoint {path}"):
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    return checkpoint


def load_full(saved: Mapping[str, Any], module: nn.Module, *, strict: bool) -> None:
    """Take this rank's part of the full state of a model, written by any layout or by a plain single-process Trainer.

    Args:
        saved: Full tensors by FQN.
        module: The whole module; blocks of other stages are on the meta device and stay so.
        strict: Whether all FQNs must match; shapes must in any case.

    Raises:
        CheckpointError: The checkpoint does not fit; on all ranks, before anything is changed.

    """
    own = model_shares(module)
    with failing_alike("load the checkpoint"):
        check_model(
            {fqn: TensorInfo.of(value) for fqn, value in saved.items()},
            {fqn: TensorInfo.of(value) for fqn, value in state_of(module).items()},
            strict=strict,
        )
    restore_model(module, filled_from(saved, own))
