"""Precisions in every layout: weights of 16 and 64 bits, master weights, scaled losses, and overflows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import ThreeDPrecision, ThreeDStrategy
from lightning_3d.zero.master_weights import MASTER
from tests.models import TinyGPT, reference_loader, tokens
from tests.parity import QUIET, Layout, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

STEPS, NUM_LAYERS = 4, 4
LOGITS = {"fused_loss": "never"}
"""Where rounding is compared: a loss in chunks of rows rounds otherwise than logits of all rows."""
HALVES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
LAYOUTS = [
    Layout(dp=2, zero=3),
    Layout(pp=2, schedule="zbv"),
    Layout(tp=2),
    Layout(dp=2, zero_settings={"offload_optimizer": "cpu", "offload_window": 0.01}),
]


class _Seen(L.Callback):
    """Notes gradient norms, losses and learning rates; multiplies gradients in the backward where it is told to."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.scales: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        self.norms.append(float(trainer.strategy.gradient_norm()))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.precision_plugin, ThreeDPrecision)
        self.scales.append(trainer.precision_plugin.loss_scale)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _fit(
    layout: Layout,
    precision: Any,
    settings: dict[str, Any],
    *,
    model: type[TinyGPT] = TinyGPT,
    steps: int = STEPS,
    callbacks: tuple[L.Callback, ...] = (),
    epochs: int = 1,
    **trainer: Any,
) -> tuple[L.Trainer, _Seen]:
    seen = _Seen()
    runs, _ = fitted(
        replace(layout, precision=settings),
        partial(model, num_layers=NUM_LAYERS, num_warmup_steps=10),
        callbacks=[seen, *callbacks],
        batches=8,
        epochs=epochs,
        max_steps=steps,
        limit_val_batches=0,
        plugins=[ThreeDPrecision(precision)],
        **trainer,
    )
    return runs, seen


def _trained(layout: Layout, precision: Any, settings: dict[str, Any], **how: Any) -> dict[str, Any]:
    trainer, seen = _fit(layout, precision, settings, **how)
    state = trainer.optimizers[0].state
    dtypes = {v.dtype for values in state.values() for v in values.values() if isinstance(v, Tensor) and v.dim()}
    return {
        "weights": whole_state(trainer),
        "norms": seen.norms,
        "scales": seen.scales,
        "rates": seen.rates,
        "state_dtypes": dtypes,
        "masters": sum(v[MASTER].numel() for v in state.values() if MASTER in v),
    }


def _difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    pairs = [(first[name].double(), second[name].double()) for name in first]
    return max(float((one - other).abs().max()) for one, other in pairs if one.numel())


@pytest.fixture(scope="module")
def one_process(workers: WorkerPools) -> dict[str, dict[str, Any]]:
    """The runs of one process, by precision."""
    precisions = ("32-true", "16-true", "bf16-true")
    (results,) = workers(1).run(_all_trained, precisions)
    return dict(zip(precisions, results, strict=True))


def _all_trained(precisions: tuple[str, ...]) -> list[dict[str, Any]]:
    return [_trained(Layout(), precision, {}) for precision in precisions]


CASES = [
    *(("bf16-true", layout) for layout in LAYOUTS),
    ("16-true", Layout(dp=2)),
    ("16-true", Layout(pp=2, dp=2, zero=3, schedule="interleaved")),  # gradients are reduced in fp32 at the end
]


@pytest.mark.parametrize(("precision", "layout"), CASES, ids=str)
def test_layouts_train_as_one_process_to_the_rounding_of_16_bits(
    workers: WorkerPools, one_process: dict[str, dict[str, Any]], layout: Layout, precision: str
) -> None:
    expected, exact = one_process[precision], one_process["32-true"]
    rounding = _difference(expected["weights"], exact["weights"])
    for found in workers(layout.world_size).run(_trained, layout, precision, {}):
        assert _difference(found["weights"], expected["weights"]) <= 2 * rounding  # each rounds on its own
        assert found["scales"] == expected["scales"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2, nan_ok=True)
        assert found["rates"] == expected["rates"]
        assert found["state_dtypes"] == {torch.float32}
        assert all(weight.dtype == expected["weights"][name].dtype for name, weight in found["weights"].items())
        assert bool(found["masters"]) == (precision in HALVES)


