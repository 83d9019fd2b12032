"""Configuration by LightningCLI (files and command line) and Hydra: the same keys, fitting, and our error for typos."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_3d import ConfigError, ThreeDStrategy
from lightning_3d.cli import main
from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from tests.models import TinyMLP, features, loader
from tests.workers import WorkerPools

CONFIGURED = ThreeDConfig(
    layout="given",
    pipeline_parallel_size=2,
    zero=ZeroConfig(stage=2),
    pipeline=PipelineConfig(num_microbatches=4, partition="uniform", schedule="gpipe"),
    save_distributed_checkpoint=False,
)

TRAINER = """
  accelerator: cpu
  devices: 2
  max_steps: 2
  limit_val_batches: 1
  num_sanity_val_steps: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""
FILE = f"""
seed_everything: 1
trainer: {TRAINER}
  strategy:
    class_path: lightning_3d.ThreeDStrategy
    init_args:
      pipeline_parallel_size: 2
      zero:
        stage: 2
      pipeline:
        num_microbatches: 4
        partition: uniform
        schedule: gpipe
      save_distributed_checkpoint: false
model:
  width: 16
"""
FILE_WITHOUT_STRATEGY = f"""
seed_everything: 1
trainer: {TRAINER}
"""


class Regression(L.LightningDataModule):
    """Data for TinyMLP."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(features(32), global_batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(features(8), global_batch_size=self.batch_size)


def _run_cli(text: str, *arguments: str) -> tuple[ThreeDConfig, tuple[int, int], float]:
    """Fit as `python main.py fit --config ... ARGUMENTS` would; what the strategy was told, the steps, the loss."""
    path = Path("config.yaml")
    path.write_text(text)  # the same on all ranks
    cli = LightningCLI(TinyMLP, Regression, args=["fit", f"--config={path}", *arguments], save_config_callback=None)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ThreeDStrategy)
    done = (cli.trainer.global_step, cli.model.hparams["width"])
    return strategy.config, done, float(cli.trainer.callback_metrics["loss"])


def test_cli_fits_from_a_file_and_the_command_line(workers: WorkerPools) -> None:
    given = ("zero.stage=3", "pipeline.partition=[layers.3]", "pipeline.num_microbatches=auto")
    arguments = [f"--trainer.strategy.{setting}" for setting in given]
    ranks = workers(2).run(_run_cli, FILE, *arguments, "--trainer.max_steps=1")
    pipeline = PipelineConfig(partition=("layers.3",), schedule="gpipe")
    assert [config for config, _, _ in ranks] == [replace(CONFIGURED, zero=ZeroConfig(stage=3), pipeline=pipeline)] * 2
    assert [done for _, done, _ in ranks] == [(1, 16)] * 2
    assert ranks[0][2] == ranks[1][2]


class Watched(L.Callback):
    """Keeps what it saw of the last fit in this process."""

    seen: ClassVar[tuple[ThreeDConfig, int]]

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        Watched.seen = (trainer.strategy.config, trainer.global_step)


def _run_command(*arguments: str) -> tuple[ThreeDConfig, int]:
    classes = (f"--{key}={cls.__module__}.{cls.__name__}" for key, cls in (("model", TinyMLP), ("data", Regression)))
    Path("job.yaml").write_text(FILE_WITHOUT_STRATEGY)
    main(["fit", "--config=job.yaml", *classes, f"--trainer.callbacks={__name__}.Watched", *arguments])
    return Watched.seen


@pytest.mark.parametrize("named", ["--trainer.strategy=3d", "--trainer.strategy.class_path=ThreeDStrategy"])
def test_our_command_fits_and_knows_the_name(workers: WorkerPools, named: str) -> None:
    assert workers(2).run(_run_command, named) == [(ThreeDConfig(), 2)] * 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stage: 2", "stge: 2", "unknown config key 'zero.stge': the nearest valid key is 'zero.stage'"),
        ("gpipe", "g-pipe", r"pipeline.schedule='g-pipe' is not allowed: use 'gpipe', '1f1b'"),
    ],
)
def test_typos_through_the_cli_give_our_error(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):  # jsonargparse may quote a ConfigError in its own ValueError
        _parse(FILE.replace(old, new), tmp_path, monkeypatch)


def _parse(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Trainer of a config file in this process."""
    path = directory / "config.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["main.py"])
    LightningCLI(TinyMLP, Regression, args=[f"--config={path}"], save_config_callback=None, run=False)


def test_unknown_argument_through_the_cli_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse(FILE.replace("pipeline_parallel_size", "pipeline_paralel_size"), tmp_path, monkeypatch)
    assert caught.value.code == 2
    assert "pipeline_paralel_size" in capsys.readouterr().err  # jsonargparse refuses it before the strategy is made


def test_typos_through_hydra_give_our_error() -> None:
    """That Hydra's configs fit is shown by the example."""
    message = "unknown config key 'zero.stge': the nearest valid key is 'zero.stage'"
    with pytest.raises(Exception, match=message) as caught:
        instantiate({"_target_": "lightning_3d.ThreeDStrategy", "zero": {"stge": 2}})
    assert isinstance(caught.value.__cause__, ConfigError)  # Hydra wraps what a constructor raises


def test_the_doctor_reports_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["communication"]["gloo"] == "available"
    assert report["problems"] == []
    monkeypatch.setattr("lightning_3d.cli.doctor.version", {"pytorch-lightning": "1.9.0"}.get)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "problem: torch is not installed" in out
    assert "beside pytorch-lightning 1.9.0" in out
