"""Imports between the rooms of the package point one way: from the room that uses to the room that is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import lightning_3d

_ROOT = Path(lightning_3d.__file__).parent

ROOMS = (
    "errors",
    "namespaces",
    "waits",
    "frames",
    "torch_internals",
    "config",
    "distributed",
    "ranks",
    "zero",
    "precision",
    "model",
    "activations",
    "sharding",
    "trace",
    "tensor",
    "context",
    "compile",
    "memory",
    "planning",
    "pipeline",
    "data",
    "checkpoint",
    "parts",
    "run",
    "strategy",
    "callbacks",
    "cli",
    "__init__",
)
"""A room may import those before it. Files at the top are rooms of their own."""


def _imports(tree: ast.AST, package: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, also of those in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _room(name: str, rooms: Sequence[str]) -> str | None:
    """The room of a module or of a name in it; None for other packages."""
    parts = name.split(".")
    if parts[0] != _ROOT.name:
        return None
    inner = parts[1:] or ["__init__"]
    return inner[0] if inner[0] in rooms else "__init__"


def _module(path: Path) -> list[str]:
    parts = [_ROOT.name, *path.relative_to(_ROOT).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def _wrong(path: Path, source: str, rooms: Sequence[str]) -> list[str]:
    """The imports of a file that point to a later room."""
    module = _module(path)
    package = module if path.stem == "__init__" else module[:-1]
    here = _room(".".join(module), rooms)
    assert here is not None
    return [
        f"{path.relative_to(_ROOT.parent)}:{line} imports {name}: from the room {here!r} to the later {there!r}"
        for line, name in _imports(ast.parse(source), package)
        if (there := _room(name, rooms)) is not None and rooms.index(there) > rooms.index(here)
    ]


def test_every_folder_and_file_at_the_top_is_a_room() -> None:
    present = {path.stem for path in _ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert present == set(ROOMS)


def test_imports_point_one_way() -> None:
    wrong = [line for path in sorted(_ROOT.rglob("*.py")) for line in _wrong(path, path.read_text(), ROOMS)]
    assert not wrong, "\n".join(wrong)


def _inside(room: str, files: dict[Path, str]) -> dict[str, set[str]]:
    """Folder or file of a room -> those beside it that it imports."""
    uses: dict[str, set[str]] = {}
    for path, source in files.items():
        module = _module(path)
        if path.name == "__init__.py" and len(module) == 2:  # the room's own names
            continue
        package = module if path.stem == "__init__" else module[:-1]
        names = [name.split(".") for _, name in _imports(ast.parse(source), package)]
        found = {parts[2] for parts in names if parts[:2] == [_ROOT.name, room] and len(parts) > 3}
        uses.setdefault(module[2], set()).update(found - {module[2]})
    return uses


def _circle(uses: dict[str, set[str]]) -> list[str]:
    """What is left when all that imports nothing of it is taken away, again and again: circles and their users."""
    left = {name: set(used) for name, used in uses.items()}
    while free := [name for name, used in left.items() if not used & left.keys()]:
        for name in free:
            del left[name]
    return [f"{name} imports {sorted(used & left.keys())}" for name, used in left.items()]


@pytest.mark.parametrize("room", [room for room in ROOMS if (_ROOT / room).is_dir()])
def test_no_imports_in_a_circle_inside_of_a_room(room: str) -> None:
    circle = _circle(_inside(room, {path: path.read_text() for path in (_ROOT / room).rglob("*.py")}))
    assert not circle, f"in lightning_3d/{room}:\n" + "\n".join(circle)
