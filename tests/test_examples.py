"""The examples as a user starts them; `minimal.py` is run by `make test-install`."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AutoModelForCausalLM

from examples.gpt import GPT, StdlibText
from lightning_3d import ThreeDStrategy
from lightning_3d.cli import main
from tests.parity import QUIET
from tests.scripts import ROOT, start
from tests.workers import WorkerPools, free_port

EXAMPLES, CONF = ROOT / "examples", ROOT / "conf"
LIMIT = 240.0
"""Seconds that one example may take, on a machine that does much else."""

SHORT = ["trainer.max_steps=2", "trainer.log_every_n_steps=1"]

SRUN = """#!/usr/bin/env bash
# As srun on one node: SLURM_NTASKS tasks, each with its number; fails where one of them does.
while [[ $1 == --* ]]; do shift; done
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""

NOTEBOOK = """
import json, sys
sys.ps1 = "In [1]: "  # as IPython does
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
exec("".join(cells[0]["source"]))
L.seed_everything(0, verbose=False)
data, alone = DataLoader(torch.randn(512, 16), batch_size=16), Flip()
L.Trainer(accelerator="cpu", devices=1, max_epochs=4, enable_progress_bar=False, logger=False).fit(alone, data)
torch.set_num_threads(2)
torch.randn(2**20).exp().sum()  # threads of OpenMP, which a fork lacks
exec("".join(cells[1]["source"]))
for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
for cell in cells[2:]:
    exec("".join(cell["source"]))
print(trainer.callback_metrics["loss"].item(), further.callback_metrics["val_loss"].item())
"""
"""Runs the cells in the process of a notebook, and the first fit by the plain Trainer, too."""


def _run(directory: Path, *command: str, program: str = sys.executable, **environment: str) -> str:
    """Run an example in a folder of its own; its output."""
    path = os.pathsep.join([*environment.pop("PATH", "").split(), str(Path(sys.executable).parent), os.environ["PATH"]])
    where = ROOT if program == "bash" else directory  # launch/ names files of the repository
    ended = start(command, timeout=LIMIT, environment={**environment, "PATH": path}, program=program, directory=where)
    assert ended.returncode == 0, ended.output
    warned = [line for line in ended.output.splitlines() if "Warning" in line or str(ROOT / "lightning_3d") in line]
    assert not warned
    return ended.output


def _losses(directory: Path) -> list[list[float]]:
    """The logged training losses of each run in a folder."""
    runs = []
    for file in sorted(directory.glob("**/metrics.csv")):
        with file.open() as rows:
            runs.append([float(row["loss"]) for row in csv.DictReader(rows) if row["loss"]])
    return runs


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.values.append(trainer.callback_metrics["loss"].item())


