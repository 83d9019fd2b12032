"""Canaries: each private symbol behind `torch_internals/` does what its adapter relies on.

An upgrade of torch, Lightning or torchmetrics that changes one fails here first, by the name of the adapter.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import logging
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_3d import StepError, ThreeDStrategy, torch_internals
from lightning_3d.torch_internals import (
    attention,
    autocast,
    autograd,
    backends,
    capture,
    clipping,
    custom_functions,
    data_loops,
    dispatch,
    distributions,
    dtensor,
    dynamo,
    fake_tensors,
    fsdp,
    fsdp_changes,
    fsdp_units,
    joint_graph,
    lightning_helpers,
    modules,
    optimizers,
    pipelining,
    probes,
    process_groups,
    profiling,
    pytree,
    stored_file,
    stored_index,
    tensors,
    versions,
)
from lightning_3d.waits import CountedWait, not_told
from tests.parity import QUIET
from tests.workers import WorkerPools

_CHECKED: set[tuple[str, str]] = set()


def canary(adapter: ModuleType, *symbols: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark the check of some symbols of an adapter."""
    name = adapter.__name__.rpartition(".")[2]
    _CHECKED.update((name, symbol) for symbol in symbols)

    def mark(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def checked(*args: Any, **kwargs: Any) -> None:
            try:
                check(*args, **kwargs)
            except Exception as error:
                raise AssertionError(
                    f"torch_internals/{name}.py: {', '.join(symbols)} changed with torch {torch.__version__}, lightning"
                    f" {L.__version__}, torchmetrics {torchmetrics.__version__}: {error!r}"
                ) from error

        return checked

    return mark


def _public_names(path: Path) -> Iterator[str]:
    module = importlib.import_module(f"{torch_internals.__name__}.{path.stem}")
    yield from getattr(module, "__all__", ())
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))


def test_every_adapter_has_a_canary() -> None:
    folder = Path(torch_internals.__file__).parent
    missing = {
        (path.stem, name)
        for path in folder.glob("[!_]*.py")
        for name in _public_names(path)
        if not name.startswith("_")
        and typing.get_origin(getattr(importlib.import_module(f"{torch_internals.__name__}.{path.stem}"), name)) is None
    }
    assert missing - _CHECKED == set(), "no canary in tests/test_torch_internals.py"


@canary(versions, "warn_of_untested")
def test_other_versions_are_warned_of_on_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.warn_of_untested("2.13.0+cpu")
    for untested, text in (
        (("2.16.0a0+git",), "torch 2.13 to 2.15, but 2.16.0a0"),
        (("2.14.1", "2.7"), "lightning 2.6, but"),
    ):
        with pytest.warns(UserWarning, match=text):
            versions.warn_of_untested(*untested)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    versions.warn_of_untested("2.16.0")


@canary(probes, "check_what_is_seen")
@pytest.mark.parametrize("adapter", ["custom_functions_seen", "checkpoints_noted"])
def test_a_version_that_hides_calls_is_refused(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probes.check_what_is_seen()
    monkeypatch.setattr(probes, adapter, lambda *_: contextlib.nullcontext(()))
    with pytest.raises(StepError, match="in another way than the versions"):
        L.Trainer(strategy=ThreeDStrategy(), logger=False)


def test_an_import_warns_of_other_versions_but_not_of_what_lightning_itself_calls() -> None:
    flatten = "from lightning.pytorch.utilities import _pytree; _pytree._tree_flatten(0)"
    code = f"import torch; torch.__version__ = '2.99.0'; import lightning_3d; {flatten}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("tested with torch 2.13 to 2.15, but 2.99.0 is installed") == 1
    assert "LeafSpec" not in done.stderr


Reads = Callable[[], object]

_ATTEND = torch.ops.aten._scaled_dot_product_efficient_attention.default
DRAWING = [
    (_ATTEND, (None, None, None, None, True)),
    (_ATTEND, (None, None, None, None, True, 0.1)),
    (torch.ops.aten.native_dropout.default, (None, 0.5, True)),
    (torch.ops.aten.mm.default, (None, None)),
    *((torch.ops.aten._cudnn_rnn.default, (None,) * 11 + (p,)) for p in (0.0, 0.1)),
]
DRAWS = [False, True, True, False, False, True]


def _names(*operators: Any) -> list[str]:
    return [dispatch.name_of(operator) for operator in operators]


_OPERATORS = (
    *(torch.ops.aten.mm.default, torch.ops.aten.mm.dtype, torch.ops.higher_order.flex_attention),
    *(dispatch.GROUPED_MM.default, dispatch.SCALED_GROUPED_MM.default),
)

VALUES: list[tuple[ModuleType, tuple[str, ...], Reads, object]] = [
    (tensors, ("contiguous_stride",), lambda: tensors.contiguous_stride(torch.Size((2, 3, 4))), (12, 4, 1)),
    (tensors, ("are_transforms_active",), tensors.are_transforms_active, False),
    (
        tensors,
        ("are_transforms_active",),
        lambda: torch.vmap(lambda x: x + tensors.are_transforms_active())(torch.zeros(1)).item(),
        1.0,
    ),
    (
        tensors,
        ("HALVES", "widened"),
        lambda: [tensors.widened(torch.zeros(1, dtype=d)).dtype for d in (*tensors.HALVES, torch.float64)],
        [torch.float32] * len(tensors.HALVES) + [torch.float64],
    ),
    (tensors, ("typed_storage",), lambda: type(tensors.typed_storage(torch.zeros(2))), torch.TypedStorage),
    (tensors, ("storage_of",), lambda: tensors.storage_of(torch.eye(2).to_sparse()), None),
    (
        modules,
        ("TORCH_ATTRIBUTES",),
        lambda: vars(nn.Linear(2, 2)).keys() - modules.TORCH_ATTRIBUTES,
        {"in_features", "out_features"},
    ),
    (
        dispatch,
        ("HigherOrderOperator", "name_of", "GROUPED_MM", "SCALED_GROUPED_MM"),
        lambda: [isinstance(_OPERATORS[2], dispatch.HigherOrderOperator), *_names(*_OPERATORS)],
        [True, "aten::mm", "aten::mm.dtype", "flex_attention", "aten::_grouped_mm", "aten::_scaled_grouped_mm"],
    ),
    (
        dispatch,
        ("foreach_norm",),
        lambda: [float(n) for n in dispatch.foreach_norm([torch.tensor([3.0, 4.0]), torch.tensor([-2.0])], 2.0)],
        [5.0, 2.0],
    ),
    (
        dispatch,
        ("draws_random_numbers",),
        lambda: [dispatch.draws_random_numbers(*each, {}) for each in DRAWING],
        DRAWS,
    ),
    (dispatch, ("may_write_any",), lambda: dispatch.may_write_any(torch.ops.c10d.allreduce_.default), True),
    (dispatch, ("may_write_any",), lambda: dispatch.may_write_any(torch.ops.aten.add_.Tensor), False),
    (lightning_helpers, ("default_backend",), lambda: lightning_helpers.default_backend(torch.device("cpu")), "gloo"),
]
"""An adapter, its symbols, what is read of them, and what that is to be."""

for row in VALUES:
    canary(row[0], *row[1])


@pytest.mark.parametrize(("adapter", "symbols", "read", "expected"), VALUES)
def test_values(adapter: ModuleType, symbols: tuple[str, ...], read: Reads, expected: object) -> None:
    @canary(adapter, *symbols)
    def check() -> None:
        assert read() == expected

    check()


# ---------------------------------------------------------------------------------------------------- tensors, modules


@canary(tensors, "apart", "storage_id", "storage_of")
def test_storages_and_complex_views_of_real_numbers() -> None:
    real, mode = torch.ones(3, 4), fake_tensors.FakeTensorMode()
    view = torch.view_as_complex(real.view(3, 2, 2))
    with fake_tensors.on_fake_tensors(mode), pytest.raises(RuntimeError, match="last dimension"):
        mode.from_tensor(view)
    assert torch.equal(tensors.apart(view), view)
    assert fake_tensors.FakeTensorMode().from_tensor(tensors.apart(view)).is_complex()
    assert tensors.apart(real[0])._base is real
    with mode:
        first, other = torch.zeros(2), torch.zeros(2)
    ids = [tensors.storage_id(tensor.untyped_storage()) for tensor in (first, first[:1], other)]
    assert ids[0] == ids[1] == tensors.storage_of(first) != ids[2]


@canary(tensors, "base_of", "is_view", "version_of")
def test_views() -> None:
    tensor = torch.zeros(2, requires_grad=True) * 1
    view, before = tensor[:1], tensors.version_of(tensor)
    assert (tensors.base_of(view), tensors.base_of(tensor)) == (tensor, None)
    assert (tensors.is_view(view), tensors.is_view(tensor)) == (True, False)
    view.add_(1)
    assert tensors.version_of(tensor) > before, "an in-place change of a view counts"


@canary(autograd, "reachable_nodes")
def test_nodes_behind_an_output() -> None:
    first, second = (torch.ones(2, requires_grad=True).exp() for _ in range(2))
    output = (first * 2).sum()
    for end in (output, get_gradient_edge(output)):
        nodes = autograd.reachable_nodes([end, None])
        assert (first.grad_fn in nodes, second.grad_fn in nodes) == (True, False)


@canary(clipping, "clipping_replaced")
def test_clipping_is_replaced() -> None:
    weight, other, scaled = nn.Parameter(torch.ones(4)), torch.full((4,), 3.0), list[Any]()
    weight.grad = torch.full((4,), 4.0)

    def replace_norm(norm: clipping.TotalNorm) -> clipping.TotalNorm:
        return lambda tensors, *args: norm([*tensors, other], *args)

    with clipping.clipping_replaced(replace_norm, lambda parameters, *args: scaled.append((parameters, *args[:2]))):
        assert nn.utils.clip_grad_norm_([weight], 5.0) == nn.utils.get_total_norm([weight.grad]) == 10.0
        nn.utils.clip_grad_value_([nn.Parameter(torch.ones(1))], 1.0)  # nothing to clamp
    assert scaled == [([weight], 5.0, torch.tensor(10.0))]
    assert nn.utils.clip_grad_norm_([weight], 1.0) == 8.0


@canary(optimizers, "has_step_hooks", "first_step_post_hook")
def test_hooks_of_optimizers() -> None:
    calls, optimizer = list[str](), torch.optim.SGD([nn.Parameter(torch.ones(2))])
    bare = torch.optim.SGD.__new__(torch.optim.SGD)
    assert [optimizers.has_step_hooks(each) for each in (optimizer, bare, nn.Linear(1, 1))] == [True, False, False]
    optimizer.register_step_post_hook(lambda *_: calls.append("users"))
    handle = optimizers.first_step_post_hook(optimizer, lambda *_: calls.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert calls == ["first", "users", "users"]


class _Inheriting(torch.optim.AdamW):
    pass


@canary(optimizers, "step_without_hooks")
@pytest.mark.parametrize("kind", [torch.optim.SGD, _Inheriting])
def test_steps_without_hooks(kind: Any) -> None:
    calls, parameter = list[str](), nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(2)
    optimizers.step_without_hooks(optimizer)
    assert (parameter < 0.6).all()
    assert (parameter.requires_grad, calls) == (True, [])


@canary(autograd, "next_node_number", "number_of_node", "frames_of_forward")
def test_nodes_tell_when_and_where_they_were_made() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        first, doubled, second = autograd.next_node_number(), 2 * x, autograd.next_node_number()
    node, unseen = doubled.grad_fn, x.sum().grad_fn
    assert node is not None
    assert unseen is not None
    assert first <= autograd.number_of_node(node) < second <= autograd.number_of_node(unseen)
    assert "doubled, second = " in autograd.frames_of_forward(node)[-1]
    assert autograd.frames_of_forward(unseen) == []


@canary(autograd, "backwards_seen")
def test_backwards_are_seen_before_they_run() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[object]()
    losses = [(n * x).sum() for n in range(3)]

    def see(outputs: Iterable[object]) -> None:
        seen.extend(map(id, outputs))
        assert x.grad is None

    grad = torch.autograd.grad
    with autograd.backwards_seen(see):
        grad(losses[0], x)
        losses[1].backward()
    losses[2].backward()
    assert seen == [*map(id, losses[:2])]


@canary(autograd, "when_backward_ends")
def test_end_of_a_backward() -> None:
    calls, first, second = list[str](), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    second.register_post_accumulate_grad_hook(lambda _: autograd.when_backward_ends(lambda: calls.append("end")))
    first.register_post_accumulate_grad_hook(lambda _: calls.append("first"))
    (first * second.exp()).sum().backward()
    assert calls == ["first", "end"]


@canary(autograd, "has_saved_tensor_hooks", "is_checkpointing")
def test_hooks_on_saved_tensors_and_checkpoints_are_seen() -> None:
    seen, x = list[tuple[bool, bool]](), torch.ones(2, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        seen.append((autograd.has_saved_tensor_hooks(), autograd.is_checkpointing()))
        return x.exp()

    function(x)
    with torch.autograd.graph.save_on_cpu():
        function(x)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [(False, False), (True, False), (True, True), (True, True)], "the last one computes it again"


@canary(modules, "has_backward_hooks")
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_a_module_are_seen(register: str) -> None:
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: None)
    assert not modules.has_backward_hooks(module)
    getattr(module, register)(lambda *_: None)
    assert modules.has_backward_hooks(module)


@canary(autograd, "is_refusal_of_hooks", "is_refusal_of_compiled_code")
def test_refusals_of_torch() -> None:
    def square(x: Tensor) -> Tensor:
        return x.square().sum()

    with torch.autograd.graph.save_on_cpu():
        for take in (torch.func.grad(square), torch.func.jacrev(square), lambda x: torch.func.vjp(square, x)):
            with pytest.raises(RuntimeError) as hooks:
                take(torch.ones(2))
            assert autograd.is_refusal_of_hooks(hooks.value)
    x = torch.ones(2, requires_grad=True)
    function = dynamo.compiled(torch.sin, backend="aot_eager", mode="default", compiling=contextlib.nullcontext)
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as compiled:
        gradient.sum().backward()
    assert autograd.is_refusal_of_compiled_code(compiled.value)
    assert not autograd.is_refusal_of_compiled_code(hooks.value)
    assert not autograd.is_refusal_of_hooks(compiled.value)


@canary(autograd, "is_cast", "is_cast_of_leaf")
def test_casts_are_known() -> None:
    weight, seen = nn.Parameter(torch.ones(2, 2)), list[tuple[bool, bool]]()
    assert [autograd.is_cast(each) for each in (weight.bfloat16(), weight * 2, weight)] == [True, False, False]

    def see(tensor: Tensor) -> Tensor:
        base = tensors.base_of(tensor)
        seen.append((autograd.is_cast(tensor if base is None else base), autograd.is_cast_of_leaf(tensor)))
        return tensor

    x = torch.ones(2, 2, requires_grad=True) * 1.0
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(see, see):
        F.linear(x, weight)
    assert seen == [(True, True), (True, False)], "the weight, transposed, and x"


@canary(autocast, "autocast_cache")
def test_autocast_keeps_copies_of_weights_while_autograd_records() -> None:
    x, weight, sizes = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2)), list[int]()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        with autocast.autocast_cache(enabled=True):
            with torch.no_grad():
                F.linear(x, weight)
            with _saved(sizes, Tensor.data_ptr):
                outputs = [(F.linear(x * 1.0, weight) * 3).sum() for _ in range(2)]
            for output in outputs:
                output.backward()
            assert weight.grad is not None
            assert weight.grad.unique().tolist() == [12.0], "of both, though the copy is the same"
        weight.data.fill_(2.0)
        assert F.linear(x, weight).unique().tolist() == [4.0], "no copy is left"
    assert len({*sizes}) == 3, "x twice, the weight once"


