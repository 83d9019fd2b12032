"""Tracing a step and following it by stages, in one process: what is followed, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import TraceError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.model.snapshot import preserved
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.planning.stage_gradients import check_gradients
from lightning_3d.torch_internals.lightning_helpers import random_states_kept
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router, routed
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.tracer import trace_step

WIDTH = 4
CPU = torch.device("cpu")


class Layers(nn.Module):
    """Four linear blocks whose glue is given as a function of the module and its input."""

    def __init__(self, glue: Callable[[Any, Tensor], Any], block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) if block is None else block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.glue = glue
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.glue(self, x)


class Traced:
    """A module traced with an input; layer i goes to stage i."""

    def __init__(self, module: Layers, x: Tensor) -> None:
        self.module, self.x = module, x
        self.blocks = find_blocks(module)
        kept = preserved(module, without_data=self.blocks.values())
        with routed(self.blocks) as router, random_states_kept(), kept:
            self.trace: Trace = trace_step(lambda: module(x), module, router, CPU, calls_all=True)

    def cut(self) -> StageFlow:
        flow = cut(self.trace, {fqn: (i,) for i, fqn in enumerate(self.blocks)}, len(self.blocks))
        check_gradients(flow)
        return flow

    def run(self) -> Any:
        """What the last stage returns, the stages run one after the other."""
        flow, sent = self.cut(), ()
        for stage, fqn in enumerate(self.blocks):
            router = Router(self.blocks, absent=self.blocks.keys() - {fqn})
            with router.installed():
                run = StageRun(router, flow, stage, sent, lambda call: nullcontext())
                sent = run.run(lambda: self.module(self.x))
        with Router(self.blocks).installed():  # a backward may compute blocks of all stages again, in this one process
            return sent


def _input() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def _chain(module: Any, x: Tensor) -> Any:
    for layer in module.layers:
        x = layer(x)
    return x


def assert_followed(module: Layers) -> None:
    """The stages give the output and the gradients of the module."""
    reference = deepcopy(module)
    expected = reference(_input())
    expected.sum().backward()
    actual = Traced(module, _input()).run()
    actual.sum().backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for (fqn, parameter), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=0, msg=f"gradient of {fqn}")


# ------------------------------------------------------------------------------------------- data of another stage


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("item", lambda x: x.sum().item()),
        ("__bool__", lambda x: 1 if x.sum() > 0 else 2),
        ("__int__", lambda x: int(x.sum())),
        ("__float__", lambda x: float(x.sum())),
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.detach().numpy()),
        ("nonzero", lambda x: x.nonzero()),
        ("__getitem__", lambda x: x[x > 0]),
        ("__contains__", lambda x: 3.0 in x),
        ("__format__", lambda x: f"{x.sum():.3f}"),
    ],
)
def test_reading_data_between_blocks_names_call_and_place(name: str, use: Callable[[Tensor], Any]) -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[0](x)
        use(x)
        return _chain(module, x)

    with pytest.raises(TraceError, match=rf"{name} at .*test_tracer.py:\d+ in .* before the call of layers.1") as error:
        Traced(Layers(glue), _input())
    assert "another rank" in str(error.value)


def test_reading_data_after_the_last_block_is_left_to_the_last_stage() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = _chain(module, x)
        return x * 2 if x.sum().item() > 0 else x * 3

    assert_followed(Layers(glue))


def test_changed_control_flow_names_the_call() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[0](x)
        x = x.tanh() if module.kept is None else x.exp()
        for layer in module.layers[1:]:
            x = layer(x)
        return x

    traced = Traced(Layers(glue), _input())
    traced.module.kept = 1
    with pytest.raises(TraceError, match=r"stage 0: .* it called exp, where the trace has tanh \(at .*test_tracer"):
        traced.run()


def test_tensor_kept_from_an_earlier_step_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        return _chain(module, x if module.kept is None else x + module.kept)

    traced, other = Traced(Layers(glue), _input()), Layers(glue)
    traced.module.kept = other.kept = Ghost(traced.trace.tensors[0])
    with pytest.raises(TraceError, match="add got a tensor that a block made in an earlier step"):
        traced.run()
    with pytest.raises(TraceError, match=r"add \(called at .*which the block did not return in this step"):
        Traced(other, _input())


# ------------------------------------------------------------------------------------------------------- shared memory


def test_view_made_before_an_in_place_change_on_a_later_stage_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[0](x)
        first = x[:, :1]
        x += module.layers[1](x)
        return module.layers[3](module.layers[2](x)) + first

    with pytest.raises(TraceError, match=r"add \(called at .*shares memory with one that add_ \(called at .*stages"):
        Traced(Layers(glue), _input()).cut()


def test_in_place_change_through_a_view_on_a_later_stage_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[0](x)
        x[:, 0].add_(module.layers[1](x)[:, 0])
        return module.layers[3](module.layers[2](x))

    with pytest.raises(TraceError, match=r"layers.2 \(called at .*shares memory with one that add_"):
        Traced(Layers(glue), _input()).cut()


class _Two(nn.Module):
    """Changes two arguments in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y.add_(1)
        output: Tensor = self.inner(x)
        return output


