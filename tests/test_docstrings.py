"""Docstrings of the package name their thing: none opens with "What", "Of" or "Those", which make a reader guess."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_3d

_ROOT = Path(lightning_3d.__file__).parent
_RIDDLE = re.compile(r"\s*(What|Of|Those|Now)\b")


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes and functions, and of those below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _riddles(source: str) -> list[int]:
    return [line for line, text in _docstrings(ast.parse(source)) if _RIDDLE.match(text)]


def test_docstrings_name_their_thing() -> None:
    found = [
        f"{path.relative_to(_ROOT.parent)}:{line}"
        for path in sorted(_ROOT.rglob("*.py"))
        for line in _riddles(path.read_text())
    ]
    assert not found, "\n".join(found)
