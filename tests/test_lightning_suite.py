"""The runner of Lightning's own tests tells what passes with DDP and fails with this strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.matrix  # of a tool that people run by hand

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

ON_TWO_RANKS = """
import os
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

def test_trains_in_one_folder(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=1)
    (tmp_path / str(trainer.global_rank)).touch()
    trainer.fit(BoringModel())
    assert trainer.world_size == 2 and (tmp_path / "0").exists() and (tmp_path / "1").exists()

def test_fails_on_one_rank():
    assert os.environ["LOCAL_RANK"] == "0"

def test_ends_on_one_rank():
    is_ddp = type(Trainer().strategy) is DDPStrategy
    if os.environ["LOCAL_RANK"] == "1" and not is_ddp:
        os._exit(1)

"""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.lightning_suite", str(folder), *arguments]
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


def test_ranks_run_the_same_tests(tmp_path: Path) -> None:
    (tmp_path / "test_on_two_ranks.py").write_text(ON_TWO_RANKS)
    done = _run(tmp_path, "test_on_two_ranks.py", "--devices", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_on_two_ranks.py::test_ends_on_one_rank" in done.stdout
    assert "ddp: 1 failed, 2 passed" in done.stdout
    assert "3d: 2 failed, 1 passed" in done.stdout