def test_call_that_changes_two_views_of_an_earlier_stage_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[1](module.layers[0](x))
        return module.layers[3](module.layers[2](x, x[:, :1]))

    module = Layers(glue)
    module.layers[2] = _Two()
    with pytest.raises(TraceError, match=r"layers.2 \(called at .*in place that shares memory with another one"):
        Traced(module, _input()).cut()


def test_writing_into_a_tensor_of_the_batch_through_a_view_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        rows = torch.zeros(4, *x.shape)
        for i, layer in enumerate(module.layers):
            x = layer(x)
            rows[i].copy_(x)
        return rows.sum(0)

    with pytest.raises(TraceError, match=r"through a view \(at .*test_tracer.py:\d+"):
        Traced(Layers(glue), _input())


# ------------------------------------------------------------------------------------------ what blocks leave behind


class Counting(nn.Module):
    """Counts its calls, and keeps its output and its square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0
        self.history: list[Tensor] = []
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output: Tensor = self.linear(x)
        self.kept = {"output": output, "square": output.square()}
        self.history.append(output.detach())
        return output


@pytest.mark.parametrize("name", ["num_calls", "history"])
def test_other_attributes_of_an_absent_block_are_refused(name: str) -> None:
    def glue(module: Any, x: Tensor) -> Any:
        y = _chain(module, x)
        return y * (1 if getattr(module.layers[1], name) else 2)

    with pytest.raises(TraceError, match=rf"Counting.{name} was read outside of the block layers.1"):
        Traced(Layers(glue, Counting), _input()).run()


class Normalised(nn.Module):
    """Ends with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.linear(x))
        return output


def test_buffer_that_a_block_changes_is_not_for_glue() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        return _chain(module, x) + module.layers[0].norm.running_mean

    with pytest.raises(TraceError, match=r"reads the buffer layers.0.norm.running_mean"):
        Traced(Layers(glue, Normalised), _input()).cut()


class Configured(nn.Module):
    """Reads some of its attributes."""

    def __init__(self, layer_idx: int, *, is_wide: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layer_idx, self.is_wide, self.unread = layer_idx, is_wide, object()
        self.widths, self.activation = [1, 2], torch.relu

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.linear(x)) * (self.widths[0] if self.is_wide else self.layer_idx)
        return y


def test_attributes_that_blocks_read_are_known() -> None:
    module = Layers(_chain)
    module.layers = nn.ModuleList(Configured(i, is_wide=i == 3) for i in range(4))
    read = Traced(module, _input()).trace.read_attributes
    assert read["layers.0"].keys() == {".activation", ".is_wide", ".layer_idx"}
    assert read["layers.3"].keys() == {".activation", ".is_wide", ".widths"}
    assert read["layers.0"] == read["layers.1"], "the numbers of the layers do not tell them apart"
    assert read["layers.0"][".is_wide"] != read["layers.3"][".is_wide"]
    assert all(type(layer) is Configured and type(layer.linear) is nn.Linear for layer in module.layers)


def test_trace_leaves_the_module_as_it_was() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        module.kept = x
        module.layers[0].register_forward_hook(lambda *args: None)
        return _chain(module, x) + torch.rand(())

    module = Layers(glue, Counting)
    weights, rng = deepcopy(module.state_dict()), torch.get_rng_state()
    Traced(module, _input())
    assert module.kept is None
    for layer in module.layers:
        assert isinstance(layer, Counting)
        assert (layer.num_calls, layer.history, layer.kept, dict(layer._forward_hooks)) == (0, [], {}, {})
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)


# ----------------------------------------------------------------------------------------- what blocks take and give


@dataclass
class Pair:
    """A dataclass that torch does not know."""

    left: Tensor
    right: list[Tensor]
    scale: float = 2.0


class Opaque:
    """An object that holds a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Returns(nn.Module):
    """A block that wraps its output."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        if isinstance(x, Pair):
            x = x.left * x.scale + x.right[0]
        return self.wrap(self.linear(x))


def test_output_that_is_no_pytree_is_refused() -> None:
    words = r"layers.0 \(called at .*returned a Opaque that holds tensors and is not a pytree"
    with pytest.raises(TraceError, match=words):
        Traced(Layers(_chain, lambda: Returns(Opaque)), _input())


def test_argument_that_hides_tensors_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[0](x)
        return module.layers[1](Opaque(x))

    with pytest.raises(TraceError, match=r"layers.1 \(called at .*got a Opaque that holds tensors of blocks"):
        Traced(Layers(glue, lambda: Returns(lambda x: x)), _input())


# ------------------------------------------------------------------------------------------------ runs on random data


