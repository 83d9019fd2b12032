"""No file outside of `torch_internals/` touches a private symbol of torch, Lightning or torchmetrics, and those in it
are in the table of `docs/private-symbols.md`, with reasons.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
import torchmetrics

import lightning_3d

_ROOT = Path(lightning_3d.__file__).parent
_PACKAGES = ("torch", "lightning", "lightning_utilities", "torchmetrics")
_OBJECTS = (L.LightningModule(), torchmetrics.MeanMetric(), torch.zeros(()), torch.zeros(()).untyped_storage())
_STRINGS = {name for thing in _OBJECTS for name in dir(thing) if name.startswith("_") and not name.endswith("__")}
"""Names that would reach a private attribute through a dict or ``getattr``."""

_PUBLIC = {"_fields", "_make", "_replace", "_asdict", "_getframe", "_current_frames", "_exit"}
"""Documented by Python: of named tuples, of ``sys`` and of ``os``."""

_OF_STRATEGIES = {"_configure_launcher", "_launcher", "_precision_plugin", "_wrap_closure", "_after_closure"}
"""Strategies and precision plugins of Lightning have them; an override has no other name. Canary:
``test_torch_internals.py``."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def _own_names(tree: ast.AST) -> set[str]:
    """Private names that the file itself gives to its functions, classes and attributes."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
    return own - _OF_STRATEGIES


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _private_uses(tree: ast.AST, inherited: set[str]) -> Iterator[tuple[int, str]]:
    own = _own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _PACKAGES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(map(_is_private, name.split("."))):
                    yield node.lineno, f"imports {name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(_is_private, alias.name.split("."))):
                    yield node.lineno, f"imports {alias.name}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own | _PUBLIC:
            if not (_is_self(node.value) and node.attr in inherited | _OF_STRATEGIES):
                yield node.lineno, f"reads {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _STRINGS:
            yield node.lineno, f"names {node.value!r}"


def _files() -> list[Path]:
    return [path for path in sorted(_ROOT.rglob("*.py")) if path.parent.name != "torch_internals"]


def test_only_the_adapters_touch_private_symbols() -> None:
    trees = {path: ast.parse(path.read_text()) for path in _files()}
    inherited = set().union(*map(_own_names, trees.values()))  # by `self`, from a class of another file
    found = [
        f"{path.relative_to(_ROOT)}:{line} {use}"
        for path, tree in trees.items()
        for line, use in _private_uses(tree, inherited)
    ]
    assert not found, "Make an adapter in torch_internals/ for it:\n" + "\n".join(found)


_MODULES = {"_C", "_autograd", "_dynamo", "_functorch", "_pytree"}
"""Parts of longer names."""


def _listed() -> dict[str, set[str]]:
    """Symbols by file, in the table of the documentation."""
    found: dict[str, set[str]] = {}
    file = ""
    for line in (_ROOT.parent / "docs/private-symbols.md").read_text().splitlines():
        if line.startswith("| `") or line.startswith("| | `"):
            _, named, symbols, reason, _ = line.split("|")
            file = named.strip(" `") or file
            assert reason.strip()
            found.setdefault(file, set()).update(symbol.strip(" `") for symbol in symbols.split(","))
    return found


def test_each_private_symbol_is_listed_with_a_reason() -> None:
    used: dict[str, set[str]] = {}
    for path in sorted((_ROOT / "torch_internals").glob("*.py")):
        names = {
            use.split()[-1].strip("'").rpartition(".")[2]
            for _, use in _private_uses(ast.parse(path.read_text()), set())
        }
        if names - _MODULES:
            used[path.stem] = names - _MODULES
    assert used == _listed()
