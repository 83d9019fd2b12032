"""Lightning's own features under every kind of layout: resume, callbacks, precision, evaluation, prediction."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor
from torch.utils.data import Subset

from tests.models import TinyGPT, loader, tokens, training_loader
from tests.parity import QUIET, Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.tables import on_four_ranks, some_in_matrix
from tests.workers import WorkerPools

LAYOUTS = [Layout(dp=2), Layout(pp=2), Layout(tp=2), Layout(pp=2, dp=2, tp=2)]
STEPS, GLOBAL_BATCH = 4, 8


def _loaders(dp: int) -> tuple[Any, Any]:
    samples = tokens((STEPS + 2) * GLOBAL_BATCH)
    train, val = (
        Subset(samples, range(STEPS * GLOBAL_BATCH)),
        Subset(samples, range(STEPS * GLOBAL_BATCH, len(samples))),
    )
    sizes = {"global_batch_size": GLOBAL_BATCH, "data_parallel_size": dp}
    return training_loader(train, **sizes), loader(val, **sizes)


# ---------------------------------------------------------------------------------------------------------- precision


@pytest.fixture(scope="module")
def exact() -> ReferenceRun:
    return run_reference(Job())


@pytest.fixture(scope="module")
def rounded() -> ReferenceRun:
    return run_reference(Job(precision="bf16-mixed"))


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS, on_four_ranks), ids=str)
def test_bf16_mixed_keeps_fp32_master_weights_and_follows_one_process(
    workers: WorkerPools, exact: ReferenceRun, rounded: ReferenceRun, layout: Layout
) -> None:
    reference, result = rounded, run_layout(workers, Job(precision="bf16-mixed"), layout)
    assert all(weight.dtype == torch.float32 for name, weight in result.weights.items() if "accuracy" not in name)
    # One rounding of bf16 is 2^-8; the microbatches and shards round other sums than one process does.
    assert_parity(reference, result, tolerance=2e-2)
    for run in (reference.numbers, *result.numbers):  # fp32 layouts differ by less than 1e-5: see the parity table
        norms = zip(run.gradient_norms, exact.numbers.gradient_norms, strict=True)
        assert max(abs(norm - other) for norm, other in norms) > 5e-5, "bf16 made no difference, so it was not used"


# ------------------------------------------------------------------------------------------------------------- resume


def _fit(layout: Layout, *, max_epochs: int, ckpt_path: str | None, save_as: str | None, distributed: bool) -> Any:
    strategy = layout.strategy()
    strategy = type(strategy)(
        pipeline_parallel_size=layout.pp,
        tensor_parallel_size=layout.tp,
        zero={"stage": layout.zero},
        save_distributed_checkpoint=distributed,
    )
    trainer = L.Trainer(
        **QUIET, devices=layout.world_size, strategy=strategy, max_epochs=max_epochs, enable_checkpointing=False
    )
    L.seed_everything(1, verbose=False)
    model = TinyGPT()
    trainer.fit(model, *_loaders(layout.dp), ckpt_path=ckpt_path)
    if save_as is not None:
        trainer.save_checkpoint(save_as)
    trainer.strategy.config = type(trainer.strategy.config)(save_distributed_checkpoint=False)  # type: ignore[attr-defined]
    trainer.save_checkpoint("final.ckpt")
    weights = torch.load("final.ckpt", weights_only=True)["state_dict"] if trainer.global_rank == 0 else {}
    return weights, trainer.global_step


@pytest.mark.parametrize(
    "distributed", [pytest.param(True, id="folder"), pytest.param(False, id="file", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(pp=2), Layout(dp=2)),
        (Layout(dp=2, zero=3), Layout(tp=2)),
        pytest.param(Layout(pp=2, dp=2, tp=2), Layout(pp=2), marks=pytest.mark.matrix),
        (Layout(tp=2), Layout()),
    ],
    ids=lambda layout: str(layout),
)
def test_resume_under_another_layout_equals_one_uninterrupted_process(
    workers: WorkerPools, tmp_path: Path, before: Layout, after: Layout, distributed: bool
) -> None:
    path = str(tmp_path / "middle.ckpt")
    begin = partial(_fit, before, max_epochs=1, ckpt_path=None, save_as=path, distributed=distributed)
    workers(before.world_size).run(begin)
    assert Path(path).is_dir() == distributed
    resume = partial(_fit, after, max_epochs=2, ckpt_path=path, save_as=None, distributed=distributed)
    weights, global_step = workers(after.world_size).run(resume)[0]
    assert global_step == 2 * STEPS
    reference, _ = workers(1).run(
        partial(_fit, Layout(), max_epochs=2, ckpt_path=None, save_as=None, distributed=False)
    )[0]
    assert weights.keys() == reference.keys()
    for name, expected in reference.items():
        torch.testing.assert_close(weights[name], expected, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------------------------- callbacks


class _Watch(L.Callback):
    """Records what reaches callbacks on this rank."""

    def __init__(self) -> None:
        self.outputs: list[float] = []
        self.hooks: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.hooks.append("after_backward")
        assert any(p.grad is not None for p in pl_module.parameters())

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.hooks.append("before_optimizer_step")


def _fit_with_callbacks(layout: Layout) -> dict[str, Any]:
    watch = _Watch()
    checkpoint = ModelCheckpoint("best", monitor="val_loss", filename="{step}", save_top_k=1)
    stopping = EarlyStopping("val_loss", stopping_threshold=1e9)  # stops after the first validation
    trainer = L.Trainer(
        **{**QUIET, "logger": True},
        devices=layout.world_size,
        strategy=layout.strategy(),
        max_epochs=3,
        callbacks=[watch, checkpoint, stopping, LearningRateMonitor("step")],
        log_every_n_steps=1,
    )
    L.seed_everything(1, verbose=False)
    trainer.fit(TinyGPT(), *_loaders(layout.dp))
    return {
        "outputs": watch.outputs,
        "hooks": watch.hooks,
        "best": checkpoint.best_model_path,
        "score": float(checkpoint.best_model_score),  # type: ignore[arg-type]
        "epochs": trainer.current_epoch,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS, on_four_ranks), ids=str)
def test_callbacks_see_the_same_on_all_ranks_as_in_one_process(workers: WorkerPools, layout: Layout) -> None:
    reference = workers(1).run(_fit_with_callbacks, Layout())[0]
    assert len(reference["outputs"]) == STEPS
    for seen in workers(layout.world_size).run(_fit_with_callbacks, layout):
        assert seen["hooks"] == reference["hooks"]
        assert seen["epochs"] == reference["epochs"] == 1, "EarlyStopping did not stop"
        assert seen["score"] == pytest.approx(reference["score"], abs=1e-5)
        assert Path(seen["best"]).name == Path(reference["best"]).name == f"step={STEPS}.ckpt"
        if layout.dp == 1:  # with data parallel, a rank's own batches are a part of the global ones
            assert seen["outputs"] == pytest.approx(reference["outputs"], abs=1e-5)


# --------------------------------------------------------------------------------------------------------- evaluation


class _Predicting(TinyGPT):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]


def _evaluate(layout: Layout) -> dict[str, Any]:
    trainer = L.Trainer(**QUIET, devices=layout.world_size, strategy=layout.strategy(), enable_checkpointing=False)
    L.seed_everything(1, verbose=False)
    model = _Predicting()
    _, val = _loaders(layout.dp)
    validated = trainer.validate(model, val, verbose=False)
    tested = trainer.test(model, val, verbose=False)
    predicted = trainer.predict(model, val)
    return {"validated": validated, "tested": tested, "predicted": predicted}


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS, on_four_ranks), ids=str)
def test_validate_test_and_predict_without_fit(workers: WorkerPools, layout: Layout) -> None:
    reference = workers(1).run(_evaluate, Layout())[0]
    for rank, seen in enumerate(workers(layout.world_size).run(_evaluate, layout)):
        for kind in ("validated", "tested"):
            assert seen[kind][0] == pytest.approx(reference[kind][0], abs=1e-5)
        dp_rank = rank // layout.tp % layout.dp
        expected = [batch[dp_rank :: layout.dp] for batch in reference["predicted"]]
        for mine, theirs in zip(seen["predicted"], expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