class Chooses(nn.Module):
    """Fails on fake tensors; changes its first argument in place and uses data of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.variance: Tensor
        self.register_buffer("variance", torch.ones(WIDTH))
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        assert rows.tolist() == [0, 2]
        assert not (self.linear(x) / self.variance.sqrt()).isnan().any()
        x.relu_()
        self.chosen = x[rows].sum(-1)
        positive = (x > 0).nonzero()
        return self.linear(x) + len(positive) * 0, x.argmax(-1)


def test_block_that_fails_on_fake_tensors_runs_on_random_ones() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        rows, mask = torch.tensor([0, 2]), x > 0
        auxiliary = torch.zeros(())
        for layer in module.layers:
            x = x * 1
            y, chosen = layer(x, rows, mask)
            auxiliary = auxiliary + layer.chosen.sum() + chosen.sum()
            x = x + y
        return x + auxiliary

    module = Layers(glue, Chooses)
    weights = deepcopy(module.state_dict())
    traced = Traced(module, _input())
    first = traced.trace.block_calls[0]
    y, chosen, attribute = (
        traced.trace.tensors[result.tensor] for result in first.results if result.tensor is not None
    )
    assert (y.shape, y.requires_grad) == ((3, WIDTH), True)
    assert (chosen.shape, chosen.dtype, chosen.requires_grad) == ((3,), torch.int64, False)
    assert (attribute.shape, attribute.requires_grad) == ((2,), False)
    assert list(first.mutated) == [0]
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert_followed(Layers(glue, Chooses))


def test_block_that_always_fails_is_named() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("out of tune")

    with pytest.raises(TraceError, match=r"Block layers.0 at .*random tensors.*\(ValueError: out of tune\)"):
        Traced(Layers(_chain, lambda: Returns(fail)), _input())


# --------------------------------------------------------------------------------------------- calls that torch hides


class Twice(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward, to be told from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


twice: Callable[[Tensor], Tensor] = Twice.apply


def test_hidden_calls_are_as_they_were_outside_of_steps() -> None:
    Traced(Layers(_chain), _input()).run()
    assert "apply" not in vars(_SingleLevelFunction)  # torch 2.13
    assert "__getattribute__" not in vars(type(_SingleLevelFunction))
    x = torch.ones(2, requires_grad=True)
    checkpoint(twice, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_ghost_in_unseen_code_is_refused() -> None:
    traced = Traced(Layers(_chain), _input())
    ghost = Ghost(traced.trace.tensors[0])
    with pytest.raises(TraceError, match="lives on another pipeline stage"):
        torch.add(ghost, 1)


# ----------------------------------------------------------------------------------- gradients taken inside of the step


def _slope(y: Tensor, of: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(y.square().sum(), of, create_graph=True)
    return y * gradient.norm()


def _of_own_tensor(module: Any, x: Tensor) -> Tensor:
    z = x.sum(-1).requires_grad_()
    (gradient,) = torch.autograd.grad(z.exp().sum(), z)
    return _chain(module, x) * gradient.sum()  # type: ignore[no-any-return]


def _of_last_weight(module: Any, x: Tensor) -> Tensor:
    return _slope(_chain(module, x), module.layers[-1].weight)


def _of_last_hidden(module: Any, x: Tensor) -> Tensor:
    y = _chain(module, x)
    return _slope(y.tanh(), y)


@pytest.mark.parametrize("glue", [_of_own_tensor, _of_last_weight, _of_last_hidden], ids=lambda glue: glue.__name__)
def test_gradients_within_one_stage_are_followed(glue: Callable[[Any, Tensor], Any]) -> None:
    assert_followed(Layers(glue))


def _of_inputs(module: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return _slope(_chain(module, x), x)


def _of_first_weight(module: Any, x: Tensor) -> Tensor:
    return _slope(_chain(module, x), module.layers[0].weight)


def _of_tied_weight(module: Any, x: Tensor) -> Tensor:
    return _of_last_weight(module, x)


def _of_hidden(module: Any, x: Tensor) -> Tensor:
    first = module.layers[0](x)
    y = first
    for layer in module.layers[1:]:
        y = layer(y)
    return _slope(y, first)


def _backward(module: Any, x: Tensor) -> Tensor:
    y: Tensor = _chain(module, x)
    y.sum().backward()
    return y


@pytest.mark.parametrize(
    "glue", [_of_inputs, _of_first_weight, _of_tied_weight, _of_hidden, _backward], ids=lambda glue: glue.__name__
)
def test_gradients_through_other_stages_are_refused(glue: Callable[[Any, Tensor], Any]) -> None:
    module = Layers(glue)
    if glue is _of_tied_weight:
        module.layers[0].weight = module.layers[-1].weight
    message = r"differentiates tensors .* On pipeline stage 3 its way also leads through .* stages \[[01], .*_size=1\."
    with pytest.raises(TraceError, match=message):
        Traced(module, _input()).cut()


def test_gradients_after_the_trace_stopped_keep_to_their_stage() -> None:
    def glue(module: Any, x: Tensor) -> Tensor:
        y: Tensor = _chain(module, x)
        if y.sum().item() == float("inf"):
            return y
        z = x.detach().clone().requires_grad_()
        own = _slope(z.exp(), z).sum()
        return y * own.detach() if module.scale.requires_grad else _slope(y, x)

    module = Layers(glue)
    assert_followed(module)
    module.scale.requires_grad_(False)
    with pytest.raises(TraceError, match=r"grad \(called at .* On pipeline stage 3 its way may lead through others"):
        Traced(module, _input().requires_grad_()).run()