@canary(autocast, "as_autocast")
def test_copies_of_shards_are_kept_in_a_step_until_the_shard_changes() -> None:
    weight = nn.Parameter(torch.ones(2, 2))

    def read() -> Tensor:
        tensors.count_as_parameter(found := weight.view_as(weight))
        return autocast.as_autocast(found)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert read().dtype == torch.float32, "no step runs"
        with autocast.autocast_cache(enabled=True):
            first, second = read(), read()
            assert first.data_ptr() == second.data_ptr()
            (first.sum() * 3 + second.sum()).backward()
            assert weight.grad is not None
            assert weight.grad.unique().tolist() == [4.0], "of both"
            weight.data.fill_(2.0)
            with torch.no_grad():
                weight.mul_(1.0)
            assert read().unique().tolist() == [2.0]
        with autocast.autocast_cache(enabled=True):
            assert read().data_ptr() != first.data_ptr(), "of another step"


@canary(autograd, "is_in_backward", "current_backward")
def test_backwards_are_noticed_and_have_numbers() -> None:
    noticed, x, parameter = list[tuple[bool, int]](), torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(
        lambda _: noticed.append((autograd.is_in_backward(), autograd.current_backward()))
    )
    (checkpoint(lambda x: x * parameter, x, use_reentrant=True) * parameter).sum().backward()
    parameter.sum().backward()
    assert len(noticed) == len({*noticed}) == 3
    assert all(is_in_backward for is_in_backward, _ in noticed)
    assert not autograd.is_in_backward()


@canary(tensors, "untransformed")
def test_tensors_inside_of_transforms() -> None:
    seen, plain = list[torch.Size](), torch.ones(2)
    torch.vmap(torch.func.grad(lambda x: seen.append(tensors.untransformed(x).shape) or x.sum()))(torch.ones(2, 3))  # type: ignore[func-returns-value]
    assert seen == [torch.Size((2, 3))]
    assert tensors.untransformed(plain) is plain


class _Seeing(Tensor):
    seen: typing.ClassVar[list[bool]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen += [tensors.makes_a_parameter()] * (func is Tensor.detach)
        return super().__torch_function__(func, types, args, kwargs or {})


@canary(tensors, "makes_a_parameter")
def test_parameters_made_of_a_subclass() -> None:
    tensor = torch.ones(2).as_subclass(_Seeing)
    nn.Parameter(tensor), tensor.detach()
    assert _Seeing.seen == [True, False]


class _Wrapper(Tensor):
    calls: typing.ClassVar[list[Any]] = []
    __torch_function__ = tensors.no_torch_function

    @staticmethod
    def __new__(cls, like: Tensor) -> _Wrapper:
        return tensors.make_wrapper_like(cls, like, dtype=like.dtype, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return torch.zeros(args[0].shape)


@canary(tensors, "make_wrapper", "make_wrapper_like", "no_torch_function")
def test_wrappers() -> None:
    wrapper = _Wrapper(torch.zeros(3, 2)[1:].t())
    assert (wrapper.shape, wrapper.stride(), wrapper.storage_offset()) == ((2, 2), (1, 2), 2)
    assert wrapper.requires_grad
    assert type(torch.neg(wrapper)) is Tensor, "only __torch_dispatch__ answers"
    assert _Wrapper.calls == [torch.ops.aten.neg.default]


@canary(tensors, "count_as_parameter", "IS_PARAMETER")
def test_tensors_that_count_as_parameters() -> None:
    wrapper = _Wrapper(torch.zeros(2))
    assert not isinstance(wrapper, nn.Parameter)
    tensors.count_as_parameter(wrapper)
    assert isinstance(wrapper, nn.Parameter)
    assert set(vars(wrapper)) == {tensors.IS_PARAMETER}


@canary(tensors, "has_gradient_hooks", "set_gradient_hooks")
def test_gradient_hooks() -> None:
    leaf, seen = torch.ones(3, requires_grad=True), list[Tensor]()
    tensors.set_gradient_hooks(leaf, {0: seen.append})
    (leaf * 2).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 2.0))
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        parameter = nn.Parameter(torch.zeros(2))
        assert not tensors.has_gradient_hooks(parameter)
        handle = register(parameter, lambda gradient: None)
        assert tensors.has_gradient_hooks(parameter)
        handle.remove()
        assert not tensors.has_gradient_hooks(parameter) or register is not nn.Parameter.register_hook


