"""The ``pytorch_lightning`` package, the twin of ``lightning.pytorch`` that many packages import.

Both are installed together and have the same code, but classes of their own: a module of one is none for the Trainer of
the other. So that modules of either train in 3D parallel by the Trainer of either, names of the twin, and of its
``lightning_fabric``, are imported as those of ``lightning``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NoReturn

from typing_extensions import override

from lightning_3d.errors import ConfigError

_TWINS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def join_namespaces() -> None:
    """Let ``pytorch_lightning`` be ``lightning.pytorch`` wherever it is imported from now on.

    Where it was imported before, its Trainer says for ``strategy="3d"`` how to mend that. Another version of it stays
    as it is.
    """
    if "pytorch_lightning" in sys.modules:
        _refuse_in_twin(sys.modules["pytorch_lightning"])
    elif _is_same_version() and not any(isinstance(finder, _TwinFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TwinFinder())


def _is_same_version() -> bool:
    try:
        return version("pytorch-lightning") == version("lightning")
    except PackageNotFoundError:
        return False


def _refuse_in_twin(twin: ModuleType) -> None:
    registry: Any = importlib.import_module(f"{twin.__name__}.strategies").StrategyRegistry
    if twin.__name__ != _TWINS["pytorch_lightning"] and "3d" not in registry:
        registry.register("3d", _refuse, description="Refused: import lightning_3d before pytorch_lightning")


def _refuse(**kwargs: object) -> NoReturn:
    raise ConfigError(
        'strategy="3d" was given to a Trainer of pytorch_lightning, which was imported before lightning_3d, and is'
        " another package than lightning.pytorch then. Put `import lightning_3d` before what imports it, or use"
        " lightning.pytorch."
    )


class _TwinFinder(MetaPathFinder):
    """Finds modules of the twin packages in ``lightning``."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, dot, rest = fullname.partition(".")
        if package not in _TWINS:
            return None
        return ModuleSpec(fullname, _TwinLoader(f"{_TWINS[package]}{dot}{rest}"))


class _TwinLoader(Loader):
    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Let the module keep its own name; it has run."""
        module.__spec__ = self._spec
