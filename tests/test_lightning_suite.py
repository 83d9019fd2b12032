"""The runner of Lightning's own tests tells what passes with DDP and fails with this strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

ALIKE = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

def test_trains(tmp_path):
    Trainer(default_root_dir=tmp_path, fast_dev_run=1).fit(BoringModel())

def test_fails_everywhere():
    assert False
"""

OTHERWISE = """
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

@pytest.mark.parametrize("number", [1], ids=["bold"])
def test_is_plain_or_ddp(number):
    strategy = Trainer().strategy
    assert type(strategy) in (SingleDeviceStrategy, DDPStrategy)

def test_has_its_own():
    assert type(Trainer(strategy="ddp", accelerator="cpu", devices=1).strategy) is DDPStrategy
"""


def _run(folder: Path, *files: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.lightning_suite", str(folder), *files]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)


def test_differences_are_told(tmp_path: Path) -> None:
    (tmp_path / "test_alike.py").write_text(ALIKE)
    (tmp_path / "test_otherwise.py").write_text(OTHERWISE)
    done = _run(tmp_path, "test_alike.py", "test_otherwise.py", "test_gone.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_otherwise.py::test_is_plain_or_ddp[bold]" in done.stdout
    assert "test_alike.py" not in done.stdout
    assert f"Not in {tmp_path}:\n  test_gone.py" in done.stdout
    assert "ddp: 1 failed, 3 passed" in done.stdout
    assert "3d: 2 failed, 2 passed" in done.stdout


def test_a_folder_without_the_files_is_told(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 2
    assert "None of the files" in done.stdout