class _Passed(torch.autograd.Function):
    referred: typing.ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Passed.referred.append(tensors.is_referred_to(gradient))
        return gradient


@canary(tensors, "is_referred_to")
def test_gradients_that_two_nodes_get() -> None:
    tensor, gradient = torch.zeros(2, requires_grad=True), torch.ones(2)
    (_Passed.apply(tensor) + _Passed.apply(tensor)).backward(gradient)
    assert _Passed.referred == [True, True]


@canary(modules, "CALL", "call_of")
def test_what_a_call_of_a_module_calls() -> None:
    module, x = nn.Linear(2, 2), torch.ones(2)
    module.register_forward_hook(lambda *args: "hooked")
    assert modules.call_of(module)(x) == "hooked"
    vars(module)[modules.CALL] = lambda *args: "called"
    assert module(x) == "called"
    assert modules.CALL not in vars(copy.deepcopy(module))
    module.compile(backend="eager")
    assert vars(module)[modules.CALL](x) == "hooked"


@canary(modules, "runs_beneath_torch_functions", "is_compiled", "is_wrapper_of_compiler")
def test_forwards_that_no_torch_function_sees() -> None:
    module = nn.Linear(2, 2)
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit.script"):
        scripted = torch.jit.script(module)
    wrapped = torch.compile(module, backend="eager")
    beneath = [modules.runs_beneath_torch_functions(each) for each in (module, wrapped, scripted)]
    assert beneath == [False, True, True]
    assert (modules.is_compiled(wrapped), modules.is_compiled(scripted)) == (True, False)
    module.compile(backend="eager")
    assert modules.runs_beneath_torch_functions(module)


@canary(modules, "APPLY", "put")
def test_what_changes_tensors_of_a_module() -> None:
    module, plain, mean = nn.GRU(2, 2), nn.BatchNorm1d(2), torch.ones(2)
    weight = nn.Parameter(torch.zeros_like(module.weight_hh_l0))
    modules.put(module, "weight_hh_l0", weight)
    assert module.weight_hh_l0 is weight
    assert any(tensor is weight for tensor in module.all_weights[0])
    modules.put(plain, "running_mean", mean)
    assert dict(plain.named_buffers())["running_mean"] is mean
    vars(plain)[modules.APPLY] = lambda change, recurse=True: change(torch.ones(1)).dtype
    assert plain.double() == torch.float64


@canary(modules, "move_other_state")
def test_states_of_metrics_move_and_parameters_stay() -> None:
    module = nn.ModuleList([nn.Linear(1, 1), torchmetrics.MeanMetric()])
    modules.move_other_state(module, torch.device("meta"))
    assert module[0].weight.device.type == "cpu"
    assert module[1].mean_value.device.type == "meta"


@canary(modules, "observer_registries")
@pytest.mark.parametrize("is_of_all", [False, True])
def test_hooks_that_look(is_of_all: bool) -> None:
    layer, called, seen = nn.Linear(2, 2), list[str](), list[str]()
    register = register_module_forward_pre_hook if is_of_all else layer.register_forward_pre_hook
    register_after = register_module_forward_hook if is_of_all else layer.register_forward_hook
    before, after = register(lambda *args: called.append("hook")), register_after(lambda *args: called.append("hook"))
    registries = modules.observer_registries(None if is_of_all else layer)
    for registry, handle, name in zip(registries, (before, after), ("before", "after"), strict=True):
        registry[handle.id] = lambda *args, name=name: seen.append(name)
    layer(torch.ones(2))
    before.remove(), after.remove()
    layer(torch.ones(2))
    assert (called, seen) == ([], ["before", "after"])


@canary(modules, "PARAMETERS", "BUFFERS", "CHILDREN", "parameters_of", "buffers_of", "children_of", "named_state")
@canary(modules, "RunningNorm", "BatchNorm")
def test_registries_of_modules() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    assert modules.children_of(module) == {"0": norm} == vars(module)[modules.CHILDREN]
    assert modules.parameters_of(norm) == {"weight": norm.weight, "bias": norm.bias} == vars(norm)[modules.PARAMETERS]
    assert modules.buffers_of(norm).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    assert modules.buffers_of(norm) is vars(norm)[modules.BUFFERS]
    found = {name: (tensor, owner) for name, tensor, owner in modules.named_state(module)}
    assert found.keys() == dict([*module.named_parameters(), *module.named_buffers()]).keys()
    assert found["0.weight"] == (norm.weight, norm)
    kinds = [norm, nn.InstanceNorm1d(2), nn.LayerNorm(2)]
    assert [isinstance(each, modules.RunningNorm) for each in kinds] == [True, True, False]
    assert [isinstance(each, modules.BatchNorm) for each in kinds] == [True, False, False]
    assert issubclass(nn.SyncBatchNorm, modules.BatchNorm)


@canary(modules, "forward_hooks", "forward_hooks_with_kwargs", "forward_hook_registries", "has_hooks")
@canary(modules, "forward_hooks_copied", "attributes_replaced")
def test_hooks_of_modules() -> None:
    module = nn.Linear(1, 1)
    with modules.forward_hooks_copied(module):
        handle = module.register_forward_hook(lambda *args, **kwargs: None, with_kwargs=True)
        assert list(modules.forward_hooks(module)) == [handle.id] == list(modules.forward_hooks_with_kwargs(module))
        assert modules.has_hooks(module)
        assert sum(handle.id in registry for registry in modules.forward_hook_registries(module)) == 2
        modules.forward_hooks(module).pop(handle.id)
        module(torch.zeros(1))
    with modules.attributes_replaced(module, {"forward": len, "training": False}):
        assert (module.forward, module.training) == (len, False)
    assert ("forward" in vars(module), module.training) == (False, True)
    for kind in ("forward_pre", "full_backward", "full_backward_pre"):
        assert not modules.has_hooks(module)
        handle = getattr(module, f"register_{kind}_hook")(lambda *args: None)
        assert modules.has_hooks(module)
        handle.remove()
    kinds = [f"_forward{pre}_hooks{kind}" for pre in ("", "_pre") for kind in ("", "_with_kwargs")]
    present = {name for name in vars(module) if name.startswith("_forward")}
    assert present == {*kinds, "_forward_hooks_always_called"}, "forward_hook_registries knows them all"


# ------------------------------------------------------------------------------------------------------------ dispatch


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@canary(dispatch, "pop_function_mode", "push_function_mode", "DisableTorchFunction", "DisableTorchFunctionSubclass")
@canary(dispatch, "function_modes")
def test_the_stack_of_function_modes() -> None:
    tensor, mode = torch.zeros(2), _Counting()
    with mode:
        assert dispatch.function_modes() == [mode]
        assert dispatch.pop_function_mode() is mode
        tensor.neg()
        dispatch.push_function_mode(mode)
        with dispatch.DisableTorchFunction():
            tensor.neg()
        assert mode.calls == []
        with dispatch.DisableTorchFunctionSubclass():
            tensor.neg()
    assert mode.calls == [Tensor.neg], "the last one keeps modes on"


class _Operators(dispatch.OperatorMode):
    """Notes operators, and what is asked when one runs."""

    def __init__(self, ask: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.calls, self.ask, self.answers = list[Any](), ask, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        self.answers.append(self.ask())
        return func(*args, **(kwargs or {}))


@canary(dispatch, "OperatorMode", "TorchDispatchMode", "dispatch_modes", "no_dispatch_modes")
def test_dispatch_modes() -> None:
    assert issubclass(dispatch.OperatorMode, dispatch.TorchDispatchMode)
    with _Operators() as mode, fake_tensors.FakeTensorMode() as fake, _Operators() as inner:
        assert dispatch.dispatch_modes() == [fake, mode, inner]
        with dispatch.no_dispatch_modes():
            assert type(torch.zeros(2)) is Tensor
            assert dispatch.dispatch_modes() == []
        assert mode.calls == []
    eager = torch.compiler.set_stance("force_eager")
    with eager, pytest.warns(UserWarning, match="flex_attention"), _Operators() as mode:
        flex_attention(*[torch.zeros(1, 1, 2, 2)] * 3)
    assert torch.ops.higher_order.flex_attention in mode.calls


@canary(dispatch, "OpOverload", "schema_of", "written_arguments")
def test_schemas() -> None:
    aten, tensor, out = torch.ops.aten, torch.zeros(2), torch.zeros(2)
    assert isinstance(aten.native_batch_norm.default, dispatch.OpOverload)
    names = [argument.name for argument in dispatch.schema_of(aten.native_batch_norm.default).arguments]
    assert names[3:5] == ["running_mean", "running_var"]
    assert dispatch.written_arguments(aten.add_.Tensor, (tensor, out), {}) == [tensor]
    assert [*map(id, dispatch.written_arguments(aten.add.out, (tensor, tensor), {"out": out}))] == [id(out)]
    assert dispatch.written_arguments(aten.add.Tensor, (tensor, out), {}) == []


@canary(dispatch, "makes_a_view")
def test_operators_that_make_a_view() -> None:
    aten = torch.ops.aten
    assert all(map(dispatch.makes_a_view, (aten.t.default, aten.view.default, aten.detach.default, aten.select.int)))
    others = aten._to_copy.default, aten.add_.Tensor, aten.add.out, aten.mm.default, aten.view.dtype
    assert not any(map(dispatch.makes_a_view, (*others, aten.split.Tensor, torch.ops.higher_order.flex_attention)))


@canary(dispatch, "is_in_compiled_code")
def test_compiled_code_is_known_in_a_dispatch_mode() -> None:
    module = nn.ReLU()

    class Mode(dispatch.TorchDispatchMode):
        seen: typing.ClassVar[list[bool]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(dispatch.is_in_compiled_code())
            return func(*args, **(kwargs or {}))

    with Mode():
        module(torch.ones(2))
        module.compile(backend="eager")
        module(torch.ones(2))
    assert Mode.seen == [False, False, False, True]


@canary(dispatch, "alias_below_autograd", "autograd_recording")
def test_a_dispatch_makes_aliases_and_may_record_a_graph() -> None:
    found, weight, start = list[Any](), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = func(*args, **(kwargs or {}))
            found.extend((dispatch.alias_below_autograd(answer), (weight * 2).requires_grad))
            with dispatch.autograd_recording():
                found.append((weight * 2).requires_grad)
            return answer

    with Mode():
        tensor = start.exp()
    alias, *is_recorded = found[:3]
    version = tensors.version_of(alias)
    tensor.detach().add_(1.0)
    assert tensors.version_of(alias) == version + 1
    assert (alias.grad_fn, alias.tolist(), is_recorded) == (None, tensor.tolist(), [False, True])


@canary(dispatch, "version_counter")
def test_a_counter_counts_the_changes_of_a_tensor_without_its_memory() -> None:
    tensor = torch.ones(8, requires_grad=True).exp()
    counter, memory = dispatch.version_counter(tensor), StorageWeakRef(tensor.untyped_storage())
    version = tensors.version_of(counter)
    tensor.detach().view(2, 4)[0].add_(1.0)
    assert tensors.version_of(counter) == version + 1 == tensors.version_of(tensor)
    assert counter.untyped_storage().nbytes() == 0
    del tensor
    assert memory.expired()


@canary(attention, "attention_weights", "drops_by_itself")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_with_dropout_is_a_softmax_and_products_on_a_cpu(dtype: torch.dtype, has_mask: bool) -> None:
    assert not attention.drops_by_itself(torch.device("cpu"))
    query, key, value = (torch.randn(2, heads, 8, 16).to(dtype) for heads in (4, 2, 2))
    mask = torch.ones(8, 8).tril(-1).bool() if has_mask else None  # the first query sees no key
    options = {"is_causal": not has_mask, "scale": 0.3, "enable_gqa": True}
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.4, **options)  # type: ignore[arg-type]
    state = torch.get_rng_state()
    weights, values = attention.attention_weights(query, key, value, mask, options)
    torch.manual_seed(1)
    found = F.dropout(weights, 0.4) @ values
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found.to(dtype), expected)


