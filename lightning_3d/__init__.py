"""Trains any LightningModule in 3D parallel: ``import lightning_3d`` and ``Trainer(strategy="3d")``.

Importing registers the strategy, for which Lightning has no entry point; ``load_from_checkpoint`` then reads folders.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.checkpoint import read_folder
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.config.compile import CompileConfig
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
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.torch_internals.lightning_helpers import load_folders

__all__ = [
    "ActivationsConfig",
    "BatchConfig",
    "CheckpointConfig",
    "BatchError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CompileConfig",
    "ConfigError",
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

join_namespaces()
load_folders(read_folder)
StrategyRegistry.register("3d", ThreeDStrategy, description="Data (ZeRO) x pipeline x tensor parallel")
