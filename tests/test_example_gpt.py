"""The main job's parts, and a short run of the script itself in 2 x 2 x 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from examples.gpt import GPT, Chunks, History, StdlibText

ROOT = Path(__file__).parent.parent


def test_chunks_are_consecutive_and_targets_one_byte_ahead() -> None:
    chunks = Chunks(bytes(range(10)), context=4)
    assert len(chunks) == 2  # byte 9 would need a target after it
    inputs, targets = chunks[1]
    assert inputs.tolist() == [4, 5, 6, 7]
    assert targets.tolist() == [5, 6, 7, 8]


def test_text_is_split_by_file_and_always_the_same() -> None:
    data = StdlibText(max_bytes=200_000)
    train, validation = data.split_files()
    assert train
    assert validation
    assert not set(train) & set(validation)
    assert (train, validation) == StdlibText(max_bytes=200_000).split_files()
    assert not {"site-packages", "test"} & {part for path in train + validation for part in path.parts}
    data.setup("fit")
    assert len(data.train_set.text) == sum(path.stat().st_size for path in train)


def test_gpt_learns_in_one_process() -> None:
    L.seed_everything(1, verbose=False)
    history = History()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        limit_val_batches=1,
        val_check_interval=30,
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GPT(context=32, width=32, num_layers=2, lr=1e-2, num_warmup_steps=5)
    trainer.fit(model, datamodule=StdlibText(context=32, batch_size=16, max_bytes=200_000))
    assert history.losses[0] == pytest.approx(5.55, abs=0.3)  # ln 256, with a little noise of the initial weights
    assert max(history.losses[-5:]) < 4.0
    assert trainer.callback_metrics["val_loss"] < 4.0


def test_gpt_sees_no_future_and_ties_its_head() -> None:
    torch.manual_seed(0)
    model = GPT(context=8, width=16, num_layers=2)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert model.head.weight is model.tokens.weight


def test_generate_continues_prompt_beyond_context() -> None:
    torch.manual_seed(0)
    model = GPT(context=8, width=16, num_layers=1)
    text = model.generate("def ", 12)
    assert text.startswith("def ")
    assert text == model.generate("def ", 12)
    assert text != model.generate("def ", 12, seed=1)


def test_main_job_runs_in_2x2x2(tmp_path: Path) -> None:
    arguments = ["--steps", "20", "--batch_size", "4", "--val_check_interval", "20", "--output", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "gpt.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]  # it fails where losses differ by over 1e-4
    assert "first 20 losses" in run.stdout
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    assert "def " in run.stdout.split("loaded in one process")[1]
