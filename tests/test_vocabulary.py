"""Vocabulary parallel: embedding, head and cross entropy on shards give what one process gives, and nothing is gathered
that need not be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from examples.gpt import GPT
from lightning_3d import ThreeDStrategy
from lightning_3d.tensor import plan_block, replicated_plan
from lightning_3d.tensor.vocabulary.loss import shard_bounds
from lightning_3d.tensor.vocabulary.sharded_output import ShardedOutput, as_logits, plain
from lightning_3d.tensor.vocabulary.weight_roles import find_vocabulary, with_vocabulary
from lightning_3d.trace.output_uses import ShardedLogits
from tests import architectures
from tests.collectives import Collectives
from tests.hugging_face import hf_job
from tests.models import ADAM_EPS, TinyGPT, tokens, training_loader
from tests.parity import QUIET, Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerPools


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


# ----------------------------------------------------------------------------------------------- logits on shards

Use = Callable[[Tensor], Any]


def _compare(full: Tensor, use: Use, mesh: DeviceMesh, *, collectives: int | None = None) -> None:
    """`use` of logits on shards gives the value and the gradient that it gives of plain ones, equally on all ranks."""
    start, stop = shard_bounds(full.shape[-1], mesh)
    dense = full.clone().requires_grad_()
    local = full[..., start:stop].clone().requires_grad_()
    expected = use(dense)
    with Collectives() as counted:
        result = use(as_logits(local, mesh, full.shape[-1]))
        if result.requires_grad:
            seed = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape).to(expected.dtype)
            expected.backward(seed)
            result.backward(seed)
    if collectives is not None:
        assert sum(counted.counts.values()) == collectives, counted.counts
    assert result.dtype == expected.dtype
    torch.testing.assert_close(plain(result), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if expected.requires_grad:
        assert local.grad is not None
        assert dense.grad is not None
        torch.testing.assert_close(local.grad, dense.grad[..., start:stop], rtol=1e-5, atol=1e-7, equal_nan=True)


def _cross_entropies(num_classes: int) -> None:
    mesh = _mesh()
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, num_classes, generator=generator)
    targets = torch.tensor([0, num_classes - 1, 3, -100, 1, 2])
    weight = torch.rand(num_classes, generator=generator)
    options = itertools.product(("mean", "sum", "none"), (0.0, 0.3), (None, weight), (-100, 2))
    for reduction, smoothing, weights, ignored in options:
        target = targets if ignored == -100 else targets.clamp(min=0)
        keywords = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}

        def use(x: Tensor, target: Tensor = target, weights: Any = weights, keywords: Any = keywords) -> Tensor:
            return F.cross_entropy(x, target, weights, **keywords)

        _compare(logits, use, mesh, collectives=2)
        _compare(logits.double(), lambda x: F.cross_entropy(x, target, **keywords), mesh, collectives=2)  # noqa: B023
    _compare(logits[:2], lambda x: F.cross_entropy(x, torch.tensor([-100, -100])), mesh, collectives=2)  # NaN
    masked = logits.clone()
    masked[:, 2] = float("-inf")
    _compare(masked[:3], lambda x: F.cross_entropy(x, targets[:3]), mesh, collectives=2)
    masked[0] = float("nan")
    _compare(masked[:3], lambda x: F.cross_entropy(x, targets[:3]), mesh, collectives=2)
    _compare(masked[:3], lambda x: F.cross_entropy(x, targets[:3], ignore_index=0), mesh, collectives=2)


def test_cross_entropy_with_every_option(workers: WorkerPools) -> None:
    for size, num_classes in ((2, 8), (2, 7), (4, 10)):
        workers(size).run(_cross_entropies, num_classes)


def _ways_to_the_loss() -> None:
    mesh = _mesh()
    logits = torch.randn(2, 4, 10)
    targets = torch.tensor([[0, 9, 3, -100], [5, 6, 1, 2]])
    flat = targets.flatten()
    ways: list[Use] = [
        lambda x: F.cross_entropy(x.flatten(0, 1), flat),
        lambda x: F.cross_entropy(x.view(-1, 10), flat),
        lambda x: F.cross_entropy(x.reshape(-1, x.size(-1)).float(), flat),
        lambda x: F.cross_entropy(x.transpose(1, 2), targets),
        lambda x: F.cross_entropy(x.permute(0, 2, 1), targets, reduction="none"),
        lambda x: F.cross_entropy(x.transpose(1, 2).contiguous(), targets),
        lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, 10), targets[:, 1:].flatten()),
        lambda x: F.cross_entropy(x[:, 1:].reshape(-1, 10), targets[:, 1:].flatten()),
        lambda x: F.cross_entropy(x[0], targets[0]),
        lambda x: F.cross_entropy(x[:, 0], targets[:, 0]),
        lambda x: F.cross_entropy(x[0, 0], targets[0, 0]),
        lambda x: F.cross_entropy(x.unsqueeze(1).squeeze(1).flatten(0, 1) / 0.7, flat),
        lambda x: F.cross_entropy((torch.tanh(x / 3) * 3).flatten(0, 1), flat),
        lambda x: F.cross_entropy((x * torch.ones(2, 4, 1)).flatten(0, 1), flat),
        lambda x: torch.nn.CrossEntropyLoss()(x.view(8, 10).clone(), flat),
        lambda x: F.cross_entropy(x.flatten(0, 1), flat).mul_(2.0),
        lambda x: F.cross_entropy(x.flatten(0, 1), flat, reduction="none").mul_(flat > 2),
        lambda x: F.cross_entropy(x.flatten(0, 1), flat) + F.cross_entropy(x[0], targets[0]),
    ]
    for way in ways:
        _compare(logits, way, mesh, collectives=4 if way is ways[-1] else 2)


def test_logits_stay_sharded_on_the_way_to_the_loss(workers: WorkerPools) -> None:
    for size in (2, 4):
        workers(size).run(_ways_to_the_loss)


def _other_uses() -> None:
    mesh = _mesh()
    logits = torch.randn(2, 4, 10)
    targets = torch.tensor([[0, 9, 3, -100], [5, 6, 1, 2]])
    flat, mask = targets.flatten(), targets > 2
    probabilities = torch.rand(8, 10).softmax(-1)
    uses: list[Use] = [
        lambda x: x.argmax(-1),
        lambda x: x[..., 3],
        lambda x: x[..., 2:5],
        lambda x: x[mask],
        lambda x: x.log_softmax(-1),
        lambda x: F.nll_loss(x.flatten(0, 1).log_softmax(-1), flat),
        lambda x: F.cross_entropy(x.flatten(0, 1), probabilities),
        lambda x: F.cross_entropy(x, torch.zeros(2, 10, dtype=torch.int64)),  # the second dim as the classes
        lambda x: F.mse_loss(x, torch.zeros(2, 4, 10)),
        lambda x: F.cross_entropy(x[mask], targets[mask]),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.stack(x.unbind(1)).sum(),
        lambda x: x.view(2, 4, 2, 5),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.detach(),
        lambda x: x > 0,
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: x * torch.linspace(0, 1, 10),
        lambda x: x[0] + x,  # broadcast
        lambda x: F.cross_entropy(x.flatten(0, 1), flat) + 0.1 * x.logsumexp(-1).square().mean(),  # z-loss
        lambda x: F.cross_entropy(x.flatten(0, 1), flat) + 0.1 * x.view(-1, 10).square().mean(),
        lambda x: F.cross_entropy(x.to(torch.bfloat16).flatten(0, 1), flat).float() * 0,
    ]
    for use in uses:
        _compare(logits, use, mesh)
    sharded = as_logits(logits[..., slice(*shard_bounds(10, mesh))].contiguous(), mesh, 10)
    assert isinstance(sharded, ShardedOutput)
    assert (sharded.shape, sharded.dtype, sharded.stride()) == (logits.shape, logits.dtype, logits.stride())
    assert sharded.tolist() == logits.tolist()
    assert (sharded.numpy() == logits.numpy()).all()
    assert repr(sharded) == repr(logits)
    assert sharded[0, 0, 0].item() == logits[0, 0, 0].item()
    assert torch.equal(sharded.cpu(), logits)
    with Collectives() as counted:
        assert torch.equal(plain(sharded), logits)
    assert not counted.counts  # gathered once
    for change in (lambda x: x.mul_(2), lambda x: x.__setitem__((0, 0), 1.0), lambda x: x.masked_fill_(x > 0, 0.0)):
        try:
            change(sharded)
        except Exception as error:
            assert "in place" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a change in place passed")


def test_other_uses_see_full_logits(workers: WorkerPools) -> None:
    for size in (2, 4):
        workers(size).run(_other_uses)


def _bad_target() -> str:
    mesh = _mesh()
    sharded = as_logits(torch.randn(3, 4), mesh, 8)
    try:
        F.cross_entropy(sharded, torch.tensor([0, 8, 1]))
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


def test_target_beyond_the_vocabulary_is_refused_on_every_rank(workers: WorkerPools) -> None:
    assert all("out of bounds" in message for message in workers(2).run(_bad_target))


# ------------------------------------------------------------------------------------------------------- training


class Uncommon(TinyGPT):
    """All that vocabulary parallel must see through: padding, a head's bias, shifted and smoothed loss, a z-loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tied=False, **options)
        vocabulary, width = self.tokens.weight.shape
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=3)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, _ = batch
        logits = self(inputs)
        shifted, targets = logits[..., :-1, :].float().contiguous(), inputs[..., 1:]
        weight = torch.linspace(0.5, 1.5, logits.shape[-1], device=self.device)
        flat, keywords = shifted.view(-1, logits.size(-1)), {"ignore_index": 3, "label_smoothing": 0.1}
        # Not the mean: of microbatches, the means over what is counted are not the mean of the batch.
        loss = F.cross_entropy(flat, targets.flatten(), weight, reduction="sum", **keywords) / targets.numel()
        loss = loss + 1e-2 * logits.logsumexp(-1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


ODD = partial(tokens, vocabulary=61)
"""A vocabulary that neither 2 nor 4 divides."""
TIED = Job(model=partial(TinyGPT, vocabulary=61), data=ODD)
UNTIED = Job(model=partial(TinyGPT, vocabulary=61, tied=False), data=ODD)
UNCOMMON = Job(model=partial(Uncommon, vocabulary=61), data=ODD, gradient_clip_val=0.3)
JOBS = {"tied": TIED, "untied": UNTIED, "uncommon": UNCOMMON}

TABLE = [
    ("tied", Layout(tp=2)),
    ("untied", Layout(tp=2)),
    ("uncommon", Layout(tp=2)),
    ("tied", Layout(tp=4)),
    ("tied", Layout(pp=2, tp=2)),
    ("uncommon", Layout(pp=2, tp=2)),
    ("uncommon", Layout(pp=2, tp=2, schedule="zbv")),
    ("tied", Layout(dp=2, tp=2, zero=1)),
    ("untied", Layout(dp=2, tp=2, zero=3)),
]


def _is_in_matrix(name: str, layout: Layout) -> bool:
    return (name, layout) in (("uncommon", Layout(pp=2, tp=2)), ("tied", Layout(dp=2, tp=2, zero=1)))


@cache
def _reference(name: str) -> ReferenceRun:
    return run_reference(JOBS[name])


@pytest.mark.parametrize(
    ("name", "layout"), some_in_matrix(TABLE, _is_in_matrix), ids=[f"{name}-{layout}" for name, layout in TABLE]
)
def test_odd_vocabulary_trains_as_in_one_process(workers: WorkerPools, name: str, layout: Layout) -> None:
    reference, result = _reference(name), run_layout(workers, JOBS[name], layout)
    assert_parity(reference, result, tolerance=1e-5)
    rows, stages = -(-61 // layout.tp), layout.dp * layout.tp
    replicas = layout.dp if layout.zero == 3 else 1  # that share the parameters
    for fqn in ("tokens.weight", "head.weight"):
        held = [run.parameters[fqn] for run in result.held if fqn in run.parameters]
        assert sum(held) * replicas in (layout.dp * 61 * 32, 2 * layout.dp * 61 * 32) or fqn not in reference.parameters
        assert all(num <= -(-rows // replicas) * 32 for num in held), f"{stages} ranks hold {held}"


LLAMA: dict[str, Any] = {
    "vocab_size": architectures.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "use_cache": False,
}


T5: dict[str, Any] = {
    "vocab_size": architectures.VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
BERT = {name: value for name, value in LLAMA.items() if name not in ("head_dim", "use_cache")}


def _example(num_samples: int) -> Any:
    return tokens(num_samples, vocabulary=250, context=64)


class ExampleGPT(GPT):
    """Logs the loss as the harness wants it, and has an eps for it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=ADAM_EPS)


WHOLE = {
    "example": Job(model=ExampleGPT, data=_example, global_batch_size=4, num_val_batches=1),
    "llama": hf_job("LlamaConfig", "LlamaForCausalLM", **LLAMA),
    "llama-tied": hf_job("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True, **LLAMA),
    "bert": hf_job("BertConfig", "BertForMaskedLM", **BERT),  # the table among others, the head behind a transform
    "t5": hf_job("T5Config", "T5ForConditionalGeneration", **T5),  # also tied to a table that is never called
}
SPARE = {"bert": 0.04, "t5": 0.05}
"""The share beyond 1 / size that a rank may hold, where it is more than 0.03: norms, transform, relative positions."""


@pytest.mark.parametrize(
    ("name", "size"), [("example", 2), ("llama", 2), ("llama-tied", 2), ("llama", 4), ("bert", 2), ("t5", 2)]
)
def test_ranks_share_parameters_and_optimizer_state(workers: WorkerPools, name: str, size: int) -> None:
    reference, result = run_reference(WHOLE[name]), run_layout(workers, WHOLE[name], Layout(tp=size))
    assert_parity(reference, result, tolerance=1e-5)
    total = sum(reference.parameters.values())
    for held in result.held:
        share = 1 / size + SPARE.get(name, 0.03)
        assert sum(held.parameters.values()) <= share * total
        assert sum(held.optimizer_state.values()) <= share * 2 * total


def _fit(layout: Layout, *, tied: bool, epochs: int, start: str | None, save_as: str | None, distributed: bool) -> Any:
    trainer = L.Trainer(
        **QUIET,
        devices=layout.world_size,
        strategy=ThreeDStrategy(
            pipeline_parallel_size=layout.pp,
            tensor_parallel_size=layout.tp,
            zero={"stage": layout.zero},
            save_distributed_checkpoint=distributed,
        ),
        max_epochs=epochs,
        enable_checkpointing=False,
    )
    L.seed_everything(1, verbose=False)
    data = training_loader(ODD(24), global_batch_size=8, data_parallel_size=layout.dp)
    trainer.fit(TinyGPT(vocabulary=61, tied=tied), data, ckpt_path=start)
    if save_as is not None:
        trainer.save_checkpoint(save_as)
    trainer.strategy.config = type(trainer.strategy.config)(save_distributed_checkpoint=False)  # type: ignore[attr-defined]
    trainer.save_checkpoint("final.ckpt")
    return torch.load("final.ckpt", weights_only=True)["state_dict"] if trainer.global_rank == 0 else {}


@pytest.mark.parametrize(
    ("before", "after", "tied", "distributed"),
    [
        (Layout(dp=2, tp=2, zero=3), Layout(tp=4), False, True),
        pytest.param(Layout(pp=2, tp=2), Layout(dp=2, tp=2, zero=1), True, True, marks=pytest.mark.matrix),
        (Layout(tp=4), Layout(dp=2, tp=2, zero=3), True, False),
    ],
    ids=str,
)
def test_odd_vocabulary_is_saved_unpadded_and_resumes_under_any_layout(
    workers: WorkerPools, tmp_path: Path, before: Layout, after: Layout, tied: bool, distributed: bool
) -> None:
    path, fit = str(tmp_path / "middle.ckpt"), partial(_fit, tied=tied, distributed=distributed)
    workers(before.world_size).run(partial(fit, before, epochs=1, start=None, save_as=path))
    weights = workers(after.world_size).run(partial(fit, after, epochs=2, start=path, save_as=None))[0]
    expected = workers(1).run(partial(fit, Layout(), epochs=2, start=None, save_as=None))[0]
    assert weights["head.weight"].shape == (61, 32)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------- planning


class Masking(TinyGPT):
    """Changes its logits in place."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        logits[..., 5:7].sub_(10.0)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class HeadInGlue(TinyGPT):
    """Uses the table outside of its block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.tokens.weight)


class FirstRankLooks(TinyGPT):
    """Reads its logits on one rank only."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        if self.global_rank == 0:
            self.seen = logits.argmax(-1).tolist()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


UNUSUAL = {
    "masking": (Masking, {"tokens": "replicate", "head": "replicate"}),
    "head in glue": (partial(HeadInGlue, tied=False), {"tokens": "replicate"}),
    "first rank looks": (FirstRankLooks, {"tokens": "vocabulary", "head": "vocabulary"}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_steps_that_look_at_logits_or_change_them(workers: WorkerPools, name: str) -> None:
    model, roles = UNUSUAL[name]
    job = Job(model=model)
    result = run_layout(workers, job, Layout(tp=2))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    plans = {block.fqn: block.tensor for block in result.plan.blocks}
    assert {fqn: plans[fqn].weight("weight").role for fqn in roles} == roles


def test_by_hand_rules_reach_small_and_large_tables(workers: WorkerPools) -> None:
    rules = (("positions", "vocabulary"), ("tokens", "replicate"))
    result = run_layout(workers, JOBS["untied"], Layout(tp=2, tensor_plan=rules))
    assert_parity(_reference("untied"), result, tolerance=1e-5)
    held = result.held[0].parameters
    assert (held["positions.weight"], held["tokens.weight"], held["head.weight"]) == (8 * 32, 61 * 32, 31 * 32)


IDS = torch.empty(2, 8, dtype=torch.int64, device="meta")
HIDDEN = torch.empty(2, 8, 16, device="meta")


def _role(block: nn.Module, example: Tensor, *, size: int = 2, logits: ShardedLogits | None = None) -> str:
    use = find_vocabulary(block, (example,), {}, size=size, logits=logits)
    rest = plan_block(block, (example,), {}, size=size, excluded=[block.get_parameter(fqn) for fqn in use.fqns])
    return with_vocabulary(rest, use).weight("weight").role


def test_tables_that_can_be_cut() -> None:
    assert _role(nn.Embedding(64, 16), IDS) == "vocabulary"
    assert _role(nn.Embedding(63, 16, padding_idx=0), IDS, size=4) == "vocabulary"
    assert _role(nn.Embedding(8, 16), IDS) == "replicate"  # smaller than the matrices of a block
    assert _role(nn.Embedding(5, 2), IDS, size=4) == "replicate"  # nothing would be left for the last rank
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        assert _role(nn.Embedding(64, 16, **option), IDS) == "replicate"


def test_heads_that_can_be_cut() -> None:
    to_loss, elsewhere = ShardedLogits(num_classes=63, is_read=False), None
    assert _role(nn.Linear(16, 63), HIDDEN, logits=to_loss) == "vocabulary"
    assert _role(nn.Linear(16, 63), HIDDEN, logits=elsewhere) == "replicate"
    assert _role(nn.Linear(16, 8), HIDDEN, logits=ShardedLogits(num_classes=8, is_read=False)) == "replicate"


def test_head_with_bias_counts_its_collectives() -> None:
    block = nn.Linear(16, 64)
    for is_read in (False, True):
        logits = ShardedLogits(num_classes=64, is_read=is_read)
        hidden = HIDDEN.clone().requires_grad_()
        use = find_vocabulary(block, (hidden,), {}, size=2, logits=logits)
        plan = with_vocabulary(replicated_plan(block, size=2, reason="the rest"), use)
        assert [weight.role for weight in plan.weights] == ["vocabulary", "vocabulary"]
        assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (0, 1)
        assert plan.num_other_collectives_forward == is_read
        forward, backward = (2 * 8 * 64 * 4 // 2 if is_read else 0), HIDDEN.numel() * 4
        assert plan.communicated_bytes == forward + backward
        assert "vocabulary" in str(plan)
