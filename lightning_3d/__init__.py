"""Trains any LightningModule in 3D parallel: ``import lightning_3d`` and ``Trainer(strategy="3d")``.

Importing registers the strategy, for which Lightning has no entry point; ``load_from_checkpoint`` then reads folders.
The strategy and the parts of torch that it needs are loaded at their first use, so that the import takes little time.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.config.compile import CompileConfig
from lightning_3d.config.context import ContextConfig
from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.config.settings import BatchConfig, ThreeDConfig
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.errors import (
    BatchError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    PlanError,
    StepError,
    ThreeDError,
    TraceError,
)
from lightning_3d.namespaces import join_namespaces
from lightning_3d.torch_internals.lightning_helpers import load_folders

if TYPE_CHECKING:
    from lightning_3d.precision.plugin import ThreeDPrecision
    from lightning_3d.strategy import ThreeDStrategy

__all__ = [
    "ActivationsConfig",
    "BatchConfig",
    "CheckpointConfig",
    "BatchError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CompileConfig",
    "ConfigError",
    "ContextConfig",
    "PipelineConfig",
    "PlanError",
    "PrecisionConfig",
    "StepError",
    "TensorConfig",
    "ThreeDConfig",
    "ThreeDError",
    "ThreeDPrecision",
    "ThreeDStrategy",
    "TraceError",
    "ZeroConfig",
]

_LOADED_LATE = {"ThreeDPrecision": "lightning_3d.precision.plugin", "ThreeDStrategy": "lightning_3d.strategy"}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LOADED_LATE[name]), name)


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function or class of a module that the first call loads."""

    def call(*args: object, **kwargs: object) -> object:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


join_namespaces()
load_folders(_late("lightning_3d.checkpoint", "read_folder"))
StrategyRegistry.register(
    "3d", _late("lightning_3d.strategy", "ThreeDStrategy"), description="Data (ZeRO) x pipeline x tensor parallel"
)
