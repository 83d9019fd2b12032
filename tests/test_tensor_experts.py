"""Mixtures of experts: weights picked by index, products per expert, routing that reads data."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from lightning_3d.tensor import BlockTensorPlan, apply_block, plan_block
from lightning_3d.tensor.placement import Parts
from lightning_3d.tensor.rules.aliases import AliasDims, alias_dims
from lightning_3d.tensor.rules.call import Call
from lightning_3d.tensor.rules.function import function_name
from lightning_3d.tensor.rules.partial_sums import is_linear_in
from lightning_3d.torch_internals.pytree import tree_map_only
from tests.test_tensor_apply import parity_of
from tests.test_tensor_plan import Example, tokens
from tests.workers import WorkerPools

NUM_EXPERTS, WIDTH, HIDDEN = 3, 32, 64

Run = Callable[["Stacked", Tensor, Tensor], Tensor]
"""What picks and multiplies: the module, tokens [n, width], scores [n, experts] -> [n, width]."""


class Stacked(nn.Module):
    """Experts held as stacked weights, [experts, out, in]; how they are picked is up to `run`."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 6)
        self.up_bias = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 8)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return x + self.run(self, flat, self.gate(flat).softmax(-1)).view_as(x)


def _expert(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


def by_number(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """Every expert for every token, picked by an int."""
    return sum(  # type: ignore[return-value]
        _expert(x, m.up[e], m.up_bias[e], m.down[e]) * scores[:, e, None] for e in range(NUM_EXPERTS)
    )


def by_number_after_a_look(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """A first expert is read without a gradient."""
    with torch.no_grad():
        scale = F.linear(x, m.up[0]).abs().amax().tanh()
    return by_number(m, x * scale, scores)


def by_iteration(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    experts = zip(m.up, m.up_bias, m.down.unbind(), scores.unbind(1), strict=True)
    return sum(_expert(x, up, bias, down) * score[:, None] for up, bias, down, score in experts)  # type: ignore[return-value]


def by_transpose(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """``x @ w`` with a transpose of what is picked, and what is picked of a transpose."""
    down = m.down.transpose(1, 2)
    return sum(  # type: ignore[return-value]
        F.gelu(x @ m.up[e].t() + m.up_bias[e]) @ down[e] * scores[:, e, None] for e in range(NUM_EXPERTS)
    )


def by_selection(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """The best expert's weights for every token; the weight is the first operand."""
    best = scores.argmax(-1)
    hidden = torch.bmm(m.up[best], x[..., None]).squeeze(-1) + m.up_bias[best]
    y = torch.matmul(m.down.index_select(0, best), F.gelu(hidden).unsqueeze(-1)).squeeze(-1)
    return y * scores.amax(-1)[:, None]


def by_einsum(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    best = scores.argmax(-1)
    hidden = F.gelu(torch.einsum("td,tfd->tf", x, m.up[best]))
    return torch.einsum("tdf,tf->td", m.down[best], hidden) * scores.amax(-1)[:, None]


def by_slices(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """Slices of one expert, one of them in another order."""
    y = torch.zeros_like(x)
    for e, (up, down) in enumerate(zip(m.up.split(1), m.down.chunk(NUM_EXPERTS), strict=True)):
        hidden = F.gelu(torch.bmm(x[None], up.mT))
        y = y + torch.bmm(hidden, down.permute(0, 2, 1))[0] * scores[:, e, None]
    return y


def by_mask(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """Routing that reads data: `nonzero`, `where`, boolean masks, comparisons and numbers."""
    best, y = scores.argmax(-1), torch.zeros_like(x)
    hit = F.one_hot(best, NUM_EXPERTS + 1).sum(0).gt(0).nonzero()
    for row in hit:
        expert = row[0]
        if expert == NUM_EXPERTS:
            continue
        (chosen,) = torch.where(best == expert)
        current = _expert(x[chosen], m.up[expert], m.up_bias[expert.item()], m.down[expert])
        y.index_add_(0, chosen, current * scores[chosen, expert, None])
        y[best == expert] *= 2
    return y


def by_group(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """Rows sorted by expert."""
    best = scores.argmax(-1)
    order = best.argsort()
    ends = best.bincount(minlength=NUM_EXPERTS).cumsum(0).to(torch.int32)
    hidden = F.grouped_mm(x[order], m.up.transpose(-2, -1), offs=ends)
    hidden.add_(m.up_bias[best[order]])
    y = F.grouped_mm(F.gelu(hidden), m.down.transpose(-2, -1), offs=ends)
    return y[order.argsort()] * scores.amax(-1)[:, None]


class Gated(nn.Module):
    """Experts with gate and up in one weight, one after the other or interleaved."""

    def __init__(self, is_interleaved: bool, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.is_interleaved = is_interleaved
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * hidden, WIDTH) / 6)
        self.gate_up_bias = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * hidden))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, hidden) / 8)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best = self.gate(flat).argmax(-1)
        fused = torch.bmm(self.gate_up[best], flat.unsqueeze(-1)).squeeze(-1)
        fused.add_(self.gate_up_bias[best])
        gate, up = (fused[..., ::2], fused[..., 1::2]) if self.is_interleaved else fused.chunk(2, -1)
        return x + torch.bmm(self.down[best], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1).view_as(x)


class TopTwo(nn.Module):
    """Two narrow experts per token, whose rows are added up; `tail` is what becomes of the sum."""

    def __init__(self, tail: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tail = tail
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(NUM_EXPERTS, 32, WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, chosen = self.gate(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        rows = flat.repeat_interleave(2, 0)[order].unsqueeze(-1)
        gate, up = torch.bmm(self.gate_up[chosen.flatten()[order]], rows).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[chosen.flatten()[order]], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        y = (2 * y * scores.flatten()[order].unsqueeze(-1))[order.argsort()]
        return self.tail(x, y.view(len(flat), 2, WIDTH).sum(1).to(x.dtype).reshape(x.shape))


def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def read_twice(x: Tensor, y: Tensor) -> Tensor:
    """First without a gradient; then in ways that are linear and others."""
    with torch.no_grad():
        scale = y.abs().amax().tanh()
    x = x + 0.5 * y * scale
    return F.layer_norm(x + y.tanh(), y.shape[-1:]) * y.detach().amax().tanh().item() + 2 * y


def changed_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = y.flatten(0, 1)
    y += 1
    return x + z.view_as(x)  # a view of what was changed


TAILS = [added, read_twice, changed_in_place]


class Modules(nn.Module):
    """Experts as modules, each with the tokens that are routed to it; `starved`: the last is never chosen, but run."""

    def __init__(self, starved: bool = False) -> None:
        super().__init__()
        self.starved = starved
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, best = self.gate(flat)[:, : NUM_EXPERTS - self.starved].softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            chosen = (best == e).nonzero(as_tuple=True)[0]
            if chosen.numel() == 0 and not self.starved:
                continue
            y[chosen] = expert(flat[chosen]) * scores[chosen, None]
        return x + y.view_as(x)


class Branching(nn.Module):
    """Its control flow depends on sharded values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        factor = 2.0 if hidden.sum() > 0 else -1.0
        rows = hidden.square().sum(-1)
        scale = rows.masked_select(rows > 1).mean() / 100 + len(rows.gt(1).unique()) + hidden[0, 0].tolist()[0]
        return self.down(hidden * factor) * scale / 10


class Scattered(nn.Module):
    """A router whose choice is written into a tensor made like its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, 4 * HIDDEN), nn.Linear(4 * HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).topk(2)
        weights = torch.zeros_like(self.gate(x)).scatter_(-1, chosen, scores.sigmoid())
        return x + self.down(self.up(x).unflatten(-1, (4, -1)).mul(weights.unsqueeze(-1)).flatten(-2).relu())


RUNS: list[Run] = [
    by_number,
    by_iteration,
    by_transpose,
    by_selection,
    by_einsum,
    by_slices,
    by_mask,
    by_group,
]
MODELS = list(product(("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "phimoe"), ("eager", "batched_mm", "grouped_mm")))


class Layer(nn.Module):
    """The sparse part of a transformers model's first layer."""

    def __init__(self, kind: str, experts: str) -> None:
        super().__init__()
        auto = pytest.importorskip("transformers")
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": HIDDEN}
        sizes |= {"num_experts_per_tok": 2, "experts_implementation": experts}
        name = "num_local_experts" if kind in ("mixtral", "gpt_oss", "phimoe") else "num_experts"
        sizes |= {name: NUM_EXPERTS} | ({"moe_intermediate_size": HIDDEN} if kind == "qwen3_moe" else {})
        model = auto.AutoModelForCausalLM.from_config(auto.AutoConfig.for_model(kind, **sizes))
        self.mlp = model.model.layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        output = self.mlp(x)
        return x + (output[0] if isinstance(output, tuple) else output)


def make(name: str) -> Example:
    """Examples by name, so that they are made on the ranks."""
    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {run.__name__: functools.partial(Stacked, run) for run in RUNS}
    made |= {f"{kind} {experts}": functools.partial(Layer, kind, experts) for kind, experts in MODELS}
    made |= {"gated": lambda: Gated(False), "interleaved": lambda: Gated(True)}
    made |= {
        "looked": lambda: Stacked(by_number_after_a_look),
        "modules": Modules,
        "branching": Branching,
        "scattered": Scattered,
        "narrow": lambda: Gated(False, hidden=8),
    }
    made |= {tail.__name__: functools.partial(TopTwo, tail) for tail in TAILS}
    made |= {"starved": lambda: Modules(starved=True)}
    block = made[name]()
    for parameter in block.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return block.eval(), (tokens(WIDTH),), {}


@pytest.mark.parametrize(
    ("call", "dims"),
    [
        (lambda w: w[1], (1, 2)),
        (lambda w: w[-1, ...], (1, 2)),
        (lambda w: w[torch.tensor(1)], (1, 2)),
        (lambda w: w[torch.tensor([1, 0]), :], (None, 1, 2)),
        (lambda w: w[[2, 0]], (None, 1, 2)),
        (lambda w: w[torch.zeros(4, 2, dtype=torch.int64)], (None, None, 1, 2)),
        (lambda w: w[1:2], (None, 1, 2)),
        (lambda w: w.select(0, 1), (1, 2)),
        (lambda w: w.unbind()[0], (1, 2)),
        (lambda w: w.index_select(index=torch.tensor([1]), dim=0), (None, 1, 2)),
        (lambda w: w.split(1)[0], (None, 1, 2)),
        (lambda w: w.narrow(0, 0, 1), (None, 1, 2)),
        (lambda w: w.mT, (0, 2, 1)),
        (lambda w: w.transpose(-2, -1), (0, 2, 1)),
        (lambda w: w.permute(2, 0, 1), (2, 0, 1)),
        (lambda w: w.to(torch.float64), (0, 1, 2)),
        (lambda w: w[:, 1], None),
        (lambda w: w[..., 0], None),
        (lambda w: w[torch.tensor([True, False, True])], None),
        (lambda w: w[None], None),
        (lambda w: w.select(1, 0), None),
        (lambda w: w.unbind(-1)[0], None),
        (lambda w: w * 2, None),
    ],
)
def test_calls_that_make_aliases(call: Callable[[Tensor], Tensor], dims: tuple[int | None, ...] | None) -> None:
    weight = torch.arange(3 * 4 * 5.0).view(3, 4, 5)
    with _CallsWith(weight) as mode:
        alias = call(weight)
    assert alias_dims(mode.seen[0]) == dims
    if dims is not None:
        assert [length for length, dim in zip(alias.shape, dims, strict=True) if dim is not None] == [
            weight.shape[dim] for dim in dims if dim is not None
        ]


def test_slices_of_two_dimensional_weights_are_no_aliases() -> None:
    def dims(name: str, *args: object) -> AliasDims | None:
        return alias_dims(Call(getattr(Tensor, name), name, args, {}))

    assert dims("__getitem__", torch.empty(4, 2), slice(2)) is None
    assert dims("chunk", torch.empty(4, 2), 2) is None
    assert dims("__getitem__", torch.empty(4, 2), 1) == (1,)
    assert dims("__getitem__", torch.empty(4), 1) is None


def counts(plan: BlockTensorPlan) -> tuple[int, int, int]:
    return plan.num_all_reduces_forward, plan.num_all_reduces_backward, plan.num_other_collectives_forward


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("by_number", 3, 1),
        ("by_iteration", 3, 1),
        ("by_transpose", 3, 1),
        ("by_selection", 1, 1),
        ("by_einsum", 1, 1),
        ("by_slices", 3, 3),
        ("by_group", 1, 1),
        ("gated", 1, 1),
        ("interleaved", 1, 1),
        ("modules", 3, 3),
        ("by_mask", 4, 4),  # as if every expert were hit, and the one that marks padding
    ],
)
def test_experts_are_sharded(name: str, forward: int, backward: int, size: int) -> None:
    plan = plan_block(*make(name), size=size)
    assert counts(plan) == (forward, backward, 0), str(plan)
    assert plan.sharded_share > 0.94, str(plan)


@pytest.mark.parametrize(("kind", "experts"), MODELS)
def test_layers_of_transformers_are_sharded(kind: str, experts: str) -> None:
    plan = plan_block(*make(f"{kind} {experts}"), size=2)
    calls = NUM_EXPERTS + (kind != "gpt_oss") if experts == "eager" else 1  # as if every expert were hit
    # What the experts give is summed once it is added up, which sends less; so the scores' gradient is summed, too.
    assert plan.defers_sums == (experts != "eager" and kind != "gpt_oss")
    assert counts(plan) == (calls, calls + plan.defers_sums, 0), str(plan)
    assert plan.sharded_share > 0.96, str(plan)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", [run.__name__ for run in RUNS] + ["gated", "interleaved", "modules", "starved"])
def test_experts_are_right(workers: WorkerPools, name: str, size: int) -> None:
    for plan, forward, backward in workers(size).run(_parity, name):
        assert plan.is_sharded
        assert forward.keys() == {"all-reduce"}
        if name in ("by_mask", "modules"):  # planned as if every expert were hit
            assert 1 <= forward["all-reduce"] <= plan.num_all_reduces_forward
            assert 1 <= backward["all-reduce"] <= plan.num_all_reduces_backward
        else:
            assert forward["all-reduce"] == plan.num_all_reduces_forward
            assert backward == {"all-reduce": plan.num_all_reduces_backward}


@pytest.mark.parametrize(("kind", "experts"), MODELS)
def test_layers_of_transformers_are_right(workers: WorkerPools, kind: str, experts: str) -> None:
    pytest.importorskip("transformers")
    for plan, forward, _ in workers(2).run(_parity, f"{kind} {experts}"):
        assert 1 <= forward["all-reduce"] <= plan.num_all_reduces_forward
        assert forward.keys() == {"all-reduce"}


def test_control_flow_by_sharded_values_is_right(workers: WorkerPools) -> None:
    for plan, forward, _ in workers(2).run(_parity, "branching"):
        assert plan.sharded_share > 0.97
        assert sum(forward.values()) == plan.num_all_reduces_forward + plan.num_other_collectives_forward


def test_weights_that_are_first_read_without_a_gradient_get_theirs(workers: WorkerPools) -> None:
    for plan, _, _ in workers(2).run(_parity, "looked"):
        assert plan.sharded_share > 0.94


def test_a_router_whose_logits_are_changed_in_place_is_replicated(workers: WorkerPools) -> None:
    for plan, forward, _ in workers(2).run(_parity, "scattered"):
        assert plan.weight("gate.weight").reason == "scatter_ changes its output in place and has no sharded form"
        assert plan.weight("up.weight").role == "column"
        assert forward == {"all-reduce": 1}


def test_gate_and_up_in_one_weight_are_parts() -> None:
    plan = plan_block(*make("gated"), size=2)
    halves = Parts(dim=1, sizes=(HIDDEN, HIDDEN), num_ranks=2)
    assert (plan.weight("gate_up").parts, plan.weight("gate_up_bias").parts) == (halves, halves)
    assert plan_block(*make("interleaved"), size=2).weight("gate_up").parts is None


def test_narrow_experts_are_sharded_whatever_they_send(workers: WorkerPools) -> None:
    for plan, _, _ in workers(2).run(_parity, "narrow"):
        assert counts(plan) == (0, 2, 2), str(plan)
        assert plan.sharded_share > 0.9, str(plan)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_narrow_experts_are_reduced_late(workers: WorkerPools, size: int) -> None:
    for plan, forward, backward in workers(size).run(_parity, "added"):
        assert plan.defers_sums
        assert counts(plan) == (1, 2, 0), str(plan)
        assert (plan.weight("gate_up").role, plan.weight("down").role) == ("column", "row")
        reduced = 2 * tokens(WIDTH).numel() * 4 * (size - 1) // size
        sent = [made.num_bytes for made in plan.collectives if not made.is_backward]
        assert sent == [reduced]  # not twice as much
        assert (forward, backward) == ({"all-reduce": 1}, {"all-reduce": 2})


@pytest.mark.parametrize("name", ["read_twice", "by_selection", "by_group", "qwen3_moe grouped_mm", "olmoe batched_mm"])
def test_late_sums_are_right_whoever_reads_them(workers: WorkerPools, name: str) -> None:
    pytest.importorskip("transformers")
    for plan, forward, backward in workers(2).run(_parity, name, False, True):
        assert plan.defers_sums
        assert (forward, backward) == ({"all-reduce": 1}, {"all-reduce": 2})


def test_sums_that_are_changed_in_place_are_not_late(workers: WorkerPools) -> None:
    for plan, _, _ in workers(2).run(_parity, "changed_in_place"):
        assert plan.is_sharded
        assert not plan.defers_sums


@pytest.mark.parametrize(
    ("call", "keeps"),
    [
        (lambda y, w: y * w[:, :1], True),
        (lambda y, w: w * y, True),
        (lambda y, w: 2.0 * y, True),
        (lambda y, w: y.sum(0), True),
        (lambda y, w: y.view(2, 2, 3), True),
        (lambda y, w: y.transpose(0, 1), True),
        (lambda y, w: y[torch.tensor([3, 1, 0, 2])], True),
        (lambda y, w: y.to(torch.float32), True),
        (lambda y, w: y * y, False),
        (lambda y, w: y * w[None], False),
        (lambda y, w: y * w.double(), False),
        (lambda y, w: y + w, False),
        (lambda y, w: y + 1, False),
        (lambda y, w: y.mul_(2), False),
        (lambda y, w: y.sum(), False),
        (lambda y, w: y.sum(0, dtype=torch.float64), False),
        (lambda y, w: y.to(torch.float64), False),
        (lambda y, w: y.view(torch.int32), False),
        (lambda y, w: y[torch.tensor([True, False, True, True])], False),
        (lambda y, w: y[torch.tensor([0, 1])], False),
        (lambda y, w: y.relu(), False),
    ],
)
def test_calls_that_sums_wait_for(call: Callable[[Tensor, Tensor], Tensor], keeps: bool) -> None:
    y, w = torch.randn(4, 3), torch.randn(4, 3)
    with _CallsWith(y) as mode:
        call(y, w)
    assert is_linear_in(y, mode.seen[0]) is keeps


class _CallsWith(TorchFunctionMode):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.seen = tensor, list[Call]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(arg is self.tensor for arg in args):
            self.seen.append(Call(func, function_name(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


SEQUENCE_PARALLEL = ["by_selection", "by_mask", "by_group", "gated", "modules", "mixtral eager", "gpt_oss batched_mm"]


@pytest.mark.parametrize("name", SEQUENCE_PARALLEL)
def test_experts_in_a_sequence_parallel_block_are_right(workers: WorkerPools, name: str) -> None:
    pytest.importorskip("transformers")
    for plan, _, _ in workers(2).run(_parity, name, True):
        assert plan.is_sequence_parallel
        assert plan.sharded_share > 0.94


BY_DATA = ("by_mask", "modules", "starved", "branching")
"""Which experts are run, and how often, depends on data; planning takes it that all are."""


def _parity(name: str, sequence_parallel: bool = False, defers_sums: bool = False) -> Any:
    by_data = name in BY_DATA or name.endswith("eager")
    example = make(name)
    if name == "read_twice":  # of which fp32 leaves 4 digits on some processors
        example = (example[0].double(), *tree_map_only(Tensor, Tensor.double, example[1:]))
    return parity_of(example, sequence_parallel=sequence_parallel, defers_sums=defers_sums, as_planned=not by_data)


def _noisy_router(name: str) -> list[Tensor]:
    """Output and gradients with experts that score alike, but for a rounding error on the last rank."""
    block, args, kwargs = make(name)
    with torch.no_grad():
        block.gate.weight[1:] = block.gate.weight[0]
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, args, kwargs, size=2), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    if dist.get_rank() == 1:
        gate = block.gate.weight.to_local()
        gate.data[1] += torch.finfo(torch.float32).eps * gate.data[1].abs()
    outputs = []
    for module in (dense, block):
        output = module(*args)
        output.sum().backward()
        outputs += [output.detach(), module.gate.weight.grad]
    expected, _, output, gradient = outputs
    torch.testing.assert_close(output, expected)
    return [output, gradient.to_local()]


@pytest.mark.parametrize("name", ["by_mask", "by_group", "by_selection", "modules"])
def test_ranks_route_alike_where_their_scores_differ_by_rounding(workers: WorkerPools, name: str) -> None:
    first, second = workers(2).run(_noisy_router, name, timeout=60)
    for own, other in zip(first, second, strict=True):
        torch.testing.assert_close(own, other)
