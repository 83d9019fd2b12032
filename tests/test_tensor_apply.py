"""Tensor-parallel blocks run as one process would: values, gradients, trained weights; and they are really sharded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_3d.checkpoint import (
    full_model_state,
    full_optimizer_state,
    model_state,
    optimizer_state,
)
from lightning_3d.checkpoint.box import full_value
from lightning_3d.errors import PlanError
from lightning_3d.tensor import (
    BlockTensorPlan,
    Verification,
    WeightPlan,
    apply_block,
    block_signature,
    plan_block,
    replicated_plan,
    verify_block,
)
from lightning_3d.tensor.placement import Shard, marked
from tests.checkpoints import restore_folder, restore_full, save_sharded
from tests.collectives import Collectives, planned
from tests.models import ADAM_EPS, Block
from tests.test_tensor_plan import (
    ATTENTION,
    FUSED,
    MEGATRON,
    Caching,
    CustomScale,
    EagerAttention,
    EinsumAttention,
    EinsumExperts,
    Example,
    Experts,
    FlatNorm,
    FusedActivation,
    FusedGrouped,
    FusedLowRank,
    FusedNorm,
    FusedQKV,
    GroupedQuery,
    InPlace,
    LowRank,
    Matrices,
    Mixture,
    gpt,
    llama_eager,
    llama_eager_one_kv_head,
    llama_one_kv_head,
    swin,
    tokens,
)
from tests.workers import WorkerPools

Make = Callable[[], Example]


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def _plain_block(block_class: type[nn.Module]) -> Example:
    return block_class(), (tokens(),), {}


def _make(name: str) -> Example:
    """Examples by name, so that they are made on the ranks."""
    torch.manual_seed(0)
    made: dict[str, Make] = {
        make.__name__: make
        for make in [*MEGATRON, *ATTENTION, swin, llama_one_kv_head, llama_eager, llama_eager_one_kv_head]
    }
    for block_class in (
        Experts,
        EinsumExperts,
        EinsumAttention,
        FusedLowRank,
        FusedNorm,
        Matrices,
        LowRank,
        FlatNorm,
        EagerAttention,
        GroupedQuery,
        InPlace,
        Mixture,
        Caching,
    ):
        made[block_class.__name__] = lambda block_class=block_class: _plain_block(block_class)
    made["one_kv_head"] = lambda: (GroupedQuery(num_kv_heads=1), (tokens(),), {"mask": torch.randn(4, 16, 16)})
    made["bool_mask"] = lambda: (GroupedQuery(), (tokens(), torch.ones(16, 16, dtype=torch.bool).tril()), {})
    made["fused_activation"] = lambda: (FusedActivation(F.gelu), (tokens(),), {})
    made["linear"] = lambda: (nn.Linear(32, 32), (tokens(),), {})
    block, args, kwargs = made[name]()
    return block.eval(), args, kwargs  # without dropout


def _loss(output: Any) -> Tensor:
    """A function of everything that a block returns, with a gradient that differs everywhere."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    assert not any(isinstance(leaf, DTensor) for leaf in leaves), "the caller sees a DTensor"
    return sum((leaf.sin() * (index + 1)).sum() for index, leaf in enumerate(leaves))  # type: ignore[return-value]


def _run(block: nn.Module, example: Example) -> tuple[Tensor, dict[str, Tensor], Collectives, Collectives]:
    """Loss, gradients by name, collectives of the forward, of the backward."""
    _, args, kwargs = example
    tensors = [
        leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in args if isinstance(leaf, Tensor)
    ]
    args = (*tensors, *args[len(tensors) :])  # tensors come first
    with Collectives() as forward:
        loss = _loss(block(*args, **kwargs))
    with Collectives() as backward:
        loss.backward()
    gradients = {f"argument {index}": arg.grad for index, arg in enumerate(tensors) if arg.grad is not None}
    grouped = marked(block)
    for fqn, parameter in block.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            assert gradient.placements == parameter.placements
            gradient = gradient.full_tensor()
            gradient = grouped[fqn].ungrouped(gradient) if fqn in grouped else gradient
        if gradient is not None:
            gradients[fqn] = gradient
    return loss.detach(), gradients, forward, backward


