"""Dropout on shards: tensor-parallel ranks drop what one process drops, elements, channels and attention alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.config.compile import CompileConfig
from lightning_3d.tensor import BlockCompiler, apply_block, plan_block
from lightning_3d.tensor.placement import marked
from tests.models import TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

P = 0.3


class Heads(nn.Module):
    """Projections of attention, dropout of its result and of an MLP's hidden activation; (B, T, 32) -> (B, T, 32)."""

    num_kv_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = (nn.Linear(32, 8 * self.num_kv_heads) for _ in range(2))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), P, self.training)
        hidden = F.dropout(F.gelu(self.up(self.norm2(x))), P, self.training)
        return x + F.dropout(self.down(hidden), P, self.training)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.attend(q, k, v, P if self.training else 0.0)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


class Masked(Heads):
    """A mask, whose first row lets nothing through, and a scale."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        mask = q.new_ones(q.shape[-2], q.shape[-2]).tril(-1).bool()
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=0.5)


class Grouped(Heads):
    """Fewer key-value heads than query heads."""

    num_kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=True)


class SharedHead(Grouped):
    """One key-value head."""

    num_kv_heads = 1


class ByHand(Heads):
    """Dropout of probabilities, which lie in memory as their product left them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.dropout((q @ k.mT / 8**0.5).softmax(-1), dropout_p) @ v


class Permuted(Heads):
    """Dropout of heads that are views of features, element by element in the order of memory."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.scaled_dot_product_attention(F.dropout(q, dropout_p), k, F.dropout(v, dropout_p))


class Channels(Heads):
    """Drops whole features of a sample."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        v = F.dropout2d(v, dropout_p)
        return F.dropout1d(F.scaled_dot_product_attention(q, k, v).flatten(2).mT, dropout_p).mT.unflatten(-1, (-1, 8))


class OfTorch(nn.Module):
    """``nn.MultiheadAttention``, with or without its weights; (B, T, 32) -> (B, T, 32)."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(32, 4, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return x + output


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=P, batch_first=True)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "causal": Heads,
    "masked": Masked,
    "grouped": Grouped,
    "shared-head": SharedHead,
    "by-hand": ByHand,
    "permuted": Permuted,
    "channels": Channels,
    "multihead-attention": partial(OfTorch, need_weights=False),
    "multihead-attention-weights": partial(OfTorch, need_weights=True),
    "encoder-layer": _layer,
}


# ------------------------------------------------------------------------------------------------------- single blocks


def _difference_from_dense(kind: str, ways: Sequence[tuple[bool, str | None, bool]], dtype: torch.dtype) -> list[float]:
    """Greatest difference of outputs and gradients; by whether a sequence is cut, a compiler, and recomputation."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    dense, inputs = BLOCKS[kind]().to(dtype), torch.randn(4, 16, 32, dtype=dtype)
    differences = []
    for sequence_parallel, backend, recomputes in ways:
        plan = plan_block(dense.eval(), (inputs,), {}, size=2, sequence_parallel=sequence_parallel)
        assert plan.is_sharded
        dense.train()
        compiler = BlockCompiler(mesh, CompileConfig(backend=backend)) if backend else None
        sharded = copy.deepcopy(dense)
        apply_block(sharded, plan, mesh, compiler=compiler)
        wanted, found = _values(dense, inputs, recomputes=False), _values(sharded, inputs, recomputes=recomputes)
        assert torch.equal(wanted.pop(), found.pop()), "generators go on alike"
        largest = max(float(value.abs().max()) for value in wanted)
        pairs = zip(wanted, found, strict=True)
        differences.append(max(float((a.double() - b.double()).abs().max()) for a, b in pairs) / largest)
        assert compiler is None or compiler.num_compiled == 1
    return differences


