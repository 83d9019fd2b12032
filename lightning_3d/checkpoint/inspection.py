"""Telling what a checkpoint holds, without reading its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from lightning_3d.checkpoint.content import MODEL, OPTIMIZERS
from lightning_3d.checkpoint.lazy import LazyTensor, info_of
from lightning_3d.checkpoint.loading import lazy_checkpoint, located
from lightning_3d.checkpoint.run_state import RUN
from lightning_3d.memory.rank_memory import size_text
from lightning_3d.torch_internals.pytree import tree_leaves


def inspect_checkpoint(location: str | PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Tell what a checkpoint of any layout holds, for JSON; sizes in bytes, of tied tensors once.

    Args:
        location: A checkpoint folder or a `.ckpt` file.
        weights_only: As in `torch.load`; `False` unpickles everything, which may run code.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointError: It can't be read.

    """
    path = located(Path(location))
    checkpoint = lazy_checkpoint(path, weights_only=weights_only)
    run = checkpoint.get(RUN)
    optimizers = checkpoint.get(OPTIMIZERS, [])
    others = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    return {
        "form": "folder" if path.is_dir() else "file",
        "saved_from": run["mesh"] if run else None,
        "lightning": checkpoint.get("pytorch-lightning_version"),
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "bytes": {
            "weights": _num_bytes(checkpoint[MODEL]),
            "optimizer_states": _num_bytes(optimizers),
            "others": _num_bytes(others),
        },
        "optimizers": [_optimizer(state) for state in optimizers],
        "lr_schedulers": len(checkpoint.get("lr_schedulers", [])),
        "loops": dict(_progress(checkpoint.get("loops", {}))),
        "callbacks": sorted(checkpoint.get("callbacks", {})),
        "further": sorted(others.keys() - _TOLD),
        "parameters": {
            fqn: {"shape": info.shape, "dtype": str(info.dtype).removeprefix("torch."), "bytes": _num_bytes(value)}
            for fqn, value in checkpoint[MODEL].items()
            if (info := info_of(value)) is not None
        },
    }


_TOLD = {RUN, "pytorch-lightning_version", "epoch", "global_step", "lr_schedulers", "loops", "callbacks"}


def _num_bytes(tree: object) -> int:
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if info_of(leaf) is not None}
    return sum(leaf.num_bytes if isinstance(leaf, LazyTensor) else leaf.nbytes for leaf in tensors.values())


def _optimizer(state: Mapping[str, Any]) -> dict[str, object]:
    """Its states by name, and the settings of its groups."""
    groups = state.get("param_groups", [])
    return {
        "parameters": sum(len(group["params"]) for group in groups),
        "states": sorted({str(name) for values in state.get("state", {}).values() for name in values}),
        "bytes": _num_bytes(state),
        "groups": [{k: v for k, v in group.items() if isinstance(v, int | float | str)} for group in groups],
    }


def _progress(loops: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The counts of what loops have completed, where they have anything."""
    for name, loop in loops.items():
        for key, state in loop.items():
            total = state.get("total", {}) if key.endswith("progress") else {}
            if total.get("completed"):
                yield f"{name}.{key}", total["completed"]


def inspection_table(found: Mapping[str, Any]) -> RenderableType:
    """The findings of `inspect_checkpoint` for people: parameters whose names differ in numbers alone share a row."""
    overview = Table("", "", show_header=False)
    saved_from = found["saved_from"]
    layout = "not by this strategy" if saved_from is None else ", ".join(f"{k} {v}" for k, v in saved_from.items())
    overview.add_row("saved from", f"{layout}; Lightning {found['lightning']}, a {found['form']}")
    overview.add_row("after", f"epoch {found['epoch']}, step {found['global_step']}")
    overview.add_row(
        "holds", ", ".join(f"{size_text(n)} of {kind.replace('_', ' ')}" for kind, n in found["bytes"].items())
    )
    for number, optimizer in enumerate(found["optimizers"]):
        text = f"{optimizer['parameters']} parameters, {', '.join(optimizer['states']) or 'no state'}"
        settings = [", ".join(f"{k} {v}" for k, v in group.items() if v is not False) for group in optimizer["groups"]]
        overview.add_row(f"optimizer {number}", "\n".join([f"{text}: {size_text(optimizer['bytes'])}", *settings]))
    overview.add_row("schedulers", str(found["lr_schedulers"]))
    overview.add_row("completed", "\n".join(f"{name} {num}" for name, num in found["loops"].items()))
    for name in ("callbacks", "further"):
        if found[name]:
            overview.add_row(name, "\n".join(found[name]))
    rows: dict[tuple[str, str, str], list[int]] = {}
    for fqn, tensor in found["parameters"].items():
        row = (re.sub(r"\d+", "*", fqn), " x ".join(map(str, tensor["shape"])), tensor["dtype"])
        rows.setdefault(row, []).append(tensor["bytes"])
    parameters = Table("parameters and buffers", "shape", "dtype", "number", "bytes")
    for row, sizes in rows.items():
        parameters.add_row(*row, str(len(sizes)), size_text(sum(sizes)))
    return Group(overview, parameters)
