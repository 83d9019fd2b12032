"""Checkpoints as folders: every rank writes what it holds, and reads what it needs of what others wrote.

The layout is that of Lightning's ModelParallelStrategy: files of torch.distributed.checkpoint (DCP) with the sections
`state_dict` and `optimizer_{i}`, everything by FQN, and `meta.pt` with the rest of the Trainer's checkpoint.

    state_dict.{fqn}                                   parameters, buffers, extra state
    optimizer_0.state.{fqn}.{name}                     optimizer state, placed as its parameter, or a scalar
    optimizer_0.param_groups.{group}.{hyperparameter}  "params" lists FQNs; written by rank 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import as_box, check_placements
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.folder import MODEL, Folder, TreePath
from lightning_3d.checkpoint.match import check_groups, check_model, check_num_optimizers
from lightning_3d.checkpoint.own_state import model_state, optimizer_state, restore_model, restore_optimizer
from lightning_3d.checkpoint.ownership import exchange, owners, pipeline_rank
from lightning_3d.checkpoint.tensor_info import TensorInfo
from lightning_3d.errors import CheckpointError

META = "meta.pt"
"""File with everything that is not a state of the model or an optimizer. Written last: with it a folder is complete."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint folder."""
    return path.is_dir() and (path / META).is_file()


# --------------------------------------------------------------------------------------------------------------- save


def save_sharded(path: Path, checkpoint: Mapping[str, Any], pp: DeviceMesh | None) -> None:
    """Write a checkpoint folder; a collective of all ranks. A checkpoint at `path` is replaced.

    Args:
        path: The same on all ranks, on a file system that all of them share.
        checkpoint: The Trainer's checkpoint with "state_dict" from `model_state` and "optimizer_states" (if any) from
            `optimizer_state`. The rest is taken from rank 0.
        pp: The pp axis through this rank; None without pipeline parallel.

    Raises:
        CheckpointError: The folder can't be written, or has placements that can't be saved; on all ranks.

    """
    sections = {MODEL: checkpoint[MODEL]}
    optimizers = {f"optimizer_{i}": state for i, state in enumerate(checkpoint.get("optimizer_states", []))}
    sections.update({name: state["state"] for name, state in optimizers.items()})
    catalogs = exchange({(section, fqn): None for section, values in sections.items() for fqn in values}, pp)
    owner, here = owners(catalogs), pipeline_rank(pp)
    mine = {
        section: {fqn: value for fqn, value in values.items() if owner[section, fqn] == here}
        for section, values in sections.items()
    }
    with failing_alike(f"write the checkpoint {path}"):
        check_placements(mine[MODEL])
        for section in optimizers:
            check_placements({f"{n} of {fqn}": v for fqn, named in mine[section].items() for n, v in named.items()})
        if dist.get_rank() == 0:
            _make_room(path)
    state: dict[str, Any] = {MODEL: {fqn: _boxed(value) for fqn, value in mine.pop(MODEL).items()}}
    for section, values in mine.items():
        state[section] = {"state": {fqn: {n: _boxed(v) for n, v in named.items()} for fqn, named in values.items()}}
        if dist.get_rank() == 0:
            state[section]["param_groups"] = optimizers[section]["param_groups"]
    with failing_alike(f"write the checkpoint {path}"):
        save(state, checkpoint_id=path)
    with failing_alike(f"write {path / META}"):
        if dist.get_rank() == 0:
            rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")}
            torch.save(rest, path / f"{META}.part")
            (path / f"{META}.part").replace(path / META)


def _make_room(path: Path) -> None:
    """Make the folder, without a file or the files of another checkpoint in its place; files of others stay."""
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    for file in [path / META, path / f"{META}.part", path / ".metadata", *path.glob("*.distcp")]:
        file.unlink(missing_ok=True)


def _boxed(value: object) -> object:
    return as_box(value.detach()) if isinstance(value, Tensor) else value


# --------------------------------------------------------------------------------------------------------------- load


def load_sharded(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer | LightningOptimizer],
    *,
    strict: bool,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read a checkpoint folder that any layout wrote into `module` and `optimizers`; a collective of all ranks.

    Args:
        path: The same on all ranks.
        module: The whole module; blocks of other stages are on the meta device and stay so.
        optimizers: The optimizers to restore; none for evaluation.
        strict: Whether all FQNs must match; shapes must in any case.
        weights_only: As in `torch.load`, for the rest of the Trainer's checkpoint.

    Returns:
        The rest of the Trainer's checkpoint.

    Raises:
        CheckpointError: The folder can't be read or does not fit; on all ranks. If it does not fit, nothing is changed.

    """
    rest: dict[str, Any] = {}
    with failing_alike(f"read the checkpoint {path}"):
        if not is_sharded_checkpoint(path):
            raise CheckpointError(f"{path} is not a complete checkpoint folder: it has no {META}")
        folder = Folder.open(path)
        rest = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    sections = folder.optimizer_sections() if optimizers else []
    groups = folder.read_groups(sections)
    own = model_state(module)
    room: dict[TreePath, Any] = {}
    with failing_alike(f"load the checkpoint {path}"):
        check_placements(own)
        wanted = {fqn: TensorInfo.of(value) for fqn, value in module.state_dict().items()}
        check_model(folder.model_tensors(), wanted, strict=strict)
        if optimizers:
            check_num_optimizers(len(sections), len(optimizers))
        for i, (section, optimizer) in enumerate(zip(sections, optimizers, strict=True)):
            check_groups(groups[i], optimizer_state(module, optimizer)["param_groups"], optimizer=i, strict=strict)
            room.update(folder.room_for_state(section, module, optimizer))
        room.update(folder.room_for_model(own))
    loaded = folder.read(room)
    restore_model(module, loaded.get(MODEL, {}))
    for section, group, optimizer in zip(sections, groups, optimizers, strict=True):
        state = loaded.get(section, {}).get("state", {})
        restore_optimizer(module, optimizer, {"state": state, "param_groups": group})
    return rest
