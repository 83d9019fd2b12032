"""One plain Lightning file for any layout: gather full tensors on rank 0, or take this rank's part out of them.

What is gathered has the structure that a single-process Trainer writes, so a plain Trainer resumes from it. Tensors
come one by one: over dp and tp by DTensor, or point-to-point from the one data-parallel rank that owns it, then
point-to-point from the stage that owns it to rank 0.

    stage 1, dp 0..1, tp 0..1      full_value (all-gather in the stage)      rank of the pp group of rank 0: send
    stage 0, rank 0                                                          receive, copy to the CPU, keep
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_3d.checkpoint.atomic import aside, give_up, make_room, publish
from lightning_3d.checkpoint.box import TensorInfo, check_placements, full_value
from lightning_3d.checkpoint.damage import check_files
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.folder import check_no_others
from lightning_3d.checkpoint.manifest import checksummed
from lightning_3d.checkpoint.match import check_model
from lightning_3d.checkpoint.own_state import (
    Key,
    exchange,
    filled_from,
    model_state,
    optimizer_state,
    owners,
    parameter_fqns,
    rank_on,
    restore_model,
    state_of,
    tied_fqns,
    unwrapped,
)
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.zero.shard import NO_SHARDS, Shards

# ------------------------------------------------------------------------------------------------------------- gather


def full_model_state(module: nn.Module, pp: DeviceMesh | None) -> dict[str, Any]:
    """The full `module.state_dict()`, of all stages; a collective of all ranks.

    Args:
        module: The whole module; blocks of other stages are on the meta device.
        pp: The pp axis through this rank, whose group rank is the stage; None without pipeline parallel.

    Returns:
        On global rank 0 CPU tensors by FQN in the order of `state_dict()`; tied FQNs share one tensor. Elsewhere `{}`.

    Raises:
        CheckpointError: A placement that can't be gathered; on all ranks.

    """
    own, first = model_state(module), tied_fqns(module)
    with failing_alike("gather the model's state"):
        check_placements(own)
    full = gather({fqn: value for fqn, value in own.items() if first.get(fqn) not in own}, pp)
    sources = {fqn: fqn if fqn in full else first.get(fqn, fqn) for fqn in state_of(module)}
    return {fqn: full[source] for fqn, source in sources.items() if source in full}


def full_optimizer_state(
    module: nn.Module,
    optimizer: Optimizer | LightningOptimizer,
    pp: DeviceMesh | None,
    shards: Shards = NO_SHARDS,
    dp: DeviceMesh | None = None,
) -> dict[str, Any]:
    """The full `optimizer.state_dict()`, of all stages, keyed by torch's indices; a collective of all ranks.

    Args:
        module: The whole module; the same that `optimizer` was made for.
        optimizer: An optimizer whose parameters come in the same order on all ranks.
        pp: The pp axis through this rank; None without pipeline parallel.
        shards: As in `optimizer_state`.
        dp: The axis of the data-parallel ranks that share the training state, through this rank; None if each has its
            part of all states.

    Returns:
        On global rank 0 `{"state": {index: {name: CPU tensor}}, "param_groups": [...]}`. Elsewhere `{}`.

    Raises:
        CheckpointError: As `optimizer_state`, or a placement that can't be gathered; on all ranks.

    """
    with failing_alike("gather the optimizer's state"):
        own = optimizer_state(module, optimizer, shards)["state"]
        flat = {(fqn, name): value for fqn, values in own.items() for name, value in values.items()}
        check_placements({f"{name} of {fqn}": value for (fqn, name), value in flat.items()})
    full = gather(flat, pp, dp)
    if dist.get_rank() != 0:
        return {}
    index = {fqn: i for i, fqn in enumerate(parameter_fqns(module, optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for (fqn, name), value in sorted(full.items(), key=lambda item: index[item[0][0]]):
        state.setdefault(index[fqn], {})[name] = value
    return {"state": state, "param_groups": unwrapped(optimizer).state_dict()["param_groups"]}


def gather(own: Mapping[Key, Any], pp: DeviceMesh | None, dp: DeviceMesh | None = None) -> dict[Key, Any]:
    """Full tensors and other values on rank 0 of what each rank has; a collective of all ranks.

    Args:
        dp: As in `full_optimizer_state`.
    """
    replicas = exchange({key: TensorInfo.of(value) or value for key, value in own.items()}, dp)
    replica_of = owners(replicas)
    stages = exchange({key: replicas[replica][key] for key, replica in replica_of.items()}, pp)
    here = rank_on(pp)
    full: dict[Key, Any] = {}
    for key, stage in owners(stages).items():
        value = stages[stage][key]
        if stage == here and isinstance(value, TensorInfo):
            value = _from_replica(own.get(key, value), replica_of[key], dp)
        if pp is not None and stage != 0 and isinstance(stages[stage][key], TensorInfo):
            value = _to_first(value, stage, pp) if dist.get_global_rank(pp.get_group(), 0) == 0 else None
        if dist.get_rank() == 0:
            full[key] = tree_map_only(Tensor, _on_cpu, value)
    return full


def _from_replica(value: Tensor | TensorInfo, replica: int, dp: DeviceMesh | None) -> Tensor | TensorInfo | None:
    """The full tensor, on the first rank of the dp axis at least."""
    if dp is None or replica == 0:
        return full_value(value) if isinstance(value, Tensor) else value
    return _to_first(value, replica, dp)


def _to_first(value: Tensor | TensorInfo | None, owner: int, axis: DeviceMesh) -> Tensor | None:
    """Move a full tensor from one rank of the axis to its first; None on ranks that do not end up with it."""
    group = axis.get_group()
    # Through host memory where the group can: there rank 0 keeps it, and gloo sends from nowhere else.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else axis.device_type
    if axis.get_local_rank() == owner:
        assert isinstance(value, Tensor)
        # As bytes, since backends do not send every dtype.
        content = value.to(device).contiguous().reshape(-1).view(torch.uint8)
        if content.numel() > 0:
            dist.send(content, group=group, group_dst=0)
        return None
    if axis.get_local_rank() != 0:
        return None
    assert value is not None
    received = torch.empty(value.shape, dtype=value.dtype, device=device)
    if received.numel() > 0:
        dist.recv(received.reshape(-1).view(torch.uint8), group=group, group_src=owner)
    return received


def _on_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu()
    # A view of something larger (gathered with padding) would be written to the file with all of it.
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def write_full(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a `.ckpt` file, in place of a file or checkpoint folder there; on one rank.

    Raises:
        CheckpointError: There is a folder with files of others; nothing is changed.
        OSError: It can't be written; what was there stays.

    """
    check_no_others(path)
    make_room(path, lambda file: True)
    try:
        with aside(path).open("wb") as file, checksummed(file) as written:
            torch.save(dict(checkpoint), cast(Any, written))
        publish(path, lambda file: True)
    except BaseException:
        give_up(path)
        raise


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
    own = model_state(module)
    with failing_alike("load the checkpoint"):
        check_placements(own)
        check_model(
            {fqn: TensorInfo.of(value) for fqn, value in saved.items()},
            {fqn: TensorInfo.of(value) for fqn, value in state_of(module).items()},
            strict=strict,
        )
    restore_model(module, filled_from(saved, own, module))
