"""Modules of `pytorch_lightning` train as those of `lightning.pytorch`."""

from __future__ import annotations

import importlib
import sys

import lightning.pytorch

import lightning_3d  # noqa: F401
from tests.scripts import start


def test_the_twin_trains() -> None:
    ended = start(["tests/scripts/twin.py", "after"], timeout=120)
    assert ended.returncode == 0, ended.output
    assert "2 steps by ThreeDStrategy" in ended.output


def test_a_twin_that_was_imported_before_is_refused() -> None:
    ended = start(["tests/scripts/twin.py", "before"], timeout=120)
    assert ended.returncode == 1
    assert 'ConfigError: strategy="3d" was given to a Trainer of pytorch_lightning, which was' in ended.output


def test_modules_of_the_twin_keep_their_own_names() -> None:
    twin = importlib.import_module("pytorch_lightning.callbacks.early_stopping")
    assert twin is sys.modules["lightning.pytorch.callbacks.early_stopping"]
    assert twin.__spec__ is not None
    assert twin.__spec__.name == twin.__name__ == "lightning.pytorch.callbacks.early_stopping"
    assert sys.modules["pytorch_lightning"] is lightning.pytorch
