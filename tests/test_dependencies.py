"""What the package imports is what `pyproject.toml` declares: no more, no less."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[1]


def _imported(folder: Path) -> dict[str, set[str]]:
    """The distribution of everything else's modules that files of a folder import -> these files."""
    distributions = packages_distributions()
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {folder.name}:
                for name in distributions.get(top, [top]):
                    found.setdefault(canonicalize_name(name), set()).add(str(path.relative_to(folder)))
    return found


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_imports_are_declared() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    imported = _imported(_ROOT / "lightning_3d")
    pictures = _names(project["optional-dependencies"]["pictures"])
    assert {name: imported.pop(name) for name in pictures} == {"matplotlib": {"callbacks/drawing.py"}}
    assert set(imported) == _names(project["dependencies"])