def _is_held_as_planned(block: nn.Module, plan: BlockTensorPlan) -> None:
    for fqn, parameter in block.named_parameters():
        assert isinstance(parameter, DTensor), fqn
        weight = plan.weight(fqn)
        assert parameter.placements == (weight.placement,)
        parts = 1 if weight.shard_dim is None else plan.size
        local = parameter.to_local()
        assert local.numel() * parts == weight.num_elements
        assert local.untyped_storage().nbytes() * parts == weight.num_elements * parameter.element_size()


def _parity(name: str) -> tuple[BlockTensorPlan, Counter[str], Counter[str]]:
    return parity_of(_make(name))


def parity_of(
    example: Example, *, sequence_parallel: bool = False, defers_sums: bool = False, as_planned: bool = True
) -> tuple[BlockTensorPlan, Counter[str], Counter[str]]:
    """Plan a block and run it on the ranks: values and gradients of one process, and the planned collectives.

    Args:
        example: The block and its arguments.
        sequence_parallel: As for `plan_block`.
        defers_sums: Whether it is run so, whatever is planned.
        as_planned: Whether the planned collectives are all that it makes; not so where routing depends on data.

    Returns:
        The plan, and how many collectives of which kind the forward and the backward made.
    """
    size = dist.get_world_size()
    block, args, kwargs = example
    dense = copy.deepcopy(block)
    names = [fqn for fqn, _ in block.named_parameters()]
    trained = [parameter.requires_grad for parameter in block.parameters()]
    plan = plan_block(block, args, kwargs, size=size, sequence_parallel=sequence_parallel)
    as_planned = as_planned and (plan.defers_sums or not defers_sums)
    plan = replace(plan, defers_sums=plan.defers_sums or defers_sums)
    apply_block(block, plan, _mesh(size))
    _is_held_as_planned(block, plan)
    assert [fqn for fqn, _ in block.named_parameters()] == names
    assert [parameter.requires_grad for parameter in block.parameters()] == trained
    expected_loss, expected, _, _ = _run(dense, example)
    loss, gradients, forward, backward = _run(block, example)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-4)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    if as_planned:
        assert forward.sent == planned(plan, is_backward=False)
        assert backward.sent == planned(plan, is_backward=True)
    return plan, forward.counts, backward.counts


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "swin"])
def test_megatrons_plan_is_right(workers: WorkerPools, name: str, size: int) -> None:
    pytest.importorskip("transformers")
    for plan, forward, backward in workers(size).run(_parity, name):
        assert plan.sharded_share > 0.96
        assert forward == {"all-reduce": 2}
        assert backward["all-reduce"] == 2
        assert set(backward) <= {"all-reduce", "all-gather"}  # T5's own position bias: all heads' gradient


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", [make.__name__ for make in FUSED])
def test_fused_weights_are_right(workers: WorkerPools, name: str, size: int) -> None:
    pytest.importorskip("transformers")
    for plan, forward, backward in workers(size).run(_parity, name):
        assert plan.sharded_share > 0.97
        assert forward == {"all-reduce": 2}
        assert backward == {"all-reduce": 2}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", ["llama_eager", "llama_eager_one_kv_head", "llama_one_kv_head", "one_kv_head"])
def test_few_key_value_heads_are_right(workers: WorkerPools, name: str, size: int) -> None:
    pytest.importorskip("transformers")
    for plan, forward, _ in workers(size).run(_parity, name):
        assert plan.sharded_share > 0.77
        assert forward == {"all-reduce": plan.num_all_reduces_forward}


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama_one_kv_head"])
def test_grouped_queries_are_right(workers: WorkerPools, name: str) -> None:
    pytest.importorskip("transformers")
    for plan, forward, backward in workers(2).run(_parity, name):
        assert plan.sharded_share > 0.93
        assert forward == {"all-reduce": 2}
        # Also the norms of queries and keys, or the key and value that the ranks share.
        assert backward["all-reduce"] == (2 if name == "llama" else 4)


