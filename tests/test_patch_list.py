"""The attributes of torch, Lightning and users that the package replaces are all in one list."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning_3d
from lightning_3d.torch_internals.patches import OF_OBJECTS, PROCESS_WIDE

_ROOT = Path(lightning_3d.__file__).parent

_CHANGED_BY_IMPORT = """
import sys, lightning.pytorch, torch.distributed, torchmetrics

def functions():
    owners = {name: module for name, module in sys.modules.items() if name.startswith(("torch", "lightning."))}
    classes = [value for module in owners.values() for value in vars(module).values() if isinstance(value, type)]
    owners |= {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}
    return {
        f"{name}.{key}": (value, getattr(value, "__code__", None))
        for name, owner in owners.items() for key, value in list(vars(owner).items()) if callable(value)
    }

before = functions()
import lightning_3d
after = functions()
print(*(name for name, value in before.items() if after.get(name) != value))
"""


def _keys(tree: ast.AST) -> Iterator[str]:
    """The first arguments of the calls of `replaced`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "replaced":
            assert isinstance(node.args[0], ast.Constant), ast.unparse(node)
            yield str(node.args[0].value)


def test_every_patch_has_a_row_and_every_row_a_patch() -> None:
    used = {key for path in _ROOT.rglob("*.py") for key in _keys(ast.parse(path.read_text()))}
    assert used == PROCESS_WIDE.keys() | OF_OBJECTS.keys()
    assert not PROCESS_WIDE.keys() & OF_OBJECTS.keys()


def test_an_import_changes_one_function() -> None:
    ran = subprocess.run([sys.executable, "-c", _CHANGED_BY_IMPORT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["lightning.pytorch.core.saving.pl_load"]
