"""Launching: by Lightning and by torchrun, by name and from a file, to the same numbers as one process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.models import TinyGPT, reference_loader, tokens
from tests.scripts import start
from tests.scripts.fit import GLOBAL_BATCH_SIZE, SEED, STEPS, Losses

LIMIT = 120.0
"""Seconds that one program may take, on a machine that does much else."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

CONFIG = """
pipeline_parallel_size: 2
zero: {stage: 1}
pipeline: {num_microbatches: 4, schedule: 1f1b}
"""
OVERRIDES = ["pipeline.num_microbatches=2", "zero.stage=2"]

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The losses of one process with the plain Trainer."""
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[losses],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(SEED, verbose=False)
    samples = tokens(STEPS * GLOBAL_BATCH_SIZE)
    trainer.fit(TinyGPT(), reference_loader(samples, global_batch_size=GLOBAL_BATCH_SIZE, seed=SEED))
    assert len(losses.values) == STEPS
    return losses.values


def _fit(launcher: list[str], directory: Path, *config: str) -> dict[str, Any]:
    result = directory / "result.json"
    ended = start([*launcher, "tests/scripts/fit.py", str(result), *config], timeout=LIMIT)
    assert ended.returncode == 0, ended.output
    seen: dict[str, Any] = json.loads(result.read_text())
    return seen


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        pytest.param([], "LightningEnvironment", id="lightning"),
        pytest.param(TORCHRUN, "TorchElasticEnvironment", id="torchrun"),
    ],
)
def test_launched_from_a_file_with_overrides(
    launcher: list[str], environment: str, reference: list[float], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    seen = _fit(launcher, tmp_path, str(config), *OVERRIDES)
    assert seen["environment"] == environment
    assert seen["sizes"] == {"pp": 2, "dp": 1, "tp": 1}
    assert seen["zero"] == 2  # an override
    assert seen["losses"] == pytest.approx(reference, abs=TOLERANCE)
    num_parameters = sum(parameter.numel() for parameter in TinyGPT().parameters())
    assert all(held < num_parameters for held in seen["parameters"])  # neither stage holds the whole model


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_name_alone_is_data_parallel_with_zero_1(reference: list[float], tmp_path: Path) -> None:
    seen = _fit([], tmp_path)
    assert seen["sizes"] == {"pp": 1, "dp": 2, "tp": 1}
    assert seen["zero"] == 1
    assert seen["losses"] == pytest.approx(reference, abs=TOLERANCE)
    num_parameters = sum(parameter.numel() for parameter in TinyGPT().parameters())
    assert sum(seen["optimizer_state"]) == 2 * num_parameters  # AdamW's two moments, once in all
    assert all(0 < held < 2 * num_parameters for held in seen["optimizer_state"])


def test_a_program_that_takes_too_long_is_killed_with_those_that_it_started() -> None:
    """Torchrun gives each of its processes a session of its own; one that is left would keep the pipe open."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="still running after 1 s"):
        start(["-c", child, "import time; time.sleep(200)"], timeout=1)
    assert time.monotonic() - begin < 100