@pytest.mark.parametrize(
    ("name", "share", "collectives"),
    [
        ("FusedLowRank", 0.96, {"all-reduce": 1}),
        ("FusedNorm", 0.0, {}),
        ("fused_activation", 0.97, {"all-reduce": 2}),
        ("Experts", 0.97, {"all-reduce": 1}),
        ("EinsumExperts", 0.97, {"all-reduce": 1}),
        ("EinsumAttention", 1.0, {"all-reduce": 1}),
        ("Matrices", 0.99, {"all-reduce": 1}),
        ("LowRank", 0.98, {"all-reduce": 1}),
        ("FlatNorm", 0.97, {"all-reduce": 2}),
        ("EagerAttention", 0.97, {"all-reduce": 1}),
        ("GroupedQuery", 0.98, {"all-reduce": 1, "all-gather": 1}),
        ("one_kv_head", 0.78, {"all-reduce": 1}),
        ("bool_mask", 0.98, {"all-reduce": 1, "all-gather": 1}),
        ("InPlace", 0.99, {"all-reduce": 2}),
        ("Caching", 0.99, {"all-reduce": 1}),
        ("encoder_layer", 0.97, {"all-reduce": 2}),
        ("decoder_layer", 0.97, {"all-reduce": 3}),
        ("cross_attention", 0.97, {"all-reduce": 1}),
        ("attention_weights", 0.97, {"all-reduce": 1, "all-gather": 1}),
        ("average_attention_weights", 0.99, {"all-reduce": 2}),
        ("Mixture", 0.0, {}),
        ("linear", 0.0, {}),
    ],
)
def test_any_block_is_right(workers: WorkerPools, name: str, share: float, collectives: dict[str, int]) -> None:
    for plan, forward, _ in workers(2).run(_parity, name):
        assert forward == collectives
        assert share <= plan.sharded_share < share + 0.03
        assert sum(forward.values()) == plan.num_all_reduces_forward + plan.num_other_collectives_forward


# ------------------------------------------------------------------------------------------------------------- training


class Net(nn.Module):
    """Two blocks between an embedding and a head that stay outside tensor parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block(32, 4) for _ in range(2)])
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(net: nn.Module, batches: Tensor) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=ADAM_EPS)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()


def _train_with_fsdp(dp_replicate: int, dp_shard: int, reshard: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    net = Net()
    dense = copy.deepcopy(net)
    batches = torch.randint(16, (3, 4, 9))
    _train(dense, batches)
    root = init_device_mesh(
        "cpu", (1, dp_replicate, dp_shard, 1, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp")
    )
    plan = plan_block(net.blocks[0], (torch.empty(2, 8, 32, device="meta"),), {}, size=2)
    for block in net.blocks:
        apply_block(block, plan, root["tp"])
    dp_mesh = root["dp_replicate", "dp_shard"] if dp_replicate > 1 else root["dp_shard"]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=dp_mesh, reshard_after_forward=reshard)
    num_local = sum(parameter.to_local().numel() for parameter in net.blocks.parameters())
    dp_rank = dist.get_rank() // 2
    _train(net, batches[:, 2 * dp_rank : 2 * dp_rank + 2])
    pairs = zip(net.parameters(), dense.parameters(), strict=True)
    difference = max(float((sharded.full_tensor() - full).abs().max()) for sharded, full in pairs)
    return difference, num_local / sum(parameter.numel() for parameter in dense.blocks.parameters())


@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "reshard", "share"), [(1, 2, True, 0.26), (1, 2, False, 0.26), (2, 1, False, 0.51)]
)
def test_composes_with_fsdp(
    workers: WorkerPools, dp_replicate: int, dp_shard: int, reshard: bool, share: float
) -> None:
    for difference, held in workers(4).run(_train_with_fsdp, dp_replicate, dp_shard, reshard):
        assert difference < 1e-5
        assert held == pytest.approx(share, abs=0.01)


# ----------------------------------------------------------------------------------------- checkpoints of fused weights


def _fused_net(dp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Blocks with fused weights on 4 ranks: tp 4 / dp, ZeRO over dp; the plain net if `dp` is 4."""
    torch.manual_seed(0)
    net = Net()
    net.blocks = nn.ModuleList([FusedGrouped(), FusedQKV()])
    if dp < 4:
        root = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp_shard", "tp"))
        for block in net.blocks:
            plan = plan_block(block, (torch.empty(2, 8, 32, device="meta"),), {}, size=4 // dp)
            assert plan.weight("qkv.weight").parts is not None
            apply_block(block, plan, root["tp"])
            if dp > 1:
                fully_shard(block, mesh=root["dp_shard"])
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=ADAM_EPS)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    batch = torch.arange(36).view(4, 9) % 16
    F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()