@canary(dispatch, "FUSED_RMS_NORM", "LOG_SOFTMAX", "SOFTMAX")
@canary(dispatch, *("INDEX_PUT_IMPL", "LOCAL_SCALAR_DENSE", "RESHAPE_ALIAS", "TO_COPY", "UNIQUE2", "UNSAFE_VIEW"))
def test_operators_without_public_names() -> None:
    tensor = torch.arange(3.0)
    assert dispatch.UNSAFE_VIEW(tensor, [3, 1]).shape == dispatch.RESHAPE_ALIAS(tensor, [3, 1], [1, 1]).shape == (3, 1)
    assert len(dispatch.UNIQUE2(tensor)) == 3, "values, inverse, counts"
    output, _ = dispatch.FUSED_RMS_NORM(tensor, [3], None, 1e-5)
    torch.testing.assert_close(output, F.rms_norm(tensor, [3], eps=1e-5))
    with _Operators() as mode:
        tensor.softmax(0), tensor.log_softmax(0), tensor.unique(), tensor[0].item(), tensor.to(torch.int64)
    assert mode.calls[:2] == [dispatch.SOFTMAX, dispatch.LOG_SOFTMAX]
    assert {dispatch.UNIQUE2, dispatch.LOCAL_SCALAR_DENSE, dispatch.TO_COPY} <= set(mode.calls)
    dispatch.INDEX_PUT_IMPL(tensor, [torch.tensor([0])], torch.tensor([5.0]))
    assert tensor.tolist() == [5.0, 1.0, 2.0]