def _values(block: nn.Module, inputs: Tensor, *, recomputes: bool) -> list[Tensor]:
    """Output, gradients, and where the generator is afterwards."""
    torch.manual_seed(7)
    leaf = inputs.clone().requires_grad_()
    output = checkpoint(block, leaf, use_reentrant=False) if recomputes else block(leaf)
    output.float().sin().sum().backward()
    gradients = [parameter.grad for parameter in block.parameters()]
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for name, parts in marked(block).items():
        position = [fqn for fqn, _ in block.named_parameters()].index(name)
        whole[position] = parts.ungrouped(whole[position])
    block.zero_grad()
    return [output.detach(), leaf.grad, *whole, torch.get_rng_state()]


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_on_shards_drop_what_dense_ones_drop(workers: WorkerPools, kind: str) -> None:
    ways = [
        (along, backend, again) for along in (False, True) for backend in (None, "aot_eager") for again in (False, True)
    ]
    for differences in workers(2).run(_difference_from_dense, kind, ways, torch.float32):
        assert max(differences) < 1e-5, dict(zip(ways, differences, strict=True))


@pytest.mark.parametrize("kind", ["causal", "grouped", "multihead-attention-weights"])
def test_16_bits(workers: WorkerPools, kind: str) -> None:
    for differences in workers(2).run(_difference_from_dense, kind, [(False, None, False)], torch.bfloat16):
        assert max(differences) < 0.05


# ------------------------------------------------------------------------------------------------------------ training


class DroppingGPT(TinyGPT):
    """With the named blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(2))


LAYOUTS = {
    "plain": Layout(tp=2),
    "full": Layout(tp=2, activations={"recompute": "full"}),
    "selective": Layout(tp=2, activations={"recompute": "selective"}),
    "sliced": Layout(tp=2, sequence_parallel=True),
    "sliced-selective": Layout(tp=2, sequence_parallel=True, activations={"recompute": "selective"}),
    "compiled": Layout(tp=2, compile_backend="aot_eager"),
    "compiled-sliced-full": Layout(
        tp=2, compile_backend="aot_eager", sequence_parallel=True, activations={"recompute": "full"}
    ),
    "compiled-selective": Layout(tp=2, compile_backend="aot_eager", activations={"recompute": "selective"}),
    "four": Layout(tp=4),
}

IN_TEST = {("causal", "sliced-selective"), ("causal", "compiled"), ("encoder-layer", "full")}
"""What `make test` trains; blocks by themselves show the rest."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    some_in_matrix(
        [(kind, layout) for kind in ("causal", "multihead-attention-weights", "encoder-layer") for layout in LAYOUTS],
        lambda kind, layout: (kind, layout) not in IN_TEST,
    ),
)
def test_training_drops_what_one_process_drops(workers: WorkerPools, kind: str, layout: str) -> None:
    job = Job(model=partial(DroppingGPT, kind))
    result = run_layout(workers, job, LAYOUTS[layout])
    assert_parity(run_reference(job), result, tolerance=1e-5)
    blocks = [block.tensor for block in result.plan.blocks if block.fqn.startswith("blocks.")]
    assert len(blocks) == 2
    assert all(plan is not None and plan.is_sharded for plan in blocks)


class OfTransformers(TinyGPT):
    """Layers of a BERT; dropout of attention, too."""

    def __init__(self, attention: str) -> None:
        super().__init__(num_layers=2)
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=P,
            attention_probs_dropout_prob=P,
            attn_implementation=attention,
        )
        layers = transformers.BertModel(config).encoder.layer
        self.blocks = nn.ModuleList(map(OfBert, layers))


class OfBert(nn.Module):
    """One layer; (B, T, 32) -> (B, T, 32)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize(("attention"), some_in_matrix(["sdpa", "eager"], lambda attention: attention == "sdpa"))
def test_attention_of_transformers(workers: WorkerPools, attention: str) -> None:
    pytest.importorskip("transformers")
    job = Job(model=partial(OfTransformers, attention))
    result = run_layout(workers, job, Layout(tp=2))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    assert all(block.tensor.is_sharded for block in result.plan.blocks if block.fqn.startswith("blocks."))
