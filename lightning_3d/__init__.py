"""Trains any LightningModule in 3D parallel: ``import lightning_3d`` and ``Trainer(strategy="3d")``.

Importing registers the strategy; Lightning has no entry point for it.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.config.settings import BatchConfig, ThreeDConfig
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    PlanError,
    StepError,
    ThreeDError,
    TraceError,
)
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.strategy import ThreeDStrategy

__all__ = [
    "BatchConfig",
    "BatchError",
    "CheckpointError",
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

StrategyRegistry.register("3d", ThreeDStrategy, description="Data (ZeRO) x pipeline x tensor parallel")