def _saved_and_loaded(writer: int, reader: int) -> list[float]:
    """Differences after loading what another layout wrote, as a folder and as a file, and training one more step."""
    net, optimizer = _fused_net(writer)
    dense, dense_optimizer = _fused_net(4)
    for _ in range(2):
        _step(net, optimizer)
        _step(dense, dense_optimizer)
    state = {"state_dict": model_state(net), "optimizer_states": [optimizer_state(net, optimizer)]}
    save_sharded(Path("folder").absolute(), state, None)
    full = {"state_dict": full_model_state(net, None), "optimizer_states": [full_optimizer_state(net, optimizer, None)]}
    files = [copy.deepcopy(full) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(files)
    for _ in range(2):
        _step(net, optimizer)  # what was saved stays what it was
    _step(dense, dense_optimizer)
    differences = []
    for way in ("folder", "file"):
        other, other_optimizer = _fused_net(reader)
        nn.init.zeros_(other.blocks[0].get_parameter("qkv.weight"))
        if way == "folder":
            restore_folder(Path("folder").absolute(), other, [other_optimizer])
        else:
            assert files[0] is not None
            restore_full(files[0], other, [other_optimizer])
        _step(other, other_optimizer)
        values = model_state(other)
        pairs = [(value, values[fqn]) for fqn, value in dense.state_dict().items()]
        differences.append(max(float((full_value(value) - expected).abs().max()) for expected, value in pairs))
    return differences


@pytest.mark.parametrize(("writer", "reader"), [(1, 4), (4, 1), (2, 1), (1, 2)])
def test_files_hold_fused_weights_in_their_original_order(workers: WorkerPools, writer: int, reader: int) -> None:
    for differences in workers(4).run(_saved_and_loaded, writer, reader):
        assert max(differences) < 1e-5


def _ties() -> None:
    block = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), "norm": nn.LayerNorm(32)}
    )
    block["again"] = block["norm"]

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = block
            self.gain = block["norm"].weight

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["mlp"](self.parts["norm"](x)) * self.gain

    torch.manual_seed(0)
    tied, x = Tied(), tokens()
    for parameter in tied.parameters():
        nn.init.normal_(parameter, std=0.2)
    dense = copy.deepcopy(tied)
    excluded = {tied.parts["norm"].bias}
    plan = plan_block(tied, (x,), {}, size=2, excluded=excluded)
    assert plan.is_sharded
    apply_block(tied, plan, _mesh(2), excluded=excluded)
    assert tied.gain is tied.parts["norm"].weight
    assert tied.parts["norm"].bias in excluded
    assert not isinstance(tied.parts["norm"].bias, DTensor)
    expected_loss, expected, _, _ = _run(dense, (dense, (x,), {}))
    loss, gradients, _, _ = _run(tied, (tied, (x,), {}))
    torch.testing.assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)


def test_ties_and_excluded_parameters(workers: WorkerPools) -> None:
    workers(2).run(_ties)


# -------------------------------------------------------------------------------------------------------------- dropout