def _beside_lightning(precision: Any, settings: dict[str, Any]) -> float:
    """The difference between our weights and those of Lightning's own precision plugin."""
    L.seed_everything(1, verbose=False)
    plain: dict[str, Any] = {"max_steps": STEPS, "limit_val_batches": 0, "enable_checkpointing": False, **QUIET}
    trainer = L.Trainer(precision=precision, **plain)
    model = TinyGPT(num_layers=NUM_LAYERS, num_warmup_steps=10)
    trainer.fit(model, reference_loader(tokens(8 * 8), global_batch_size=8, seed=1))
    ours = _trained(Layout(activations=LOGITS), precision, settings)
    return _difference(ours["weights"], dict(model.state_dict()))


@pytest.mark.parametrize(
    ("precision", "settings"), [("bf16-true", {"updates": "direct"}), ("bf16-mixed", {}), ("64-true", {})]
)
def test_one_process_is_lightnings_own(workers: WorkerPools, precision: str, settings: dict[str, Any]) -> None:
    assert workers(1).run(_beside_lightning, precision, settings) == [0.0]


# -------------------------------------------------------------------------------------------------------- overflows


class _Overflows(L.Callback):
    """Multiplies the gradients of some steps with what is not finite, on one rank or all."""

    def __init__(self, steps: set[int], rank: int | None = None, factor: float = float("inf")) -> None:
        self.steps, self.rank, self.factor = steps, rank, factor

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step in self.steps and self.rank in (None, trainer.global_rank):
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor)


def _overflowing(layout: Layout, rank: int, factor: float) -> dict[str, Any]:
    weights: list[dict[str, Tensor]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            weights.append(whole_state(trainer))

    settings, callbacks = {"initial_scale_power": 8}, (Watch(), _Overflows({1}, rank, factor))
    return {**_trained(layout, "16-mixed", settings, callbacks=callbacks), "by_step": weights}


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("layout", "rank", "factor"),
    [(Layout(dp=2), 1, INF), (Layout(dp=2, zero=3), 0, INF), (Layout(pp=2), 1, NAN), (Layout(tp=2), 1, INF)],
    ids=str,
)
def test_an_overflow_anywhere_skips_the_step_everywhere(
    workers: WorkerPools, layout: Layout, rank: int, factor: float
) -> None:
    for found in workers(2).run(_overflowing, layout, rank, factor):
        assert found["scales"] == [256.0, 128.0, 128.0, 128.0]
        moved = [_difference(one, other) for one, other in zip(found["by_step"], found["by_step"][1:], strict=False)]
        assert moved[0] == 0.0
        assert min(moved[1:]) > 0.0
        assert found["rates"] == pytest.approx([0.002, 0.002, 0.003, 0.004])


def _spent() -> None:
    _fit(Layout(dp=2), "16-mixed", {"initial_scale_power": 0}, callbacks=(_Overflows({1}),))


def test_training_ends_at_the_smallest_scale(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError) as caught:
        workers(2).run(_spent)
    told = str(caught.value)
    assert "--- ranks 0, 1:" in told  # they say the same
    assert "are not finite at the smallest loss scale, 1" in told


# ------------------------------------------------------------------------------------------------------- checkpoints


def _resumed(layout: Layout, precision: str, stop: int | None, other: Layout) -> dict[str, Any]:
    """Train six steps, of which the first and the fifth overflow; stopped and resumed after `stop`."""
    settings = {"initial_scale_power": 8, "loss_scale_window": 2}
    overflows = (_Overflows({0, 4}),)
    how: dict[str, Any] = {"callbacks": overflows, "limit_train_batches": 1, "epochs": -1}
    if stop is None:
        return _trained(layout, precision, settings, steps=6, **how)
    trainer, _ = _fit(layout, precision, settings, steps=stop, **how)
    trainer.save_checkpoint("stopped.ckpt")
    return _trained(other, precision, settings, steps=6, ckpt_path=Path("stopped.ckpt"), **how)


