"""Recomputed blocks: the same numbers, state and calls as without, in every layout; and that they are recomputed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from lightning_3d import ThreeDStrategy
from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.planning.plan import Plan
from lightning_3d.precision.plugin import ThreeDPrecision
from tests.architectures import text as text_data
from tests.hugging_face import CLM, MLM, hf_job, small_job, text_settings
from tests.hugging_face import recomputed as hugging_face_recomputed
from tests.models import Block, Regression, TinyGPT, features
from tests.parity import Job, Layout, ReferenceRun, assert_parity, fitted, run_layout, run_reference, whole_state
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

WIDTH = 16
MODES = ("full", "selective")
FORWARDS: Counter[str] = Counter()
"""Forwards that the blocks of this process ran with gradients, recomputations included."""


class Busy(nn.Module):
    """Does all that a block may do besides computing; (B, WIDTH) -> its output and a dict with another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inner, self.outer = nn.Linear(8 if name == "0" else WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.2)
        self.calls, self.means = 0, [0.0]
        self.register_buffer("average", torch.zeros(WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor, *, scale: float = 1.0, notes: list[Tensor] | None = None) -> dict[str, Any]:
        if self.training and torch.is_grad_enabled():
            FORWARDS[self.name] += 1
        hidden = F.relu(self.inner(x), inplace=True)  # changes the result of a matrix product in place
        hidden = self.dropout(self.norm(hidden)) * (1.0 + random.random())
        self.calls += 1
        self.means[0] = float(self.calls)
        output = self.outer(hidden) * (scale + 0.1 * (self.calls % 3))
        output += self.average.detach().clone()
        if self.training:
            self.average.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        if notes is not None:
            notes.append(output.mean())
        return {"output": output, "rest": (torch.tanh(output), None)}


class BusyNet(Regression):
    """Blocks with all of it, hooked."""

    lr = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Busy(str(i)) for i in range(4))
        self.head = nn.Linear(WIDTH, 4)
        self.hooked: Counter[str] = Counter()
        for block in self.blocks:
            block.norm.register_forward_hook(self._saw)  # type: ignore[union-attr,operator]
            block.outer.register_forward_pre_hook(self._will_see)  # type: ignore[union-attr,operator]
            block.outer.register_forward_hook(lambda module, args, output: output * 1.5)  # type: ignore[union-attr,operator]

    def _saw(self, module: nn.Module, args: Any, output: Tensor) -> None:
        HOOKED["forward"] += self.training and torch.is_grad_enabled()

    def _will_see(self, module: nn.Module, args: Any) -> None:
        HOOKED["before"] += self.training and torch.is_grad_enabled()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            notes: list[Tensor] = []
            given = block(x, scale=0.5 + 0.1 * i, notes=notes)
            x = given["output"] + 0.1 * given["rest"][0] + 0.01 * notes[0]
        output: Tensor = self.head(x)
        return output


HOOKED: Counter[str] = Counter()
"""Calls of the hooks in this process."""


def _saw_any(module: nn.Module, *args: Any) -> None:
    HOOKED[f"{type(module).__name__} {len(args)}"] += module.training and torch.is_grad_enabled()


def _scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * 0.9 if isinstance(module, nn.BatchNorm1d) else None


@contextmanager
def _hooks_of_all_modules() -> Iterator[None]:
    with ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(_saw_any),
            register_module_forward_hook(_saw_any),
            register_module_forward_hook(_scaled),
        ):
            stack.callback(handle.remove)
        yield


def _outcome(layout: Layout) -> tuple[dict[str, float], dict[str, Tensor], list[Any], Counter[str], Counter[str]]:
    """Metrics, state, attributes of the blocks here, calls of hooks, forwards."""
    FORWARDS.clear(), HOOKED.clear()
    with _hooks_of_all_modules():
        trainer, module = fitted(layout, BusyNet, data=features)
    assert isinstance(module, BusyNet)
    assert HOOKED["BatchNorm1d 1"] == HOOKED["BatchNorm1d 2"] > 0
    here = [b for b in module.blocks if not next(b.parameters()).is_meta]
    attributes = [(block.calls, block.means) for block in here]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    forwards = Counter({block.name: FORWARDS[block.name] for block in here})
    return metrics, whole_state(trainer), attributes, HOOKED.copy(), forwards


def _outcomes(layout: Layout) -> list[Any]:
    return [_outcome(replace(layout, activations={"recompute": mode})) for mode in ("none", *MODES)]