class Dropping(nn.Module):
    """Dropout in a replicated region, in a sharded one, and inside attention."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        replicated = F.dropout(x, self.p, self.training)
        hidden = F.dropout(self.up(x).contiguous(), self.p, self.training)
        heads = hidden.unflatten(-1, (4, 16)).transpose(1, 2)
        p = self.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).transpose(1, 2).flatten(2)
        return replicated, hidden, attended, self.down(attended)


DROPPING_PLAN = BlockTensorPlan(
    size=2,
    weights=(
        WeightPlan(fqn="up.weight", shape=(64, 32), role="column", sharding=Shard(0)),
        WeightPlan(fqn="down.weight", shape=(32, 64), role="row", sharding=Shard(1)),
    ),
)


def _dropped() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    block, x = Dropping(0.5), torch.ones(8, 64, 32)
    nn.init.ones_(block.up.weight)
    apply_block(block, DROPPING_PLAN, _mesh(2))
    torch.manual_seed(1)
    replicated, hidden, attended, _ = block(x)
    return replicated.detach(), hidden.detach(), attended.detach(), torch.rand(4)


def test_dropout_differs_between_shards_and_is_alike_elsewhere(workers: WorkerPools) -> None:
    (replicated, hidden, attended, after), (replicated_1, hidden_1, attended_1, after_1) = workers(2).run(_dropped)
    assert torch.equal(replicated, replicated_1)
    assert torch.equal(after, after_1)  # the ranks' generators stay in step
    assert torch.equal(hidden, hidden_1)
    assert torch.equal(attended, attended_1)
    first, second = hidden.chunk(2, -1)
    assert set(hidden.unique().tolist()) == {0.0, 64.0}
    assert (first == 0).float().mean() == pytest.approx(0.5, abs=0.02)
    assert ((first == 0) == (second == 0)).float().mean() == pytest.approx(0.5, abs=0.02)
    masks = [half != 0 for half in attended.chunk(2, -1)]
    assert not torch.equal(*masks)


def _recomputed() -> None:
    torch.manual_seed(0)
    block, x = Dropping(0.5), tokens()
    apply_block(block, DROPPING_PLAN, _mesh(2))
    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(1)
        block.zero_grad()
        _loss(run(x)).backward()
        gradients.append([parameter.grad.to_local() for parameter in block.parameters()])
    for once, again in zip(*gradients, strict=True):
        assert once.abs().sum() > 0
        torch.testing.assert_close(once, again)


def test_recomputation_draws_the_same_masks(workers: WorkerPools) -> None:
    workers(2).run(_recomputed)


def _autocast() -> tuple[float, torch.dtype]:
    block, args, _ = _make("gpt")
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, args, {}, size=2), _mesh(2))
    outputs = []
    for module in (dense, block):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(module(*args))
        outputs[-1].square().mean().backward()
    gradient = block.get_parameter("mlp.0.weight").grad
    assert isinstance(gradient, DTensor)
    difference = gradient.full_tensor() - dense.get_parameter("mlp.0.weight").grad
    return float(difference.abs().max() / gradient.full_tensor().abs().max()), gradient.dtype


def test_runs_under_autocast(workers: WorkerPools) -> None:
    for difference, dtype in workers(2).run(_autocast):
        assert 0 < difference < 0.03
        assert dtype == torch.float32


def _autocast_dtype() -> torch.dtype:
    block, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), tokens()
    apply_block(block, plan_block(block, (x,), {}, size=2), _mesh(2))
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = block(x)
    return output.dtype


def test_row_weights_give_what_autocast_chose(workers: WorkerPools) -> None:
    assert workers(2).run(_autocast_dtype) == [torch.bfloat16] * 2


# --------------------------------------------------------------------------------------------------------------- proof


class Peeking(nn.Module):
    """Computes something else when its activation is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden) * (1.0 if type(hidden) is Tensor else 2.0)