def _one_process(batch_size: int, num_steps: int, clip: float | None = None) -> list[float]:
    """Losses of the plain Trainer on one device, on the batches of a run with one replica."""
    losses = _Losses()
    settings = {**QUIET, "max_steps": num_steps, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = L.Trainer(devices=1, gradient_clip_val=clip, callbacks=[losses], **settings)
    L.seed_everything(1, verbose=False)
    trainer.fit(GPT(), datamodule=StdlibText(batch_size=batch_size))
    return losses.values


def test_gpt_trains_as_in_one_process(tmp_path: Path) -> None:
    output = _run(tmp_path, str(EXAMPLES / "gpt.py"), "--devices=4", "--max_steps=4", "--batch_size=4")
    assert "pipeline 2 x data 1 x tensor 2, ZeRO 1" in output
    assert "def " in output.split("A sample from")[1]
    (losses,) = _losses(tmp_path)
    assert losses == pytest.approx(_one_process(4, 4, clip=1.0), abs=1e-4)


def test_long_sequences(tmp_path: Path) -> None:
    arguments = ["--devices=2", "--length=512", "--max_steps=2"]
    output = _run(tmp_path, str(EXAMPLES / "long_sequences.py"), *arguments)
    assert "pipeline 1 x data 1 x context 2 x tensor 1, ZeRO 3" in output
    assert "scaled_dot_product_attention, first in blocks.0, on slices: all-to-all" in output


@pytest.fixture(scope="module")
def pipelined() -> list[float]:
    """What the first steps of config.yaml and hydra's pp2 lose in one process."""
    return _one_process(32, 2)


def test_hydra(tmp_path: Path, pipelined: list[float]) -> None:
    _run(tmp_path, "-m", "examples.hydra.main", "strategy=pp2", *SHORT)
    assert _losses(tmp_path) == [pytest.approx(pipelined, abs=1e-5)]


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_launched_command_line(launcher: str, tmp_path: Path, pipelined: list[float]) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    slurm = {
        "PATH": str(tmp_path),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "1",
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    arguments = [f"--{argument}" for argument in [*SHORT, f"trainer.default_root_dir={tmp_path}"]]
    environment = slurm if launcher == "slurm" else {"GPUS_PER_NODE": "2"}
    _run(tmp_path, str(EXAMPLES / "launch" / f"{launcher}.sh"), *arguments, program="bash", **environment)
    assert _losses(tmp_path) == [pytest.approx(pipelined, abs=1e-5)]


def test_transformers_fine_tuning_resumes_and_exports(workers: WorkerPools, tmp_path: Path) -> None:
    """The second run, as a user starts it, goes on with the first one."""
    folder, weights = tmp_path / "runs" / "finetune", []
    for max_steps in (1, 2):
        if max_steps == 1:
            workers(2).run(_short, "transformers_finetune", {"max_steps": 1, "output": folder})
        else:
            output = _run(tmp_path, str(EXAMPLES / "transformers_finetune.py"), "--max_steps=2")
            assert "Restored all states" in output
        model, loading = AutoModelForCausalLM.from_pretrained(folder / "exported", output_loading_info=True)
        assert not any(loading.values())
        weights.append(model.state_dict())
    assert all(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])  # the second step trained


def test_notebook(tmp_path: Path) -> None:
    """Its process gets the weights of both stages, as one process trains them, and goes on with others."""
    output = _run(tmp_path, "-c", NOTEBOOK, str(EXAMPLES / "notebook.ipynb"))
    assert "2 ranks = pipeline 2" in output
    assert "2 ranks = pipeline 1 x data 2" in output
    before, after = map(float, output.split()[-2:])
    assert after < before < 0.5


def _short(name: str, arguments: dict[str, Any]) -> str:
    """What an example prints on a rank."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        import_module(f"examples.{name}").main(devices=2, **arguments)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lora", {"max_steps": 8}),
        ("image_classifier", {"max_steps": 8}),
        ("gan", {"max_steps": 100}),
        ("diffusion", {"max_steps": 4}),
        ("from_deepspeed", {"max_steps": 4}),
        ("from_deepspeed", {"max_steps": 4, "pipeline_parallel_size": 2}),
        ("from_fsdp", {"max_steps": 8}),
    ],
)
def test_learns(name: str, arguments: dict[str, int], workers: WorkerPools) -> None:
    printed, of_other = workers(2).run(_short, name, arguments)
    before, after = map(float, printed.split()[-3::2])
    assert after < before, printed
    assert "->" not in of_other


PLANNED = {
    "3d_2x2x2": (2, 2, 2, 1),
    "auto": (1, 8, 1, 1),
    "cp2": (1, 4, 1, 1),
    "ddp": (1, 8, 1, 0),
    "deepspeed": (1, 8, 1, 2),
    "offload": (1, 8, 1, 3),
    "pp2": (2, 4, 1, 1),
    "tp2": (1, 4, 2, 1),
    "zero1": (1, 8, 1, 1),
    "zero2": (1, 8, 1, 2),
    "zero3": (1, 8, 1, 3),
}
"""File of conf/strategy -> ranks along pp, dp and tp, and the stage of ZeRO, of 8 ranks."""


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, ...]:
    main(["plan", *arguments, "--world_size=8", "--json"])
    planned = json.loads(capsys.readouterr().out)
    sizes = (planned[f"{axis}_parallel_size"] for axis in ("pipeline", "data", "tensor"))
    return (*sizes, planned["zero_stage"])


@pytest.mark.parametrize("file", sorted((CONF / "strategy").iterdir()), ids=lambda file: file.stem)
def test_strategies_of_hydra_are_what_they_are_called(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as files of `lightning-3d plan`, which takes all but what DeepSpeed's config makes."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    strategy = instantiate(_composed(f"strategy={file.stem}").strategy)
    assert isinstance(strategy, ThreeDStrategy)
    model, settings = ("tests.models.TinyGPT", "tests.test_plan_ahead.a_batch"), file
    if file.stem == "deepspeed":
        with pytest.raises(SystemExit):
            _plan(capsys, *model, f"--config={file}")
        assert "from_deepspeed has not the settings" in capsys.readouterr().err
        settings = tmp_path / "settings.yaml"
        settings.write_text(OmegaConf.to_yaml(strategy.config.as_mapping()))
    assert _plan(capsys, *model, f"--config={settings}") == PLANNED[file.stem]


def test_a_file_of_lightning_cli_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    classes = ("examples.gpt.GPT", "examples.gpt.StdlibText")
    assert _plan(capsys, *classes, f"--cli_config={CONF / 'cli' / 'pp2.yaml'}") == (2, 4, 1, 1)


def _composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def test_groups_of_hydra_are_composed_and_overridden() -> None:
    for group in ("precision", "trainer", "optimizer"):
        for file in (CONF / group).iterdir():
            config = _composed(f"{group}={file.stem}")
            settings = {**config.trainer, **QUIET, "accelerator": "cpu", "devices": 1, "num_nodes": 1}
            if settings["precision"] != "16-mixed":  # which Lightning has for GPUs alone
                L.Trainer(strategy=instantiate(config.strategy), **settings)
            instantiate(config.optimizer)(nn.Linear(1, 1).parameters())
    changes = ("strategy.zero.stage=3", "+strategy.pipeline.num_microbatches=8", "precision=bf16")
    config = _composed("strategy=pp2", *changes)
    made = instantiate(config.strategy).config
    assert (made.pipeline_parallel_size, made.zero.stage, made.pipeline.num_microbatches) == (2, 3, 8)
    assert config.trainer.precision == "bf16-mixed"
