"""``lightning-3d fit|validate|test|predict ...``: Lightning's ``LightningCLI``, of which files name the classes.

The name "3d" is registered here, so that ``trainer.strategy: 3d`` needs no import of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

from lightning_3d.strategy import ThreeDStrategy  # noqa: F401  # known to `class_path: ThreeDStrategy`, too

COMMANDS = ("fit", "validate", "test", "predict")
HELP = "Trainer.{name}, by LightningCLI: --config FILE or arguments name the classes."


def run(arguments: Sequence[str] | None) -> None:
    """Run a command of the Trainer, with what it imports from the current folder, as ``python -m`` does.

    Args:
        arguments: The command and what follows; those of the command line if None.
    """
    sys.path.insert(0, "")
    LightningCLI(args=None if arguments is None else list(arguments))