@pytest.mark.parametrize(
    ("other", "precision"),
    [(Layout(dp=2), "16-mixed"), (Layout(dp=2, zero=3, save_distributed_checkpoint=True), "16-true")],
    ids=str,
)
def test_a_run_goes_on_in_the_middle_of_a_window(workers: WorkerPools, other: Layout, precision: str) -> None:
    layout = replace(other, zero=1)
    whole = workers(2).run(_resumed, layout, precision, None, layout)[0]
    assert whole["scales"] == [128.0, 128.0, 256.0, 256.0, 128.0, 128.0]
    stop = 1 if precision == "16-true" else 3
    for found in workers(2).run(_resumed, layout, precision, stop, other):
        assert found["scales"] == whole["scales"][stop:]
        assert _difference(found["weights"], whole["weights"]) <= 1e-5


# ---------------------------------------------------------------------------------------------------- master weights


def _written(zero: dict[str, Any]) -> list[float]:
    """A callback writes to a parameter after the second step."""

    class Write(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.global_step == 2:
                pl_module.norm.weight.data.fill_(3.0)  # type: ignore[union-attr,operator]

    found = _trained(Layout(dp=2, zero_settings=zero), "bf16-true", {}, steps=3, callbacks=(Write(),))
    weights: list[float] = found["weights"]["norm.weight"].tolist()
    return weights


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": "cpu", "offload_window": 0.01}], ids=["here", "offload"])
def test_what_is_written_to_a_parameter_counts(workers: WorkerPools, zero: dict[str, Any]) -> None:
    for weights in workers(2).run(_written, zero):
        assert all(2.9 < weight < 3.1 for weight in weights)


# ------------------------------------------------------------------------------------------------------ kept in fp32


class _Dtypes(L.Callback):
    """Notes the dtypes in which norms and projections of this rank compute in training."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, torch.dtype]] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_pre_hook(lambda module, args: self.seen.add(("norm", module.weight.dtype)))
            if isinstance(module, nn.GELU):
                module.register_forward_pre_hook(lambda module, args: self.seen.add(("mlp", args[0].dtype)))


def _kept(layout: Layout, precision: str) -> dict[str, Any]:
    dtypes = _Dtypes()
    settings = {"keep_fp32": ["blocks.*.norm1", "blocks.*.norm2", "norm", "blocks.1.mlp"]}
    found = _trained(replace(layout, activations=LOGITS), precision, settings, callbacks=(dtypes,))
    return {**found, "dtypes": dtypes.seen}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(dp=2, zero=3), "16-mixed"), (Layout(pp=2), "bf16-true")],
    ids=str,
)
def test_modules_are_kept_in_fp32_in_every_layout(workers: WorkerPools, layout: Layout, precision: str) -> None:
    (expected,) = workers(1).run(_kept, Layout(), precision)
    results = workers(2).run(_kept, layout, precision)
    for found in results:
        for name, weight in found["weights"].items():
            last_digit = torch.finfo(weight.dtype).eps  # which may round to the other side
            torch.testing.assert_close(weight, expected["weights"][name], rtol=last_digit, atol=5e-3)
        norms = {weight.dtype for name, weight in found["weights"].items() if "norm" in name}
        assert norms == {torch.float32}
    half = torch.bfloat16 if precision == "bf16-true" else torch.float16
    assert set().union(*(found["dtypes"] for found in results)) == {
        ("norm", torch.float32),
        ("mlp", torch.float32),
        ("mlp", half),
    }


class WithLBFGS(TinyGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


@pytest.mark.parametrize(
    ("model", "patterns", "message"),
    [
        (TinyGPT, ["blocks.*.nrom"], r"precision\.keep_fp32 has the pattern 'blocks\.\*\.nrom', which matches no"),
        (TinyGPT, ["head"], r"keeps head\.weight in fp32, which is the same parameter as tokens\.weight"),
        (WithLBFGS, [], "LBFGS steps all parameters together, and remembers them"),
    ],
)
def test_what_can_not_be_is_refused(workers: WorkerPools, model: Any, patterns: list[str], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        workers(1).run(partial(_trained, model=model), Layout(), "bf16-true", {"keep_fp32": patterns})