class Scaling(nn.Module):
    """A custom autograd function on a sharded activation and a plain parameter, both saved for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gain = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(CustomScale.apply(self.up(x), self.gain))


def _verified(block: nn.Module, args: tuple[Any, ...]) -> Verification:
    torch.manual_seed(0)
    plan = plan_block(block, args, {}, size=2)
    assert plan.is_sharded
    parameters, state = dict(block.named_parameters()), torch.random.get_rng_state()
    values = {fqn: value.clone() for fqn, value in block.state_dict().items()}
    verification = verify_block(block, plan, args, {}, _mesh(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert block.training
    assert all(parameters[fqn] is parameter for fqn, parameter in block.named_parameters())
    assert all(parameter.grad is None for parameter in block.parameters())
    assert all(torch.equal(values[fqn], value) for fqn, value in block.state_dict().items())
    assert "forward" not in vars(block)
    return verification


def _proofs() -> list[Verification]:
    torch.manual_seed(0)
    x = tokens()
    dropping = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))
    return [
        _verified(Block(32, 4), (x,)),
        _verified(Block(32, 4), (x.to("meta"),)),
        _verified(Block(32, 4).bfloat16(), (x.bfloat16(),)),
        _verified(dropping, (x,)),
        _verified(Scaling(), (x,)),
    ]


def test_right_plans_are_proved(workers: WorkerPools) -> None:
    for verifications in workers(2).run(_proofs):
        assert all(verification.passed for verification in verifications), [str(v) for v in verifications]
        fp32, bf16 = verifications[0], verifications[2]
        assert 0 < fp32.output < 1e-6
        assert 0 < fp32.input_gradient < 1e-6
        assert fp32.tolerance < 1e-3 < bf16.output < bf16.tolerance


def _disproofs() -> list[Verification]:
    torch.manual_seed(0)
    return [_verified(Peeking(), (tokens(),))]


def test_wrong_plans_are_not_proved(workers: WorkerPools) -> None:
    ranks = workers(2).run(_disproofs)
    assert ranks[0] == ranks[1]
    (peeking,) = ranks[0]
    assert not peeking.passed
    assert peeking.output == pytest.approx(1.0)
    assert peeking.error is None
    assert str(peeking).startswith("not proved")


def test_like_blocks_share_a_proof() -> None:
    plan = plan_block(*gpt(), size=2)
    signature = block_signature(Block(32, 4), plan)
    assert hash(signature) == hash(block_signature(Block(32, 4), plan))
    assert signature == block_signature(Block(32, 4), plan)
    frozen = Block(32, 4).requires_grad_(False)
    whole = replicated_plan(Block(32, 4), size=2, reason="asked for")
    others = [block_signature(frozen, plan), block_signature(Block(64, 4), plan), block_signature(Block(32, 4), whole)]
    assert signature not in others


# -------------------------------------------------------------------------------------------------------------- misuse


def _misuse() -> list[str]:
    mesh, messages = _mesh(2), []
    block, (x,), _ = _make("gpt")
    weight = block.get_parameter("mlp.0.weight")
    for plan, target, excluded in (
        (plan_block(block, (x,), {}, size=4), block, set()),
        (plan_block(block, (x,), {}, size=2), Block(64, 4), set()),
        (plan_block(block, (x,), {}, size=2), nn.Linear(32, 32), set()),
        (plan_block(block, (x,), {}, size=2), block, {weight}),
    ):
        with pytest.raises(PlanError) as error:
            apply_block(target, plan, mesh, excluded=excluded)
        messages.append(str(error.value))
    assert block.get_parameter("mlp.0.weight") is weight
    return messages


def test_plans_that_do_not_fit_are_refused(workers: WorkerPools) -> None:
    messages = workers(2).run(_misuse)[0]
    assert messages[0] == "a tensor-parallel plan for 4 ranks can't be applied to a tp axis of 2"
    assert "Block is not the block of this tensor-parallel plan" in messages[1]
    assert "Linear is not the block of this tensor-parallel plan" in messages[2]
    assert "mlp.0.weight is excluded from tensor parallel, but the plan shards it" in messages[3]
