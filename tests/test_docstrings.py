"""Docstrings of the package name their thing: none opens with "What", "Of" or "Those", which make a reader guess.

None tells of an argument that its function does not take.
"""

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


def _documented(docstring: str) -> list[str]:
    """The names under ``Args:``."""
    _, _, arguments = docstring.partition("Args:\n")
    return re.findall(r"^    (\w+):", arguments.partition("\n\n")[0], re.MULTILINE)


def _arguments(function: ast.FunctionDef) -> set[str]:
    given = function.args
    return {argument.arg for argument in ast.walk(given) if isinstance(argument, ast.arg)}


def _strangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line of a function or class, and a name that its docstring has among its arguments, which it does not take."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            makers = [node] if isinstance(node, ast.FunctionDef) else node.body
            takes = [
                f for f in makers if isinstance(f, ast.FunctionDef) and f.name in (node.name, "__init__", "__new__")
            ]
            for name in _documented(ast.get_docstring(node) or "") if takes else ():
                if not any(name in _arguments(function) for function in takes):
                    yield node.lineno, name


def test_docstrings_tell_of_arguments_that_there_are() -> None:
    found = [
        f"{path.relative_to(_ROOT.parent)}:{line} {name}"
        for path in sorted(_ROOT.rglob("*.py"))
        for line, name in _strangers(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)
