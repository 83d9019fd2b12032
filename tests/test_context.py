"""Context parallel: what moves between ranks, and what is refused. That it trains as one process, the law tells."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from lightning_3d.context.axis import ContextAxis
from lightning_3d.distributed.mesh import resolve_mesh_shape
from lightning_3d.errors import ConfigError
from tests.models import TinyGPT, TinyMLP, features, loader, tokens
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

NUM_BATCHES = 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_size": 2, "tensor": {"sequence_parallel": True}}, "tensor.sequence_parallel=True"),
        ({"compile": {"enabled": True}}, "compile.enabled=True"),
    ],
)
def test_what_it_does_not_go_with_is_refused_before_processes_start(settings: dict[str, Any], named: str) -> None:
    strategy = ThreeDStrategy(context_parallel_size=2, **settings)
    assert "context 2" in resolve_mesh_shape(strategy.config, 4).text
    with pytest.raises(ConfigError, match=f"context_parallel_size=2 goes with data, .* not yet with {named}"):
        L.Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)


def _counted() -> tuple[Counter[str], list[tuple[int, ...]]]:
    """Collectives of sliced training, and the shapes of activations in its blocks' attention."""
    calls, shapes = Counter[str](), list[tuple[int, ...]]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "exchange"):
            original = getattr(ContextAxis, name)

            def counting(
                self: ContextAxis, tensor: Tensor, *args: Any, name: str = name, original: Any = original
            ) -> Tensor:
                calls[name] += 1
                if name == "all_to_all":
                    shapes.append(tuple(tensor.shape))
                return original(self, tensor, *args)  # type: ignore[no-any-return]

            patch.setattr(ContextAxis, name, counting)
        fitted(Layout(cp=2), TinyGPT, batches=NUM_BATCHES, epochs=1, limit_val_batches=0)
    return calls, shapes


def test_attention_of_equal_heads_takes_four_all_to_alls(workers: WorkerPools) -> None:
    """Those of DeepSpeed-Ulysses: of query, key, value and output, half of each on two ranks, and as many backward."""
    for calls, shapes in workers(2).run(_counted):
        blocks = TinyGPT().blocks
        assert calls["all_to_all"] == 8 * len(blocks) * NUM_BATCHES
        assert calls["reduce_scatter"] == calls["exchange"] == 0
        assert calls["all_gather"] == NUM_BATCHES  # the gradient of what was cut
        assert calls["all_reduce"] == NUM_BATCHES  # the loss
        assert {torch.Size(shape).numel() for shape in shapes} == {8 * 16 * 32 // 2}


def _without_sequence(layout: Layout) -> None:
    fitted(layout, TinyMLP, data=features, batches=1, epochs=1)


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2, cp=2, num_microbatches=2)], ids=str)
def test_a_model_without_a_sequence_is_refused(workers: WorkerPools, layout: Layout) -> None:
    with pytest.raises(WorkerError) as error:
        workers(layout.world_size).run(_without_sequence, layout)
    for rank in range(layout.world_size):
        assert "context_parallel_size=2 found no sequence to cut" in error.value.failures[rank]
        first = "layers.0" if rank < 2 else "layers.3"
        assert f"{first}: ({8 // layout.pp}, " in error.value.failures[rank]


def _moves(layout: Layout) -> tuple[str, ...]:
    trainer, _ = fitted(layout, TinyGPT, batches=1, epochs=1, limit_val_batches=0)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy.plan.findings.slices


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(cp=2), 1),
        (Layout(cp=2, zero=3), 1),
        (Layout(cp=2, tp=2), 2),  # half of the heads
        (Layout(pp=2, cp=2, num_microbatches=2), 2),  # half of the samples
    ],
    ids=str,
)
def test_the_plan_tells_what_moves(workers: WorkerPools, layout: Layout, parts: int) -> None:
    """Each of two ranks sends a quarter of (8, 4, 16, 8) numbers an operand, and of (8, 16, 32) of what comes out."""
    for rank, (attention, output) in enumerate(workers(layout.world_size).run(_moves, layout)):
        block = f"blocks.{2 if layout.pp > 1 and rank >= 2 else 0}"
        place = f"first in {block}, on slices: all-to-all to dim 1 of"
        assert attention == f"scaled_dot_product_attention, {place} 3 of 3 operands; {12 / parts:.1f} KiB"
        assert output == f"linear, {place} 1 of {2 if layout.tp > 1 else 3} operands; {4 / parts:.1f} KiB"


