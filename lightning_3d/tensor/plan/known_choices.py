"""Choices of earlier runs for a block, in the user's cache folder, so that its plan is searched for once.

An entry holds names, sizes and reasons, and a digest of the plan that they led to. A run makes a plan of it by one
simulation of the block's code as it is now; where that is another plan than before, the block is searched anew. So a
key need not tell all that code does (globals, closures), and the plan passes the same proof as a new one.

``LIGHTNING_3D_CACHE`` names another folder than ``~/.cache/lightning_3d``; if it is empty, nothing is kept. A folder
that can't be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_3d.model.kinds import identity_of
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.plan.simulate import Choice
from lightning_3d.torch_internals.pytree import tree_map

FOLDER = "LIGHTNING_3D_CACHE"
"""Environment variable with the folder."""

_log = logging.getLogger(__name__)


class KnownChoice:
    """The entry of one block in the cache.

    Args:
        block: Its code, structure, attributes and shapes are the key, together with
        inputs: those of its forward, of which shapes, types and plain values count, and
        *terms: all else that its plan depends on, by its ``repr``.
    """

    def __init__(self, block: nn.Module, inputs: object, *terms: object) -> None:
        self._name = type(block).__name__
        self._path: Path | None = None
        try:
            if (folder := _folder()) is not None:
                self._path = folder / f"{_key(block, inputs, terms)}.json"
        except Exception as error:  # no home, a module that can't be printed
            _log.debug("The plan of %s is not kept: %s: %s", self._name, type(error).__name__, error)

    def plan(self, make: Callable[[Choice], BlockTensorPlan]) -> BlockTensorPlan | None:
        """The plan that the block had before; None if there is none, or if its code gives another now.

        Args:
            make: Makes the plan of a choice.
        """
        if self._path is None or not os.path.isfile(self._path):
            return None
        try:
            entry = json.loads(self._path.read_text())
            sizes = {str(fqn): tuple(map(int, parts)) for fqn, parts in entry["part_sizes"].items()}
            plan = make(Choice(replicated=dict(entry["replicated"]), part_sizes=sizes))
        except Exception as error:  # an entry can hold anything, and the block's code raise anything
            _log.debug("%s of %s can't be used: %s: %s", self._path, self._name, type(error).__name__, error)
            return None
        if entry.get("plan") != _digest(plan):
            _log.info("%s is no longer sharded as %s says, and is planned anew", self._name, self._path)
            return None
        return plan

    def keep(self, choice: Choice, plan: BlockTensorPlan) -> None:
        """Write down the choice that a search came to, whole or not at all."""
        if self._path is None:
            return
        entry = {"replicated": dict(choice.replicated), "part_sizes": dict(choice.part_sizes), "plan": _digest(plan)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".tmp", delete=False) as file:
                json.dump(entry, file)
            os.replace(file.name, self._path)
        except OSError as error:
            _log.debug("The plan of %s is not kept: %s", self._name, error)


def _folder() -> Path | None:
    """Where entries are; None if nothing is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get(FOLDER, os.path.join(base, "lightning_3d"))
    return Path(folder).expanduser() if folder else None


def _key(block: nn.Module, inputs: object, terms: object) -> str:
    """Equal for blocks that are sharded alike, as far as can be told."""
    identity = identity_of("", block)
    settings = torch.__version__, torch.get_default_dtype(), terms
    text = repr((identity.kind, identity.attributes, tree_map(_described, inputs), settings))
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode())
    for path in (*sorted(_code_of(block)), *_CODE):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_CODE = sorted(path for room in ("sharding", "tensor") for path in (Path(__file__).parents[2] / room).rglob("*.py"))
"""The files that decide how blocks are sharded: they count as the version of this package."""


def _code_of(block: nn.Module) -> set[Path]:
    """The files with the classes of a block's modules, but for torch's."""
    names = {base.__module__ for module in block.modules() for base in type(module).__mro__}
    modules = (sys.modules.get(name) for name in names if name.partition(".")[0] not in ("torch", "builtins"))
    paths = (getattr(module, "__file__", None) for module in modules)
    return {Path(path) for path in paths if path and os.path.isfile(path)}


def _described(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _digest(plan: BlockTensorPlan) -> str:
    return hashlib.sha256(repr(plan).encode()).hexdigest()