BUSY = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "pp2": Layout(pp=2, num_microbatches=2, partition="type:Busy"),
    "pp2-zb": Layout(pp=2, num_microbatches=4, schedule="zbv", stages_per_rank=2, partition="type:Busy"),
}


@pytest.mark.parametrize(
    "layout", some_in_matrix(BUSY.values(), lambda layout: layout.pp > 1 and layout.schedule != "zbv"), ids=BUSY
)
def test_a_block_does_to_the_world_what_it_does_without_recomputation(workers: WorkerPools, layout: Layout) -> None:
    for plain, *recomputed in workers(layout.world_size).run(_outcomes, layout):
        for metrics, state, attributes, hooked, forwards in recomputed:
            assert metrics == plain[0]
            for fqn, value in plain[1].items():
                torch.testing.assert_close(state[fqn], value, rtol=0, atol=0, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
            assert attributes == plain[2]
            assert hooked == plain[3]
            assert plain[4]
            times = 3 if layout.schedule == "zbv" else 2
            assert all(plain[4][name] < forwards[name] <= times * n for name, n in plain[4].items()), (
                forwards,
                plain[4],
            )


# ---- any layout is one process


@cache
def _reference() -> ReferenceRun:
    return run_reference(Job(model=TinyGPT))


def _recomputed(result_plan: Plan) -> list[str]:
    return [block.fqn for block in result_plan.blocks if block.is_recomputed]


LAYOUTS = {
    "dp2-zero2": Layout(dp=2, zero=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "pp2-1f1b": Layout(pp=2),
    "pp2-zbv": Layout(pp=2, num_microbatches=4, schedule="zbv", stages_per_rank=2),
    "tp2": Layout(tp=2),
    "tp2-sequence": Layout(tp=2, sequence_parallel=True),
}
SLOW = {
    "dp2-zero0": Layout(dp=2, zero=0),
    "dp2-zero1": Layout(dp=2, zero=1),
    "pp2-gpipe": Layout(pp=2, schedule="gpipe", num_microbatches=4),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", stages_per_rank=2),
    "pp2-interleaved-zb": Layout(pp=2, schedule="interleaved_zero_bubble", stages_per_rank=2, num_microbatches=4),
    "pp2-dp2-zero3": Layout(pp=2, dp=2, zero=3),
    "pp2-dp2-zero3-zbv": Layout(pp=2, dp=2, zero=3, schedule="zbv", num_microbatches=4, stages_per_rank=2),
    "dp2-tp2-zero3": Layout(dp=2, tp=2, zero=3),
    "pp2-tp2": Layout(pp=2, tp=2, schedule="zbv", num_microbatches=4, stages_per_rank=2),
    "pp2-dp2-tp2": Layout(pp=2, dp=2, tp=2, zero=2),
    "pp2-whole": Layout(pp=2, loss="whole", num_microbatches=4),
}


def _check_parity(workers: WorkerPools, layout: Layout, mode: str) -> None:
    result = run_layout(workers, Job(model=TinyGPT), replace(layout, activations={"recompute": mode}))
    assert_parity(_reference(), result)
    assert _recomputed(result.plan) == [f"blocks.{i}" for i in range(4)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_is_one_process(workers: WorkerPools, layout: Layout, mode: str) -> None:
    _check_parity(workers, layout, mode)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", SLOW.values(), ids=SLOW)
def test_any_further_layout_is_one_process(workers: WorkerPools, layout: Layout, mode: str) -> None:
    _check_parity(workers, layout, mode)


class Dropping(TinyGPT):
    """With dropout in blocks, of attention too, and around them; in chunks of precision it is told."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.3))  # type: ignore[union-attr,operator]
            block.norm2 = nn.Sequential(block.norm2, nn.Dropout(0.2))  # type: ignore[arg-type]


def _dropped(layout: Layout, precision: Any, accumulate: int) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    found = []
    for mode in ("none", *MODES):
        recomputing = replace(layout, activations={**layout.activations, "recompute": mode})
        trainer, _ = fitted(
            recomputing,
            Dropping,
            plugins=[ThreeDPrecision(precision)],
            accumulate_grad_batches=accumulate,
            epochs=1,
        )
        found.append(({k: float(v) for k, v in trainer.callback_metrics.items()}, whole_state(trainer)))
    return found


PRECISIONS: dict[str, tuple[Layout, Any, int]] = {
    "dp2-zero3": (Layout(dp=2, zero=3), "32-true", 2),
    "dp2-bf16": (Layout(dp=2), "bf16-mixed", 1),
    "pp2-zbv": (Layout(pp=2, num_microbatches=4, schedule="zbv", stages_per_rank=2), "bf16-mixed", 1),
    "pp2-fp16": (Layout(pp=2), "16-mixed", 1),
    "tp2": (Layout(tp=2), "32-true", 1),
}
FURTHER_PRECISIONS: dict[str, tuple[Layout, Any, int]] = {"pp2": (Layout(pp=2), "32-true", 2)} | {
    f"{name}-{precision}": (layout, precision, accumulate)
    for name, layout, accumulate in (
        ("one", Layout(), 2),
        ("dp2-zero3", Layout(dp=2, zero=3), 2),
        ("pp2", Layout(pp=2), 2),
        ("pp2-zbv", Layout(pp=2, num_microbatches=4, schedule="zbv", stages_per_rank=2), 1),
        ("tp2", Layout(tp=2), 1),
        ("tp2-sequence", Layout(tp=2, sequence_parallel=True), 1),
    )
    for precision in ("16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true")
}


@pytest.mark.parametrize(
    ("layout", "precision", "accumulate"),
    [
        *(pytest.param(*row, id=name) for name, row in PRECISIONS.items()),
        *(pytest.param(*row, id=name, marks=pytest.mark.matrix) for name, row in FURTHER_PRECISIONS.items()),
    ],
)
def test_masks_and_precisions_are_those_of_the_forward(
    workers: WorkerPools, layout: Layout, precision: Any, accumulate: int
) -> None:
    for plain, *recomputed in workers(layout.world_size).run(_dropped, layout, precision, accumulate):
        for metrics, state in recomputed:
            assert metrics == pytest.approx(plain[0], abs=1e-6)
            for fqn, value in plain[1].items():
                torch.testing.assert_close(state[fqn], value, rtol=0, atol=1e-6, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


PARTITIONED = {
    "tp2": Layout(tp=2),
    "tp2-sequence": Layout(tp=2, sequence_parallel=True),
    "pp2-tp2": Layout(pp=2, tp=2, schedule="zbv", num_microbatches=4, stages_per_rank=2),
    "dp2-tp2-zero3": Layout(dp=2, tp=2, zero=3),
}


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(layout, mode, id=f"{name}-{mode}", marks=() if name == "tp2" else pytest.mark.matrix)
        for name, layout in PARTITIONED.items()
        for mode in MODES
    ],
)
def test_partitioned_inputs_are_gathered_again(workers: WorkerPools, layout: Layout, mode: str) -> None:
    activations = {"recompute": mode, "partition": True}
    assert_parity(_reference(), run_layout(workers, Job(model=TinyGPT), replace(layout, activations=activations)))


class Watched(TinyGPT):
    """Notes which inputs of blocks are still there when all blocks have run."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, inputs = self.tokens(tokens), []
        for block in self.blocks:
            inputs.append(StorageWeakRef(x.untyped_storage()))
            x = block(x)
        if self.training:
            THERE.append([not reference.expired() for reference in inputs])
        logits: Tensor = self.head(self.norm(x))
        return logits


THERE: list[list[bool]] = []


def _inputs_there(partition: bool) -> list[list[bool]]:
    THERE.clear()
    fitted(Layout(tp=2, activations={"recompute": "full", "partition": partition}), Watched, batches=3, epochs=1)
    return THERE[-1:]


@pytest.mark.parametrize("partition", [True, False])
def test_slices_are_all_that_is_kept_of_inputs(workers: WorkerPools, partition: bool) -> None:
    for there in workers(2).run(_inputs_there, partition):
        assert there == [[not partition] * 4]


# ---- what blocks do to inputs, and checkpoints of the author's


class InPlace(nn.Module):
    """Changes its input in place, and the result of a matrix product that it returns is changed by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        x.mul_(torch.sigmoid(self.first(x.detach().clone())))
        output: Tensor = self.second(torch.tanh(x))
        return output


class Checkpointing(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def part(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            FORWARDS[f"part {self.use_reentrant}"] += 1
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS[f"block {self.use_reentrant}"] += self.training
        output: Tensor = self.second(checkpoint(self.part, x, use_reentrant=self.use_reentrant))
        return output


class Unusual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([InPlace(), Checkpointing(False), Checkpointing(True), InPlace()])
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
            x *= 1.1
        loss = F.mse_loss(self.head(x), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _unusual(layout: Layout) -> list[tuple[dict[str, Tensor], Counter[str]]]:
    found = []
    for mode in ("none", *MODES):
        FORWARDS.clear()
        trainer, _ = fitted(replace(layout, activations={"recompute": mode}), Unusual, data=features)
        found.append((whole_state(trainer), FORWARDS.copy()))
    return found


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=["one", "pp2"])
def test_changed_inputs_and_checkpoints_inside(workers: WorkerPools, layout: Layout) -> None:
    for plain, *recomputed in workers(layout.world_size).run(_unusual, layout):
        for state, forwards in recomputed:
            for fqn, value in plain[0].items():
                torch.testing.assert_close(state[fqn], value, rtol=0, atol=1e-6, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
            for name, times in plain[1].items():  # the first call finds out
                assert forwards[name] <= times + 4, (name, forwards, plain[1])


# ---- settings


class Quantizing(nn.Module):
    """Moves its codes to what they were nearest to, as `vector_quantize_pytorch` does, past autograd's counting."""

    codes: Tensor

    def __init__(self, num_codes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(num_codes, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            nearest = torch.cdist(x, self.codes).argmin(1)
            with torch.no_grad():
                self.codes.data.mul_(0.5).index_add_(0, nearest, x.detach(), alpha=0.5)
        x = x + torch.softmax(-torch.cdist(x, self.codes), 1) @ self.codes
        output: Tensor = self.second(x)
        return output


class QuantizingRegression(Unusual):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Quantizing(64), Quantizing(2048)])  # of 4 KiB and of 128 KiB


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_change_uncounted_are_those_of_the_forward(workers: WorkerPools, mode: str) -> None:
    run = workers(1).run
    (plain,), (found,) = (run(_state_of_quantizing, Layout(activations={"recompute": m})) for m in ("none", mode))
    for fqn, value in plain.items():
        torch.testing.assert_close(found[fqn], value, rtol=0, atol=1e-6, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


def _state_of_quantizing(layout: Layout) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, QuantizingRegression, data=features)
    return whole_state(trainer)


class Decaying(nn.Linear):
    """Changes its weight in each forward: shrinks or clamps it."""

    def __init__(self, is_clamping: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_clamping = is_clamping

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1) if self.is_clamping else self.weight.mul_(0.9)
        return super().forward(x)


class Smoothing(nn.Module):
    """Its model changes the large table that it reads."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(2048, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.first(x) * self.table.mean(0)
        return output


class SmoothingRegression(Unusual):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Smoothing()])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.blocks[0].table.mul_(0.9)  # type: ignore[union-attr,operator]
        return loss


class DecayingRegression(Unusual):
    def __init__(self, is_clamping: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Tanh(), Decaying(is_clamping))])


def _trains(model: Any, mode: str, blocks: tuple[str, ...]) -> dict[str, Tensor]:
    trainer, _ = fitted(Layout(activations={"recompute": mode, "blocks": blocks}), model, data=features)
    return whole_state(trainer)


@pytest.mark.parametrize("mode", MODES)
def test_what_can_not_be_put_back_is_refused(workers: WorkerPools, mode: str) -> None:
    run, blocks = partial(workers(1).run, _trains), ("blocks.*",)
    clamping = partial(DecayingRegression, True)
    (plain,), (found,) = run(clamping, "none", ()), run(clamping, mode, blocks)
    for fqn, value in plain.items():
        torch.testing.assert_close(found[fqn], value, rtol=0, atol=1e-6)
    with pytest.raises(WorkerError, match=r"blocks\.0 changed a weight of its own of shape \(16, 16\) in place"):
        run(partial(DecayingRegression, False), mode, blocks)
    with pytest.raises(WorkerError, match=r"buffer of shape \(2048, 16\), which its forward left alone, was changed"):
        run(SmoothingRegression, mode, blocks)


class Forces(Block):
    """Takes gradients in its forward, with a graph and without."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.energy = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(at).sin().sum(), at)
        return super().forward(x) - force.detach()


class ForcesGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(Forces() for _ in range(2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=["one", "tp2"])
def test_blocks_that_take_gradients_in_their_forward(workers: WorkerPools, layout: Layout, mode: str) -> None:
    job = Job(model=ForcesGPT)
    assert_parity(run_reference(job), run_layout(workers, job, replace(layout, activations={"recompute": mode})))


class CheckpointingParts(Block):
    """Checkpoints its attention and its MLP, with what tensor parallel may have sharded as arguments."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(32, 4)
        self.checkpoint = partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.checkpoint(lambda x: self.attention(self.norm1(x)), x)
        output: Tensor = x + self.checkpoint(lambda x: self.mlp(self.norm2(x)), x)
        return output


class CheckpointingGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(CheckpointingParts(is_reentrant) for is_reentrant in (False, True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the validation
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, activations={"recompute": "full"}),
        Layout(tp=2, sequence_parallel=True, activations={"recompute": "full"}),
        Layout(tp=2, sequence_parallel=True, activations={"recompute": "selective"}),
        pytest.param(
            Layout(pp=2, tp=2, sequence_parallel=True, activations={"recompute": "full"}), marks=pytest.mark.matrix
        ),
    ],
    ids=lambda layout: f"{layout}{'-slices' * layout.sequence_parallel}-{layout.activations['recompute']}",
)
def test_blocks_that_checkpoint_their_parts_on_shards(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=CheckpointingGPT)
    assert_parity(run_reference(job), run_layout(workers, job, layout))


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"activations.recompute='none'.*'full' or 'selective'"):
        ThreeDStrategy(activations={"every": 2})
    with pytest.raises(ConfigError, match=r"activations.blocks='layers.*' is not allowed"):
        ThreeDStrategy(activations={"recompute": "full", "blocks": "layers.*"})
    with pytest.raises(ConfigError, match=r"activations.partition=True cuts.*'none'"):
        ThreeDStrategy(tensor_parallel_size=2, activations={"partition": True})
    with pytest.raises(ConfigError, match=r"activations.partition=True lets.*tensor_parallel_size=1"):
        ThreeDStrategy(activations={"recompute": "full", "partition": True})
    with pytest.raises(ConfigError, match="no regular expression"):
        ThreeDStrategy(activations={"recompute": "full", "blocks": "type:("})
    with pytest.raises(ConfigError, match=r"activations\.recompute='some'"):
        ThreeDStrategy(activations={"recompute": "some"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": 2}, ["blocks.0", "blocks.2"]),
        ({"blocks": ["blocks.1", "head"]}, ["blocks.1", "head"]),
        ({"blocks": "type:^Block$", "every": 3}, ["blocks.0", "blocks.3"]),
    ],
)
def test_blocks_are_chosen(settings: dict[str, Any], expected: list[str]) -> None:
    config = ActivationsConfig(recompute="full", **settings)
    assert chosen_blocks(find_blocks(TinyGPT()), config) == {*expected}


def test_patterns_that_match_nothing_are_refused() -> None:
    blocks = find_blocks(TinyGPT())
    with pytest.raises(PlanError, match=r"'layers\.\*', which matches no block. The nearest block is 'blocks"):
        chosen_blocks(blocks, ActivationsConfig(recompute="full", blocks=("layers.*",)))
    with pytest.raises(PlanError, match=r"matches the class of no block\. Their classes: Block, Embedding"):
        chosen_blocks(blocks, ActivationsConfig(recompute="full", blocks="type:Layer$"))


# ---- models of transformers


@cache
def _of_transformers(name: str) -> Job:
    text = {**text_settings(width=16, num_heads=2, num_layers=2), "num_key_value_heads": 1}
    if name == "llama":
        return hf_job("LlamaConfig", CLM, **text)
    settings = text_settings(width=16, num_heads=2, num_layers=2)
    return small_job(
        partial(hugging_face_recomputed, "BertConfig", MLM, use_reentrant=name == "bert reentrant", **settings),
        text_data,
    )


@cache
def _reference_of(name: str) -> ReferenceRun:
    return run_reference(_of_transformers(name))


@pytest.mark.parametrize("mode", [pytest.param("full"), pytest.param("selective", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("bert", marks=pytest.mark.matrix), pytest.param("bert reentrant", marks=pytest.mark.matrix)],
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(dp=2, zero=3), id="dp2-zero3"),
        pytest.param(Layout(pp=2), id="pp2", marks=pytest.mark.matrix),
        pytest.param(Layout(tp=2), id="tp2", marks=pytest.mark.matrix),
    ],
)
def test_models_of_transformers(workers: WorkerPools, layout: Layout, name: str, mode: str) -> None:
    """Also with checkpoints of their own (``gradient_checkpointing_enable()``), which take precedence."""
    result = run_layout(workers, _of_transformers(name), replace(layout, activations={"recompute": mode}))
    assert_parity(_reference_of(name), result)
    assert _recomputed(result.plan)