@canary(dispatch, "foreach_multiply", "unscale_and_check")
@pytest.mark.parametrize(("last", "found"), [(1.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_lists_are_multiplied_and_what_is_not_finite_is_found(last: float, found: float) -> None:
    given = [torch.tensor([3.0, 4.0]), torch.tensor([-2.0], dtype=torch.bfloat16)]
    dispatch.foreach_multiply(given, torch.tensor(0.5))
    assert [(t.tolist(), t.dtype) for t in given] == [([1.5, 2.0], torch.float32), ([-1.0], torch.bfloat16)]
    scaled, flag = [torch.tensor([4.0, 8.0]), torch.tensor([last], dtype=torch.float16)], torch.zeros(1)
    dispatch.unscale_and_check(scaled, flag, torch.full((1,), 0.25))
    assert (scaled[0].tolist(), flag.item()) == ([1.0, 2.0], found)


# -------------------------------------------------------------------------------------------------------- fake tensors


@canary(fake_tensors, "FakeTensor", "FakeTensorMode", "unset_fake_temporarily")
@canary(fake_tensors, "DataDependentOutputException", "DynamicOutputShapeException")
def test_fake_tensors() -> None:
    with fake_tensors.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.zeros(2) + torch.ones(2)
        with pytest.raises(fake_tensors.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(fake_tensors.DynamicOutputShapeException):
            fake.nonzero()
        with fake_tensors.unset_fake_temporarily():
            assert type(torch.zeros(2)) is Tensor
    assert isinstance(fake, fake_tensors.FakeTensor)
    assert isinstance(mode.from_tensor(torch.zeros(2)), fake_tensors.FakeTensor)


@canary(fake_tensors, "on_fake_tensors")
def test_failures_on_fake_tensors_are_logged_there(caplog: pytest.LogCaptureFixture) -> None:
    log: logging.Logger = importlib.import_module("torch._subclasses.fake_tensor").log
    with fake_tensors.on_fake_tensors(fake_tensors.FakeTensorMode()):
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        assert log.disabled
    assert (log.disabled, log.name, caplog.records) == (False, "torch._subclasses.fake_tensor", [])


@canary(pytree, *(name for name in pytree.__all__ if name.startswith("tree_")), "TreeSpec")
def test_pytrees() -> None:
    tree = {"a": [1, (2,)], "b": None}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == [1, 2, None] == pytree.tree_leaves(tree)
    assert isinstance(spec, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert hash(spec) == hash(pytree.tree_flatten(tree)[1])
    assert pytree.tree_map(str, [1, (2,)]) == ["1", ("2",)]
    assert pytree.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


@dataclass
class _Pair:
    first: int
    second: int | None


@canary(pytree, "register_dataclass", "registered_dataclasses", "forget_dataclasses")
def test_dataclasses_are_containers_for_a_while() -> None:
    for _ in range(2):
        pytree.register_dataclass(_Pair)
        assert pytree.registered_dataclasses() == [_Pair]
        assert pytree.tree_map(str, [_Pair(1, None)]) == [_Pair("1", None)]  # type: ignore[arg-type]
        pytree.forget_dataclasses([_Pair])
        assert pytree.registered_dataclasses() == []
        assert pytree.tree_leaves(_Pair(1, 2)) == [_Pair(1, 2)]


# ---------------------------------------------------------------------------------- autograd functions and checkpoints


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


_apply_doubled = _Doubled.apply  # as user code may keep it


@canary(custom_functions, "custom_functions_seen", "FunctionClass")
def test_custom_functions_are_seen() -> None:
    def answer(cls: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append(cls)
        return apply(*args, **kwargs)

    seen, tensor = list[Any](), torch.ones(2, requires_grad=True)
    with custom_functions.custom_functions_seen(answer):
        _Doubled.apply(tensor)
        _apply_doubled(tensor).sum().backward()
    _Doubled.apply(tensor)
    assert seen == [_Doubled, _Doubled]
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2.0, 2.0]


@canary(autograd, "checkpoints_replaced", "recomputed_by", "is_reentrant", "StopRecomputation")
def test_checkpoints() -> None:
    calls, seen, tensor = list[str](), list[Any](), torch.ones(2, requires_grad=True)

    def function(tensor: Tensor) -> Tensor:
        calls.append("function")
        try:
            return tensor.exp().neg()
        except autograd.StopRecomputation:
            calls.append("stopped")
            raise

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (calls.append("again"), function(*args))[1]  # type: ignore[func-returns-value]

    with autograd.recomputed_by(again):
        output = checkpoint(function, tensor, use_reentrant=False)
    output.sum().backward()
    assert calls == ["function", "again", "function", "stopped"]

    def answer(cls: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append((autograd.is_reentrant(cls), args[0]))
        return apply(*args, **kwargs)

    with custom_functions.custom_functions_seen(answer):
        checkpoint(function, tensor, use_reentrant=True)
    assert seen == [(True, function)]


@canary(autograd, "checkpoints_noted")
def test_checkpoints_that_are_made() -> None:
    with autograd.checkpoints_noted() as noted:
        checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert noted == [torch.exp]


@canary(autograd, "has_reentrant_checkpoints")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_reentrant_checkpoints_in_a_graph(use_reentrant: bool) -> None:
    tensor = torch.ones(2, requires_grad=True)
    output = checkpoint(torch.exp, tensor, use_reentrant=use_reentrant) * 2
    assert autograd.has_reentrant_checkpoints([tensor, output]) == use_reentrant


# ------------------------------------------------------------------------------------------------ DTensor, collectives


@canary(dtensor, "ShardingRules", "Propagation", "Move", "NoRule")
def test_rules_of_dtensor_without_process_groups() -> None:
    rules, x, weight = dtensor.ShardingRules(2), torch.empty(3, 4, device="meta"), torch.empty(4, 8, device="meta")
    placements = {id(x): Replicate(), id(weight): Shard(1)}
    mm = torch.ops.aten.mm.default, (x, weight), {}, lambda tensor: placements[id(tensor)]
    assert rules.propagate(*mm) == dtensor.Propagation(outputs=(Shard(1),), moves=())
    placements[id(x)] = Shard(0)
    (move,) = rules.propagate(*mm).moves
    assert isinstance(move, dtensor.Move)
    with pytest.raises(dtensor.NoRule):
        rules.propagate(torch.ops.aten.bernoulli.default, (x,), {}, lambda tensor: Shard(0))


def _parts_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(8.0)
    tensor = DTensor.from_local(full[: full.shape[0] // 4], mesh, [Replicate(), Shard(0)], run_check=False)
    assert dtensor.local_tensor(tensor).shape == (2,)
    assert type(dtensor.local_tensor(tensor)) is Tensor
    assert dtensor.part_of(tensor) is dtensor.local_tensor(tensor)
    again = DTensor(dtensor.local_tensor(tensor), dtensor.spec_of(tensor), requires_grad=False)
    assert (again.placements, again.device_mesh, again.shape) == (tensor.placements, mesh, tensor.shape)
    made = dtensor.placed(full[:2], mesh, [Replicate(), Shard(0)], torch.Size([4]), (1,))
    assert (made.shape, made.placements, made.dtype) == ((4,), (Replicate(), Shard(0)), torch.float32)
    assert made.to_local().data_ptr() == full.data_ptr()
    inner_first = (dtensor.StridedShard(0, split_factor=2), Shard(0))
    assert inner_first[0].split_factor == 2
    shape, offset = dtensor.local_shape_and_offset(torch.Size([8]), mesh, inner_first)
    dp, tp = mesh.get_coordinate() or (0, 0)
    assert (tuple(shape), tuple(offset)) == ((2,), (4 * tp + 2 * dp,))
    group = mesh.get_group("tp")
    ones = torch.ones(2)
    assert dtensor.all_reduce(ones, "sum", group).tolist() == [2.0, 2.0]
    assert dtensor.all_gather_single(ones, 0, group).tolist() == [1.0] * 4
    assert dtensor.reduce_scatter_single(torch.ones(4), "sum", 0, group).tolist() == [2.0, 2.0]
    assert ones.tolist() == [1.0, 1.0]


@canary(dtensor, "placed", "StridedShard", "local_shape_and_offset", "local_tensor", "part_of", "spec_of")
@canary(dtensor, "all_gather_single", "all_reduce", "reduce_scatter_single")
def test_parts_of_dtensors(workers: WorkerPools) -> None:
    workers(4).run(_parts_of_dtensors)


def _meshes_forgotten() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,))
    gone, tensor = weakref.ref(mesh), DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    (tensor.cos() * 2).redistribute(placements=[Replicate()]).sum().full_tensor()
    del mesh, tensor
    gc.collect()
    is_held = gone() is not None
    dtensor.clear_caches()
    gc.collect()
    return is_held, gone() is None


@canary(lightning_helpers, "last_linked")
def test_links_to_the_last_checkpoint_are_made_by_others(tmp_path: Path) -> None:
    calls: list[tuple[str, ...]] = []

    def note(*paths: str) -> None:
        calls.append(tuple(Path(path).name for path in paths))

    class Calls(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            open_now.enter_context(lightning_helpers.last_linked(trainer, note, note))

    keeps = ModelCheckpoint(tmp_path, filename="{epoch}", save_last="link")
    settings: Any = {**QUIET, "max_epochs": 2, "limit_train_batches": 1, "limit_val_batches": 0}
    with contextlib.ExitStack() as open_now:
        L.Trainer(callbacks=[keeps, Calls()], **settings).fit(BoringModel())
    first, second, last = "epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"
    assert calls == [(first, last), (first, second, last), (second, last)]
    assert [file.name for file in tmp_path.iterdir()] == [second]
    assert "_link_checkpoint" not in vars(keeps)


@canary(dtensor, "clear_caches")
@canary(fsdp_units, "without_units", "let_be_copied", "forget_units")
@canary(fsdp, "groups_of", "shards_of", "move_shards", "when_gathered", "UnitParameter", "parameters_of_unit", "reset")
@canary(fsdp_changes, "ChangeableArguments")
@canary(pipelining, "finish_backward")
@pytest.mark.parametrize("name", ["forgotten", "aside", "moved", "gathered", "reset", "changed", "finished"])
def test_meshes_and_units_of_two_ranks(workers: WorkerPools, name: str) -> None:
    # The last: two backwards, each the mean over inputs 1 and 2, times the two rows of the second layer.
    checks: dict[str, tuple[Callable[[], Any], Any]] = {
        "forgotten": (_meshes_forgotten, (True, True)),
        "aside": (_units_aside, None),
        "moved": (_shards_in_other_memory, None),
        "gathered": (_gathered_in_other_dtypes, (True, True, True)),
        "reset": (_reset_units, [True, True]),  # sharded, with gradients
        "changed": (_changed_arguments, None),
        "finished": (_finished_backward, [6.0] * 4),
    }
    check, expected = checks[name]
    assert workers(2).run(check) == [expected] * 2


def _finished_backward() -> list[float]:
    model, mesh = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2))), init_device_mesh("cpu", (2,))
    for layer in model:
        nn.init.ones_(layer.weight)
        fully_shard(layer, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    assert isinstance(root, FSDPModule)
    model(torch.ones(1, 2))
    pipelining.finish_backward(root)  # where no backward began
    for is_last in (False, True):
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)
        for _ in range(0 if is_last else 2):
            model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    pipelining.finish_backward(root)
    gradient = model[0].weight.grad
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor().flatten().tolist()


def _units_aside() -> None:
    model, seen, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), list[str](), init_device_mesh("cpu", (2,))
    model[0].register_forward_hook(lambda *args: seen.append("user's"))
    for layer in model:
        fsdp_units.let_be_copied(fully_shard(layer, mesh=mesh))
    model(torch.ones(1, 2))
    copied = copy.deepcopy(model)
    assert type(copied[0]) is nn.Linear
    assert copied[0].weight is not model[0].weight
    with fsdp_units.without_units(model):
        assert type(model[0]) is nn.Linear
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # nothing gathers them
            model(torch.ones(1, 2))
        model[1].register_forward_hook(lambda *args: seen.append("new"))
    seen.clear()
    assert isinstance(model[0], FSDPModule)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert seen == ["user's", "new"]
    for layer in model:
        layer.reshard()
    fsdp_units.without_units(model).pop_all()  # for good
    for layer in model:
        for name, parameter in [*layer.named_parameters()]:
            setattr(layer, name, nn.Parameter(parameter.full_tensor().detach()))
    fsdp_units.forget_units(model)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    assert model(torch.ones(1, 2)).shape == (1, 2)


def _shards_in_other_memory() -> None:
    model, of_two = nn.Linear(3, 5), init_device_mesh("cpu", (2, 1), mesh_dim_names=("two", "one"))
    values, policy = (
        {fqn: p.detach().clone() for fqn, p in model.named_parameters()},
        CPUOffloadPolicy(pin_memory=False),
    )
    for mesh in (of_two["two"], of_two["one"]):
        unit = fully_shard(copy.deepcopy(model), mesh=mesh, offload_policy=policy, reshard_after_forward=True)
        assert isinstance(unit, FSDPModule)
        parameters, made, seen = dict(unit.named_parameters()), list[Tensor](), list[int]()

        def memory(shape: torch.Size, dtype: torch.dtype, made: list[Tensor] = made) -> Tensor:
            made.append(torch.zeros(shape, dtype=dtype))
            return made[-1]

        fsdp.move_shards(unit, memory)
        pointers = [tensor.data_ptr() for tensor in made]
        assert [shard.data_ptr() for shard in fsdp.shards_of(unit)] == pointers
        fsdp.when_gathered(unit, lambda shards, seen=seen: seen.extend(shard.data_ptr() for shard in shards))
        unit(torch.ones(1, 3)).sum().backward()
        assert sorted(seen) == sorted(2 * pointers), "in the forward and in the backward"
        assert dict(unit.named_parameters()) == parameters
        for fqn, parameter in unit.named_parameters():
            assert parameter.to_local().untyped_storage().data_ptr() in pointers
            torch.testing.assert_close(parameter.full_tensor().detach(), values[fqn])
            parameter.detach().zero_()
        assert all(not tensor.any() for tensor in made)
        assert not unit(torch.ones(1, 3)).any()


def _gathered_in_other_dtypes() -> tuple[Any, ...]:
    unit = fully_shard(nn.Linear(3, 5), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    assert isinstance(unit, FSDPModule)
    unit(torch.ones(2, 3)).sum().backward()
    weight, bias = fsdp.parameters_of_unit(unit)
    assert [weight.sharded, bias.sharded] == [*unit.parameters()]
    assert (weight.memory.dtype, weight.memory.untyped_storage().size()) == (torch.float32, 0)
    seen: list[Tensor] = []
    assert weight.gather_in(torch.bfloat16, lambda half: (seen.append(half), half)[1]) is weight.gathered  # type: ignore[func-returns-value]
    unit.unshard()
    assert (unit.weight.dtype, unit.bias.dtype) == (torch.bfloat16, torch.float32)
    values = weight.sharded.full_tensor().bfloat16()  # type: ignore[attr-defined]
    return torch.equal(seen[0], values), torch.equal(unit.weight, values), unit.weight.requires_grad  # type: ignore[arg-type]


def _reset_units() -> list[bool]:
    unit = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    parameters = list(unit.parameters())
    unit(torch.ones(1, 2)).sum().backward()
    unit.unshard()
    fsdp.reset(unit, parameters)
    return [now is was and was.grad is not None for now, was in zip(unit.parameters(), parameters, strict=True)]


class _InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def _changed_arguments() -> None:
    torch.manual_seed(0)
    plain, seen = _InPlace(3, 3), list[Tensor]()
    unit = fully_shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    fsdp_changes.ChangeableArguments(unit, seen.append)
    start, found = torch.ones(2, 3, requires_grad=True), []
    for block in (plain, unit):
        x = start * 1.0
        (block(x).sum() + x.square().sum()).backward()
        weight = next(block.parameters()).grad
        found += [start.grad, weight.full_tensor() if isinstance(weight, DTensor) else weight]
        start.grad = None
    assert len(seen) == 1
    assert seen[0] is x
    assert all(torch.equal(a, b) for a, b in zip(found[:2], found[2:], strict=True))
    view = torch.ones(2, requires_grad=True).cos().unbind()[0]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        view.mul_(2)  # as torch has it, whose reasons `_get_creation_meta` tells


# ---------------------------------------------------------------------------------------------------------- pipelining


class _Doubling(nn.Module):
    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        return (received[0] * 2).sum() if received else torch.ones(int(index) + 1, requires_grad=True) * 2


def _varying_microbatches() -> list[str]:
    def metas(*shape: int) -> tuple[Tensor, ...]:
        return (torch.empty(shape, device="meta", requires_grad=True),)

    rank, group, indices, losses = dist.get_rank(), dist.group.WORLD, torch.arange(3), list[Tensor]()
    assert group is not None
    sent, made = [metas(i + 1) for i in range(3)], [metas()] * 3
    inputs, outputs = ([()] * 3, sent) if rank == 0 else (sent, made)
    place: dict[str, Any] = {"device": torch.device("cpu"), "group": group, "is_unsplit": False}
    stage = pipelining.ShapedStage(_Doubling(), rank, 2, inputs=inputs, outputs=outputs, **place)  # type: ignore[arg-type]
    schedule = pipelining.InOrder([stage], 3, [0, 1], loss_fn=lambda output, target: output)
    schedule.step(index=indices, target=indices, losses=losses, return_outputs=False)
    seen: list[Tensor] = []
    stage.submod.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        pipelining.InOrder([stage], 3, [0, 1], loss_fn=None).step(index=indices, return_outputs=False)
    if rank == 1:
        assert [loss.item() for loss in losses] == [output.item() for output in seen] == [4.0, 8.0, 12.0]
    return [action.computation_type.name for action in schedule.pipeline_order[rank] if action is not None]


@canary(pipelining, "ShapedStage", "InOrder", "ComputationType")
def test_microbatches_of_different_shapes(workers: WorkerPools) -> None:
    kinds = pipelining.ComputationType
    expected = [kinds.FORWARD.name] * 3 + [kinds.FULL_BACKWARD.name] * 3
    assert workers(2).run(_varying_microbatches) == [expected, expected]
    assert {"BACKWARD_INPUT", "BACKWARD_WEIGHT"} <= {kind.name for kind in kinds}


@canary(pipelining, "begin_split_backward")
def test_gradients_of_weights_after_those_of_inputs() -> None:
    received, weight = torch.full((3,), 2.0, requires_grad=True), nn.Parameter(torch.full((3,), 3.0))
    outputs = pipelining.splittable([received * weight], [received])
    end = pipelining.begin_split_backward(outputs, [torch.ones(3)], [received], [weight])
    torch.testing.assert_close(received.grad, torch.full((3,), 3.0))
    assert weight.grad is None
    end()
    torch.testing.assert_close(weight.grad, torch.full((3,), 2.0))


@canary(pipelining, "planned_actions")
def test_the_order_of_a_schedule_that_has_no_processes() -> None:
    kinds = pipelining.ComputationType
    round_and_round, there_and_back = (0, 1, 0, 1), (0, 1, 1, 0)
    schedules = {"interleaved": round_and_round, "interleaved_zero_bubble": round_and_round, "zbv": there_and_back}
    for schedule, ranks in schedules.items():
        for rank, actions in enumerate(pipelining.planned_actions(schedule, ranks, 4)):
            forwards = [(stage, index) for kind, stage, index in actions if kind is kinds.FORWARD]
            assert sorted(forwards) == [(stage, i) for stage, of in enumerate(ranks) if of == rank for i in range(4)]
            ends = kinds.FULL_BACKWARD if schedule == "interleaved" else kinds.BACKWARD_WEIGHT
            assert sorted((stage, index) for kind, stage, index in actions if kind is ends) == sorted(forwards)


def _allocated_peak() -> int:
    held, peak = torch.zeros(1000), profiling.AllocatedPeak()
    peak.start()
    torch.zeros(50_000).sum()  # before the mark
    kept = torch.zeros(2000)
    peak.mark()
    (torch.zeros(10_000) + torch.zeros(10_000)).sum()
    del kept, held
    return peak.stop()


@canary(profiling, "AllocatedPeak")
def test_the_peak_of_the_allocator(workers: WorkerPools) -> None:
    (peak,) = workers(1).run(_allocated_peak)
    assert 4 * 32_000 <= peak < 4 * 32_000 + 2000


@canary(pipelining, "splittable")
def test_a_backward_that_torch_splits() -> None:
    received, weights = torch.ones(3, requires_grad=True), [nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
    saved = received * weights[0]  # also read by the next output; the third does not follow from what was received
    sent = [saved, saved.exp(), weights[1].square(), weights[1], received.view(3, 1), torch.zeros(3).view(3, 1)]
    outputs = pipelining.splittable(sent, [received])
    assert [output.requires_grad for output in outputs] == [True] * 5 + [False]
    assert [output.data_ptr() for output in outputs] == [tensor.data_ptr() for tensor in sent]
    gradients = [torch.ones_like(output) for output in outputs]
    (of_input,), groups = stage_backward_input(list(outputs), gradients, [received], iter(weights))
    stage_backward_weight(iter(weights), groups)
    e = torch.tensor(2.0).exp().item()
    for found, expected in ((of_input, 2 + 2 * e + 1), (weights[0].grad, 1 + e), (weights[1].grad, 5.0)):
        torch.testing.assert_close(found, torch.full((3,), expected))


# ----------------------------------------------------------------------------------------------------------- compiling


@canary(capture, "capture", "NotCompilable", "recompile_limit")
@canary(fake_tensors, "FunctionalTensor")
def test_a_function_is_captured() -> None:
    kinds, tensor, other = list[bool](), torch.ones(2, requires_grad=True), torch.ones(2)

    def computation(tensor: Tensor) -> list[Tensor]:
        kinds.append(isinstance(tensor, fake_tensors.FunctionalTensor))
        return [tensor.sin() * 2]

    (output,) = capture.capture(computation, [tensor], "aot_eager")(tensor)
    assert {*kinds} == {True}, "stand-ins are FunctionalTensors"
    output.sum().backward()
    assert torch.equal(output, tensor.sin() * 2)
    torch.testing.assert_close(tensor.grad, tensor.detach().cos() * 2)
    with pytest.raises(capture.NotCompilable, match="reads the value"):
        capture.capture(lambda tensor: [tensor] if tensor.sum() > 0 else [tensor * 2], [tensor], "aot_eager")
    with pytest.raises(capture.NotCompilable, match="neither its arguments"):
        capture.capture(lambda tensor: [tensor + other], [tensor], "aot_eager")
    assert capture.recompile_limit() > 1


def _saved(found: list[int], of: Callable[[Tensor], int] = Tensor.numel) -> torch.autograd.graph.saved_tensors_hooks:
    """Notes something of the tensors that a backward keeps, how large they are if nothing else is asked for."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(of(t)), t)[1], lambda t: t)  # type: ignore[func-returns-value]


@canary(joint_graph, "JointGraphPass")
def test_marks_in_a_joint_graph() -> None:
    """A buffer that is changed is read as it was; of a product and its sine, the backward has what is marked."""

    def computation(tensor: Tensor, factor: Tensor, buffer: Tensor) -> list[Tensor]:
        product = (tensor @ factor) * buffer.clone()
        buffer.add_(1)
        return [product.sin().cos()]

    def kept(is_kept: Callable[[dispatch.OpOverload], bool] | None) -> int:
        tensor, factor = torch.ones(2, 2, requires_grad=True), torch.full((2, 64), 0.1, requires_grad=True)
        given, sizes = [tensor, factor, torch.ones(())], list[int]()
        compiled = capture.capture(computation, given, "aot_eager", is_kept=is_kept)
        for num in (1, 2):
            tensor.grad = None
            sizes.clear()
            with _saved(sizes):
                (output,) = compiled(*given)
            output.sum().backward()
            slope = -math.sin(math.sin(0.2 * num)) * math.cos(0.2 * num) * num
            torch.testing.assert_close(tensor.grad, torch.full((2, 2), 64 * 0.1 * slope))
        return sum(sizes)

    inputs = 2 * 2 + 2 * 64 + 1
    assert kept(lambda operator: False) == inputs
    assert kept(lambda operator: operator is torch.ops.aten.mm.default) == inputs + 2 * 64
    assert inputs < kept(None) <= inputs + 2 * 2 * 64


@canary(joint_graph, "PlainSums", "refuse_other_draws")
def test_graphs_that_compilers_get_wrong() -> None:
    def total(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.add(x, a @ b, alpha=0.1) + torch.add(a.int(), 2, alpha=3)

    tensors = torch.rand(2, 2), torch.rand(2, 2, dtype=torch.float64).float(), torch.rand(2, 2)
    traced = make_fx(total, tracing_mode="fake")(*tensors)
    joint_graph.PlainSums()(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(*tensors), total(*tensors))
    assert not any("alpha" in node.kwargs for node in traced.graph.nodes)

    def drawn(x: Tensor) -> Tensor:
        return torch.empty(2, 8)[:, :: len(x)].normal_()

    for length in (1, 2):
        traced = make_fx(functionalize(drawn), tracing_mode="fake")(torch.ones(length))
        with pytest.raises(RuntimeError, match="random numbers") if length == 2 else contextlib.nullcontext():
            joint_graph.refuse_other_draws(traced.graph)


@canary(capture, "is_captured", "recomputed_when_compiled")
@pytest.mark.parametrize("is_marked", [True, False])
def test_what_a_compiled_backward_computes_again(is_marked: bool) -> None:
    """Of a product and its sine, which the backward needs, only what is marked is not kept."""

    def computation(tensor: Tensor, factor: Tensor) -> list[Tensor]:
        assert capture.is_captured(tensor)
        with capture.recomputed_when_compiled() if is_marked else contextlib.nullcontext():
            product = tensor @ factor
        return [product.sin()]

    given, sizes = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 64, requires_grad=True)], list[int]()
    compiled = capture.capture(computation, given, "aot_eager")
    with _saved(sizes):
        (output,) = compiled(*given)
    output.sum().backward()
    torch.testing.assert_close(given[0].grad, torch.full((2, 2), 64 * math.cos(2.0)))
    assert sum(sizes) == 2 * 2 + 2 * 64 + (0 if is_marked else 2 * 64)
    assert not capture.is_captured(torch.ones(2))


@canary(dynamo, "compiled", "compiler_errors", "is_limit", "modules_watched")
def test_a_function_is_compiled_as_one_piece() -> None:
    def function(module: nn.Module, tensor: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            eager.append(1)
        if tensor.dim() > 1:
            return tensor if tensor.sum() > 0 else -tensor
        result: Tensor = module(tensor) * torch.rand(())
        return result

    eager, waits, module, tensor = list[int](), CountedWait(not_told), nn.Linear(2, 2), torch.ones(2)
    run = dynamo.compiled(function, backend="aot_eager", mode="default", compiling=functools.partial(waits, ""))
    with dynamo.modules_watched():
        torch.manual_seed(0)
        output = run(module, tensor)
        assert (eager, waits.num) == ([], 1)
        torch.manual_seed(0)
        assert torch.equal(output, function(module, tensor))
        module.register_forward_hook(lambda module, args, output: output * 0)
        assert not run(module, tensor).any(), "hooks that are added later are called"
        with pytest.raises(dynamo.compiler_errors()) as broken:
            run(module, torch.ones(1, 2))
        assert not dynamo.is_limit(broken.value)
        assert eager == [1], "nothing of it has run"
        with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(dynamo.compiler_errors()) as limit:
            run(module, tensor.double())
        assert dynamo.is_limit(limit.value)


@canary(backends, "compile_graph")
def test_backends_compile_graphs() -> None:
    tensor = torch.ones(2)
    (output,) = backends.compile_graph(make_fx(lambda x: (x * 2,))(tensor), [tensor], "aot_eager", "default")(tensor)
    assert torch.equal(output, tensor * 2)


# ------------------------------------------------------------------------------------------ Lightning and torchmetrics


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


@canary(lightning_helpers, "ScriptLauncher", "connect", "reduce_tensor")
def test_helpers_of_strategies() -> None:
    launcher = inspect.signature(lightning_helpers.ScriptLauncher)
    assert [*launcher.parameters] == ["cluster_environment", "num_processes", "num_nodes"]
    assert {"cluster_environment", "torch_distributed_backend", "kwargs"} <= _parameters(lightning_helpers.connect)
    assert {"group", "reduce_op"} <= _parameters(lightning_helpers.reduce_tensor)
    for method in (L.Trainer._fit_impl, L.Trainer._validate_impl, L.Trainer._test_impl, L.Trainer._predict_impl):
        assert "weights_only" in _parameters(method)  # which ScriptLauncher notes


@canary(lightning_helpers, "ProcessObserver")
def test_a_process_may_end_by_itself_where_one_that_it_started_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    monkeypatch.setattr(lightning_helpers.time, "sleep", did.append)
    monkeypatch.setattr(os, "kill", lambda *args: did.append(args))
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait()
        observer = lightning_helpers.ProcessObserver(-1, [process], 7.0)
        assert observer._run()  # one look at the processes
    assert did == [7.0, (-1, signal.SIGKILL)]


@canary(lightning_helpers, "load_folders")
def test_what_load_from_checkpoint_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def given(num: int) -> dict[str, Any]:
        state = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
        return {"state_dict": state, "hyper_parameters": {"num": num}, "pytorch-lightning_version": L.__version__}

    monkeypatch.setattr(saving, "pl_load", saving.pl_load)  # undone afterwards
    lightning_helpers.load_folders(lambda path, map_location, weights_only: given(3) if path == "known" else None)
    torch.save(given(4), tmp_path / "file")
    assert [_Linear.load_from_checkpoint(path).num for path in ("known", tmp_path / "file")] == [3, 4]


class _Linear(L.LightningModule):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight, self.bias, self.num = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1)), num


class _Strategy(ParallelStrategy):
    root_device = torch.device("cpu")
    optimizer_state = barrier = broadcast = reduce = all_gather = model_to_device = None  # type: ignore[assignment]


@canary(lightning_helpers, "leave_out_module_names")
def test_profilers_record_names_of_modules() -> None:
    trainer, model = L.Trainer(profiler=PyTorchProfiler(), logger=False, accelerator="cpu"), nn.Sequential(nn.ReLU())
    assert [lightning_helpers.leave_out_module_names(trainer) for _ in range(2)] == [True, False]
    assert not PyTorchProfiler(record_module_names=False)._record_module_names
    trainer.profiler = profiler = PyTorchProfiler()
    profiler._register = RegisterRecordFunction(model)
    profiler._register.__enter__()
    assert model[0]._forward_hooks
    assert lightning_helpers.leave_out_module_names(trainer)
    assert not model[0]._forward_hooks


@canary(lightning_helpers, "reset_optimizers", "layer_sync_of", "has_own_io")
def test_what_strategies_hold() -> None:
    strategy, plugin = _Strategy(), TorchSyncBatchNorm()
    strategy.optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))])]
    lightning_helpers.reset_optimizers(strategy)
    assert (strategy.optimizers, lightning_helpers.layer_sync_of(strategy)) == ([], None)
    strategy._layer_sync = plugin
    assert lightning_helpers.layer_sync_of(strategy) is plugin
    assert strategy.checkpoint_io is strategy._checkpoint_io  # made when it is asked for
    assert not lightning_helpers.has_own_io(strategy)
    strategy.checkpoint_io = AsyncCheckpointIO()
    assert lightning_helpers.has_own_io(strategy)
    for name in ("_configure_launcher", "_launcher", "_precision_plugin"):  # ThreeDStrategy overrides or sets them
        assert hasattr(strategy, name), f"ParallelStrategy.{name}"
    assert _parameters(Precision._wrap_closure) == {"self", "model", "optimizer", "closure"}
    assert _parameters(Precision._after_closure) == {"self", "model", "optimizer"}


@canary(lightning_helpers, "uploading_loggers")
def test_loggers_that_upload_checkpoints() -> None:
    for logger in (WandbLogger, MLFlowLogger):
        assert "self._log_model = log_model" in inspect.getsource(logger.__init__)
    trainer = L.Trainer(accelerator="cpu", logger=[CSVLogger("logs"), uploading := CSVLogger("logs")])
    uploading._log_model = "all"  # type: ignore[attr-defined]
    assert lightning_helpers.uploading_loggers(trainer) == ["CSVLogger"]


@canary(lightning_helpers, "averages_stochastically", "callbacks_of", "leave_schedulers_to_averaging")
def test_schedulers_of_averaging() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[averaging])
    assert averaging in lightning_helpers.callbacks_of(trainer)
    assert lightning_helpers.averages_stochastically(trainer)
    assert "scheduler_state" in averaging.state_dict()
    for state, kept in (({}, 1), ({"scheduler_state": None}, 1), ({"scheduler_state": {}}, 0)):
        trainer.strategy.lr_scheduler_configs = [object()]  # type: ignore[list-item]
        lightning_helpers.leave_schedulers_to_averaging(trainer, {"callbacks": {averaging.state_key: state}})
        assert len(trainer.strategy.lr_scheduler_configs) == kept


@canary(lightning_helpers, "signals_noted", "called_before_batches", "stop_in_time", "requeue", "TunerExit", "Handler")
@canary(lightning_helpers, "is_compiled_whole")
def test_a_module_compiled_as_a_whole() -> None:
    module = L.LightningModule()
    assert not lightning_helpers.is_compiled_whole(module)
    module = from_compiled(torch.compile(module, backend="eager"))
    assert lightning_helpers.is_compiled_whole(module)
    assert not lightning_helpers.is_compiled_whole(to_uncompiled(module))


@canary(lightning_helpers, "put_back_at_end")
def test_signals_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    noted, batches, requeued, before = list[int](), list[None](), list[int](), signal.getsignal(signal.SIGTERM)

    def note(signum: int, frame: object) -> None:
        noted.append(signum)

    connector = trainer._signal_connector
    with lightning_helpers.signals_noted(trainer, note, note):
        connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        lightning_helpers.put_back_at_end(trainer, signal.SIGUSR2, note)
        connector.teardown()
    assert noted == [signal.SIGTERM]
    assert signal.signal(signal.SIGUSR2, signal.SIG_DFL) is note
    assert signal.getsignal(signal.SIGTERM) is before
    lightning_helpers.stop_in_time(trainer)
    assert trainer.received_sigterm
    with lightning_helpers.called_before_batches(trainer, lambda: batches.append(None)):
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert batches == [None]
    assert "_broadcast_sigterm_tensor" in type(trainer.fit_loop.epoch_loop).advance.__code__.co_names
    assert _parameters(type(connector)._slurm_sigusr_handler_fn) == {"self", "signum", "_"}
    monkeypatch.setattr(type(connector), "_slurm_sigusr_handler_fn", lambda self, signum, _: requeued.append(signum))
    lightning_helpers.requeue(trainer, signal.SIGUSR1)
    assert requeued == [signal.SIGUSR1]
    assert issubclass(lightning_helpers.TunerExit, Exception)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A default process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@canary(process_groups, "further_store", "object_device", "abort_process_group")
def test_groups_of_processes() -> None:
    process_groups.further_store("one").set("name", "text")
    assert process_groups.further_store("one").get("name") == b"text"
    assert not process_groups.further_store("other").check(["name"])
    assert process_groups.object_device(dist.group.WORLD) == "cpu", "where objects can go by the host"
    dist.new_group([0])
    process_groups.abort_process_group()
    assert not dist.is_initialized()


def _groups_of_gloo() -> list[dist.ProcessGroup]:
    """Groups as torch makes them, then others, each in both ways of debugging, after a collective in each."""
    groups: list[Any] = []
    for way in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
        dist.set_debug_level(way)
        groups.append(dist.new_group([0]))
        with process_groups.one_gloo_thread():
            groups.append(dist.new_group([0], timeout=timedelta(seconds=7)))
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert float(total) == 1
    return groups


@pytest.mark.usefixtures("group_of_one")
@canary(process_groups, "one_gloo_thread", "num_gloo_threads")
def test_gloo_runs_collectives_in_as_many_threads_as_its_options_say() -> None:
    made, cpu = distributed_c10d.ProcessGroupGloo, torch.device("cpu")
    try:
        torchs, ours, torchs_debugged, ours_debugged = _groups_of_gloo()
        assert [process_groups.num_gloo_threads(group, "cpu") for group in (torchs, torchs_debugged)] == [2, 2]
        assert [process_groups.num_gloo_threads(group, "cpu") for group in (ours, ours_debugged)] == [1, 1]
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        assert names.count("pt_gloo_runloop\n") == 2 + 2 + 1 + 2 * (2 + 1), "that of the default group, and of these"
        assert distributed_c10d.ProcessGroupGloo is made
        theirs, own = (group._get_backend(cpu).options for group in (torchs, ours))
        assert theirs._timeout == dist.default_pg_timeout
        assert own._timeout == timedelta(seconds=7)
        assert own.group_name == ours.group_name
        assert own.global_ranks_in_group == theirs.global_ranks_in_group == [0]
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@canary(lightning_helpers, "set_device", "logging_as_alone")
def test_modules_know_their_device_and_logging_whether_there_are_other_processes() -> None:
    module = L.LightningModule()
    lightning_helpers.set_device(module, device=torch.device("meta"))
    assert module.device == torch.device("meta")
    assert "_distributed_is_initialized" in result._ResultCollection._get_cache.__code__.co_names
    before = result._distributed_is_initialized
    with lightning_helpers.logging_as_alone():
        assert not result._distributed_is_initialized()
        assert result._distributed_is_initialized is not before
    assert result._distributed_is_initialized is before


class _Unsized:
    """Gives four batches, from the one that its state says."""

    first = 0

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(i) for i in range(self.first, 4)])

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


class _Streamed(L.LightningModule):
    seen: typing.ClassVar[list[Any]] = []

    def train_dataloader(self) -> Any:
        return _Unsized()

    def on_fit_start(self) -> None:
        trainer, loop = self.trainer, self.trainer.fit_loop
        assert lightning_helpers.active_loaders(trainer) is not None  # which makes them
        assert [int(batch) for batch in lightning_helpers.fetched_ahead(trainer)] == [0]
        loop._combined_loader_states_to_load, loop._restarting = [{"first": 2}], True
        lightning_helpers.load_loader_states(trainer)
        loop._restarting = False
        assert [int(batch) for batch in lightning_helpers.fetched_ahead(trainer)] == [2]
        lightning_helpers.change_loaders(trainer, lambda loader: [loader])
        assert isinstance(trainer.train_dataloader, list)
        lightning_helpers.change_loaders(trainer, lambda loader: loader[0])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(int(batch))

    def configure_optimizers(self) -> None:
        return None


_FIT: dict[str, Any] = {**QUIET, "max_epochs": 1, "enable_checkpointing": False}


@pytest.mark.filterwarnings("ignore:.*configure_optimizers", "ignore:.*training_step. returned", "ignore:.*num_workers")
@canary(lightning_helpers, "change_loaders", "fetched_ahead", "load_loader_states")
def test_dataloaders_that_were_made_early() -> None:
    L.Trainer(**_FIT).fit(_Streamed())
    assert _Streamed.seen == [2, 3]


@canary(distributions, "arguments_unchecked")
def test_arguments_of_distributions() -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # torch.compile leaves it off
    with distributions.arguments_unchecked():
        torch.distributions.Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)


class _Steps:
    def one(self, batch: Any) -> None: ...
    def two(self, batch: Any, index: int) -> None: ...
    def all(self, *args: Any) -> None: ...
    def fetching(self, dataloader_iter: Any) -> None: ...


class _Rehearsed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Any] = []

    def val_dataloader(self) -> Any:
        return DataLoader(range(3))  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return {"a": DataLoader(range(4)), "b": DataLoader(range(4, 8))}  # type: ignore[arg-type]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch, dataloader_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_fit_start(self) -> None:
        optimizers, schedulers = lightning_helpers.make_optimizers(self)
        lightning_helpers.set_up_validation(self.trainer)
        steps = _Steps()
        arguments = [lightning_helpers.further_arguments(self.trainer, s) for s in (steps.one, steps.two, steps.all)]
        fetching = [lightning_helpers.fetches_itself(s) for s in (steps.all, steps.fetching)]
        rates = optimizers[0].param_groups[0]["lr"], schedulers[0].scheduler.get_last_lr()
        self.seen += [rates, self.trainer.num_val_batches, arguments, fetching]

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        loaders = lightning_helpers.active_loaders(self.trainer)
        assert loaders is not None
        self.seen.append((len(loaders.flat), loaders.is_sequential, loaders.structured([1, 2])))

    def validation_step(self, batch: Any) -> None: ...  # type: ignore[override]


@pytest.mark.filterwarnings("ignore:.*training_step. returned", "ignore:.*num_workers")
@canary(lightning_helpers, "make_optimizers", "set_up_validation", "further_arguments", "fetches_itself")
@canary(lightning_helpers, "active_loaders", "Loaders", "before_transfer")
def test_what_comes_before_a_step() -> None:
    module = _Rehearsed()
    L.Trainer(**_FIT, limit_train_batches=1).fit(module)
    assert module.seen == [(0.5, [0.5]), [3], [(), (0,), (0,)], [False, True], (2, False, {"a": 1, "b": 2})]
    assert lightning_helpers.before_transfer(module, 1) == (1, 0)
    assert lightning_helpers.Loaders(flat=[], is_sequential=True, _spec=None).is_sequential


@canary(lightning_helpers, "start_anew", "FIXED_NAMES")
def test_states_of_metrics() -> None:
    metric = torchmetrics.MeanMetric()
    metric.update(torch.tensor(4.0))
    metric.compute()
    assert set(vars(metric)) >= lightning_helpers.FIXED_NAMES
    lightning_helpers.start_anew(metric)
    assert not metric.update_called
    metric.update(torch.tensor(2.0))
    assert metric.compute() == 2.0


@canary(lightning_helpers, "random_states_kept")
def test_random_states() -> None:
    def draw() -> list[float]:
        return [float(draw()) for draw in (lambda: torch.rand(()), random.random, np.random.rand)]

    drawn: list[list[float]] = []
    with contextlib.suppress(KeyError), lightning_helpers.random_states_kept():
        drawn.append(draw())
        raise KeyError
    assert draw() == drawn[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@canary(stored_index, "CLASSES", "layout_named")
def test_the_index_of_a_folder(tmp_path: Path) -> None:
    named = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            named.add(found)
            return found

    save({"w": torch.ones(2), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        Noting(file).load()
    assert {each for each in named if each.__module__.startswith("torch.distributed.checkpoint")} <= {
        *stored_index.CLASSES
    }
    assert stored_index.layout_named in named
    assert stored_index.layout_named("torch.strided") is torch.strided


@canary(stored_file, "read_header", "save_from")
def test_files_of_one_tensor_at_a_time(tmp_path: Path) -> None:
    first, second, other = torch.arange(6.0).view(2, 3), torch.arange(4).to(torch.uint8), torch.full((10,), 7.0)

    def content(storage: torch.UntypedStorage) -> torch.UntypedStorage:  # larger than what it stands for
        return other.untyped_storage() if storage.data_ptr() == first.data_ptr() else storage

    with (tmp_path / "x").open("wb") as file:
        stored_file.save_from({"a": first, "b": [second, first], "c": "text"}, file, content)
    loaded = torch.load(tmp_path / "x", weights_only=True)
    assert torch.equal(loaded["a"], torch.full((2, 3), 7.0))
    assert loaded["b"][1].data_ptr() == loaded["a"].data_ptr()
    assert torch.equal(loaded["b"][0], second)
    torch.save(second[1:].clone(), tmp_path / "y")
    with (tmp_path / "y").open("rb") as file:
        header, start = stored_file.read_header(file)
        file.seek(start)
        assert file.read(3) == bytes([1, 2, 3])
    assert (header.shape, header.dtype, header.stride()) == ((3,), torch.uint8, (1,))


class _Counts(L.LightningModule):
    """Steps nothing; a batch is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), list[int]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.tolist()
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@canary(
    data_loops,
    "Fetcher",
    "called_before_iteration",
    "epochs_begun",
    "iterates_anew",
    "keeps_place",
    "num_read",
    "read_again",
    "training_loaders",
)
def test_where_a_fit_is_in_its_data(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUIET, "max_epochs": 2, "enable_checkpointing": False}
    loader = torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type, var-annotated]
    calls: list[Any] = []

    def fitted(trainer: L.Trainer, path: Path | None = None) -> list[int]:
        def begin(fetcher: data_loops.Fetcher, go_on: Callable[[], None]) -> None:
            assert isinstance(fetcher, data_loops.Fetcher)
            calls.append((data_loops.iterates_anew(trainer), num := data_loops.num_read(trainer)))
            if num:
                data_loops.read_again(fetcher, num)
            go_on()
            assert fetcher.fetched == num

        model = _Counts()
        noted = data_loops.called_before_iteration(trainer, lambda: calls.append(data_loops.training_loaders(trainer)))
        with noted, data_loops.epochs_begun(trainer, begin), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*num_workers.*")
            trainer.fit(model, loader, ckpt_path=path)
        return model.seen

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "second.ckpt")

    assert fitted(L.Trainer(callbacks=[Saves()], **settings)) == [0, 1, 2, 3] * 2
    assert calls == [[loader], (False, 0), (True, 0)]
    calls.clear()
    assert fitted(L.Trainer(**settings), tmp_path / "second.ckpt") == [2, 3, 0, 1, 2, 3]
    assert calls == [[loader], (False, 2), (True, 0)]
    assert not data_loops.keeps_place(loader)