class _ChangesView(TinyGPT):
    """Masks a token of its logits in place, by a view."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = super().forward(inputs)
        logits[:, 0].mul_(0)
        return logits


def _with_changed_view() -> None:
    fitted(Layout(cp=2), _ChangesView, batches=1, epochs=1)


def test_a_view_that_is_a_copy_is_not_changed_unseen(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError) as error:
        workers(2).run(_with_changed_view)
    for rank in range(2):
        assert "a result of __getitem__, of shape (8, 64) and a view of a tensor" in error.value.failures[rank]


class _Hooked(TinyGPT):
    """Halves the gradient of its logits, shrinks that of a hidden state, and has a short batch after a long one."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.blocks[0](self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1])))
        x.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        logits: Tensor = self.head(self.norm(self.blocks[1](x)))
        logits.register_hook(lambda gradient: 0.5 * gradient)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        length = 1 if batch_idx == 1 else 9
        return super().training_step((batch[0][:, :length], batch[1][:, :length]), batch_idx)


def _hooked(layout: Layout | None) -> tuple[float, dict[str, Tensor]]:
    trainer, _ = fitted(layout, _Hooked, batches=3, epochs=1, limit_val_batches=0)
    return float(trainer.callback_metrics["loss_step"]), whole_state(trainer)


def test_hooks_on_slices_see_and_change_gradients(workers: WorkerPools) -> None:
    loss, state = _hooked(None)
    ranks = workers(2).run(_hooked, Layout(cp=2))
    assert [found for found, _ in ranks] == pytest.approx([loss] * 2, abs=1e-5)
    assert_same_state([weights for _, weights in ranks], state)


class _RetainsGradient(TinyGPT):
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = super().forward(inputs)
        logits.retain_grad()
        return logits


class _HasBackwardHook(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, gradients, of_output: None)


def _trained(model: type[TinyGPT]) -> None:
    fitted(Layout(cp=2), model, batches=1, epochs=1, limit_val_batches=0)


@pytest.mark.parametrize(
    ("model", "named"),
    [(_RetainsGradient, "retain_grad of a tensor (8, 16, 64)"), (_HasBackwardHook, "register_full_backward_hook")],
)
def test_gradients_that_would_be_those_of_a_slice_are_refused(
    workers: WorkerPools, model: type[TinyGPT], named: str
) -> None:
    with pytest.raises(WorkerError) as error:
        workers(2).run(_trained, model)
    for rank in range(2):
        assert f"{named}" in error.value.failures[rank]
        assert "or use context_parallel_size=1" in error.value.failures[rank]


class _GivesProducts(nn.Module):
    """Gives a product that its caller changes in place, and one that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        return first, self.second(torch.tanh(first.detach() + x))


class _ChangesProducts(TinyGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=0)
        self.layers = nn.ModuleList(_GivesProducts() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for layer in self.layers:
            first, second = layer(x)
            x = first.mul_(2.0) + second
        logits: Tensor = self.head(self.norm(x))
        return logits


def _state_of_products(layout: Layout | None) -> dict[str, Tensor]:
    return whole_state(fitted(layout, _ChangesProducts, batches=3, epochs=1, limit_val_batches=0)[0])


def test_slices_that_a_block_gives_are_not_kept(workers: WorkerPools) -> None:
    layout = Layout(cp=2, activations={"recompute": "selective"})
    assert_same_state(workers(2).run(_state_of_products, layout), _state_of_products(None))


class _Keeps(TinyGPT):
    """Keeps what a block gives in an attribute, and returns logits of predictions."""

    kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = super().forward(inputs)
        self.kept = logits
        return logits

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def _predicted() -> tuple[type, tuple[int, ...], bool]:
    trainer, module = fitted(Layout(cp=2), _Keeps, batches=1, epochs=1)
    assert isinstance(module, _Keeps)
    kept = module.kept
    assert kept is not None
    (given,) = trainer.predict(module, loader(tokens(8), global_batch_size=8, data_parallel_size=1))  # type: ignore[misc]
    return type(kept), tuple(kept.shape), type(given) is Tensor and given.shape == kept.shape


def _predicted_in_slices() -> list[Tensor]:
    """What a rank is given with slices, and with whole tensors."""
    given: list[Any] = []
    for gathers in (False, True):
        trainer, module = fitted(Layout(cp=2, context={"gather_outputs": gathers}), _Keeps, batches=1, epochs=1)
        batches = loader(tokens(8), global_batch_size=8, data_parallel_size=1)
        given += trainer.predict(module, batches) or []
    return given


def test_predictions_may_stay_slices(workers: WorkerPools) -> None:
    (first, whole), (second, _) = workers(2).run(_predicted_in_slices)
    assert type(first) is Tensor
    assert first.shape[1] < whole.shape[1]
    assert torch.equal(torch.cat((first, second), 1), whole)
    strategy = ThreeDStrategy(context_parallel_size=2, pipeline_parallel_size=2, context={"gather_outputs": False})
    with pytest.raises(ConfigError, match=r"context\.gather_outputs=False can't be had with pipeline_parallel_size=2"):
        L.Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)


def test_what_a_step_gives_and_keeps_is_whole(workers: WorkerPools) -> None:
    for kind, shape, is_whole in workers(2).run(_predicted):
        assert kind is Tensor
        assert shape[:2] == (8, 16)
        assert is_whole
