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
    for tested in ("2.13.0+cpu", "2.15.3"):
        versions.warn_of_untested(tested)
    for untested, text in (
        (("2.16.0a0+git",), "torch 2.13 to 2.15, but 2.16.0a0"),
        (("2.14.1", "2.7.0"), "lightning 2.6, but"),
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

VALUES: list[tuple[ModuleType, tuple[str, ...], Reads, object]] = [
    (tensors, ("contiguous_stride",), lambda: tensors.contiguous_stride(torch.Size((2, 3, 4))), (12, 4, 1)),
    (
        tensors,
        ("are_transforms_active",),
        lambda: torch.vmap(_adds_whether_transformed)(torch.zeros(1)).tolist(),
        [1.0],
    ),
    (tensors, ("are_transforms_active",), tensors.are_transforms_active, False),
    (
        tensors,
        ("HALVES", "widened"),
        lambda: {tensors.widened(torch.zeros(1, dtype=dtype)).dtype for dtype in tensors.HALVES},
        {torch.float32},
    ),
    (tensors, ("widened",), lambda: tensors.widened(torch.zeros(1).double()).dtype, torch.float64),
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
        ("HigherOrderOperator",),
        lambda: isinstance(torch.ops.higher_order.flex_attention, dispatch.HigherOrderOperator),
        True,
    ),
    (
        dispatch,
        ("name_of", "GROUPED_MM", "SCALED_GROUPED_MM"),
        lambda: [
            dispatch.name_of(operator)
            for operator in (
                torch.ops.aten.mm.default,
                torch.ops.aten.mm.dtype,
                torch.ops.higher_order.flex_attention,
                dispatch.GROUPED_MM.default,
                dispatch.SCALED_GROUPED_MM.default,
            )
        ],
        ["aten::mm", "aten::mm.dtype", "flex_attention", "aten::_grouped_mm", "aten::_scaled_grouped_mm"],
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


def _adds_whether_transformed(tensor: Tensor) -> Tensor:
    return tensor + tensors.are_transforms_active()


@pytest.mark.parametrize(("adapter", "symbols", "read", "expected"), VALUES)
def test_values(adapter: ModuleType, symbols: tuple[str, ...], read: Reads, expected: object) -> None:
    @canary(adapter, *symbols)
    def check() -> None:
        assert read() == expected

    check()


# ---------------------------------------------------------------------------------------------------- tensors, modules


@canary(tensors, "apart")
def test_complex_views_of_real_numbers() -> None:
    real = torch.ones(3, 4)
    view = torch.view_as_complex(real.view(3, 2, 2))
    mode = fake_tensors.FakeTensorMode()
    with fake_tensors.on_fake_tensors(mode), pytest.raises(RuntimeError, match="last dimension"):
        mode.from_tensor(view)
    assert torch.equal(tensors.apart(view), view)
    assert fake_tensors.FakeTensorMode().from_tensor(tensors.apart(view)).is_complex()
    assert tensors.apart(real[0])._base is real


@canary(tensors, "base_of", "is_view", "version_of")
def test_views() -> None:
    counted = torch.zeros(2)
    before = tensors.version_of(counted)
    counted[:1].add_(1)
    assert tensors.version_of(counted) > before, "an in-place change of a view counts"
    tensor = torch.zeros(2, requires_grad=True) * 1
    view = tensor[:1]
    assert tensors.base_of(view) is tensor
    assert tensors.base_of(tensor) is None
    assert tensors.is_view(view)
    assert not tensors.is_view(tensor)


@canary(autograd, "reachable_nodes")
def test_nodes_behind_an_output() -> None:
    first, second = torch.ones(2, requires_grad=True).exp(), torch.ones(2, requires_grad=True).exp()
    output = (first * 2).sum()
    for end in (output, get_gradient_edge(output)):
        nodes = autograd.reachable_nodes([end, None])
        assert first.grad_fn in nodes
        assert second.grad_fn not in nodes


@canary(clipping, "clipping_replaced")
def test_clipping_is_replaced() -> None:
    weight, other = nn.Parameter(torch.ones(4)), torch.full((4,), 3.0)
    scaled: list[Any] = []

    def replace_norm(norm: clipping.TotalNorm) -> clipping.TotalNorm:
        return lambda tensors, *args: norm([*tensors, other], *args)

    with clipping.clipping_replaced(replace_norm, lambda parameters, *args: scaled.append((parameters, *args[:2]))):
        weight.grad = torch.full((4,), 4.0)
        assert nn.utils.clip_grad_norm_([weight], 5.0) == 10.0
        assert nn.utils.get_total_norm([weight.grad]) == 10.0
        nn.utils.clip_grad_value_([nn.Parameter(torch.ones(1))], 1.0)  # nothing to clamp
    assert scaled == [([weight], 5.0, torch.tensor(10.0))]
    assert nn.utils.clip_grad_norm_([weight], 1.0) == 8.0


@canary(optimizers, "has_step_hooks", "first_step_post_hook")
def test_hooks_of_optimizers() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    calls: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    assert optimizers.has_step_hooks(optimizer)
    assert not optimizers.has_step_hooks(Bare())
    assert not optimizers.has_step_hooks(nn.Linear(1, 1))
    optimizer.register_step_post_hook(lambda *_: calls.append("users"))
    handle = optimizers.first_step_post_hook(optimizer, lambda *_: calls.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert calls == ["first", "users", "users"]


@canary(optimizers, "step_without_hooks")
def test_steps_without_hooks() -> None:
    class Inheriting(torch.optim.AdamW):
        pass

    for kind in (torch.optim.SGD, Inheriting):
        calls: list[str] = []
        parameter = nn.Parameter(torch.ones(2))
        optimizer = kind([parameter], lr=0.5)
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("hook"))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        parameter.grad = torch.ones(2)
        optimizers.step_without_hooks(optimizer)
        assert (parameter < 0.6).all()
        assert parameter.requires_grad
        assert calls == []


@canary(autograd, "next_node_number", "number_of_node", "frames_of_forward")
def test_nodes_tell_when_and_where_they_were_made() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        first = autograd.next_node_number()
        doubled = 2 * x
        second = autograd.next_node_number()
        total = doubled.sum()
    assert doubled.grad_fn is not None
    assert total.grad_fn is not None
    numbers = [autograd.number_of_node(node) for node in (doubled.grad_fn, total.grad_fn)]
    assert first <= numbers[0] < second <= numbers[1] < autograd.next_node_number()
    assert "doubled = 2 * x" in autograd.frames_of_forward(doubled.grad_fn)[-1]
    unseen = x.sum().grad_fn
    assert unseen is not None
    assert autograd.frames_of_forward(unseen) == []


@canary(autograd, "backwards_seen")
def test_backwards_are_seen_before_they_run() -> None:
    x = torch.ones(2, requires_grad=True)
    first, second, third = x.sum(), (2 * x).sum(), (3 * x).sum()
    seen: list[object] = []

    def see(outputs: Iterable[object]) -> None:
        seen.extend(outputs)
        assert x.grad is None

    grad = torch.autograd.grad
    with autograd.backwards_seen(see):
        grad(first, x)
        second.backward()
    third.backward()
    assert len(seen) == 2
    assert seen[0] is first
    assert seen[1] is second


@canary(autograd, "when_backward_ends")
def test_end_of_a_backward() -> None:
    calls: list[str] = []
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    second.register_post_accumulate_grad_hook(lambda _: autograd.when_backward_ends(lambda: calls.append("end")))
    first.register_post_accumulate_grad_hook(lambda _: calls.append("first"))
    (first * second.exp()).sum().backward()
    assert calls == ["first", "end"]


@canary(autograd, "has_saved_tensor_hooks")
def test_hooks_on_saved_tensors_are_seen() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(autograd.has_saved_tensor_hooks())
        return x * 2

    x = torch.ones(2, requires_grad=True)
    function(x)
    with torch.autograd.graph.save_on_cpu():
        function(x)
    checkpoint(function, x, use_reentrant=False)
    assert seen == [False, True, True]


@canary(modules, "has_backward_hooks")
def test_backward_hooks_of_a_module_are_seen() -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
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
            with pytest.raises(RuntimeError) as caught:
                take(torch.ones(2))
            assert autograd.is_refusal_of_hooks(caught.value)
    assert not autograd.is_refusal_of_hooks(RuntimeError("another"))
    x = torch.ones(2, requires_grad=True)
    function = dynamo.compiled(torch.sin, backend="aot_eager", mode="default", compiling=contextlib.nullcontext)
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        gradient.sum().backward()
    assert autograd.is_refusal_of_compiled_code(caught.value)
    assert not autograd.is_refusal_of_compiled_code(RuntimeError("another"))


@canary(autograd, "is_cast", "is_cast_of_leaf")
def test_casts_are_known() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert autograd.is_cast(weight.to(torch.bfloat16))
    assert not autograd.is_cast(weight * 2)
    assert not autograd.is_cast(weight)
    seen: list[tuple[bool, bool]] = []

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
    x, weight = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
    kept: set[int] = set()

    def see(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        with autocast.autocast_cache(enabled=True):
            with torch.no_grad():
                F.linear(x, weight)
            x.requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
                outputs = [(F.linear(x * 1.0, weight) * 3).sum() for _ in range(2)]
            for output in outputs:
                output.backward()
            assert weight.grad is not None
            assert weight.grad.unique().tolist() == [12.0], "of both, though the copy is the same"
        weight.data.fill_(2.0)
        assert F.linear(x, weight).unique().tolist() == [4.0], "no copy is left"
    assert len(kept) == 3, "x twice, the weight once"


@canary(autocast, "as_autocast")
def test_copies_of_shards_are_kept_in_a_step_until_the_shard_changes() -> None:
    weight = nn.Parameter(torch.ones(2, 2))

    def read() -> Tensor:
        found = weight.view_as(weight)
        tensors.count_as_parameter(found)
        return autocast.as_autocast(found)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert read().dtype == torch.float32, "no step runs"
        with autocast.autocast_cache(enabled=True):
            first, second = read(), read()
            assert first.data_ptr() == second.data_ptr()
            assert autograd.is_cast(first)
            (first.sum() * 3 + second.sum()).backward()
            assert weight.grad is not None
            assert weight.grad.unique().tolist() == [4.0], "of both"
            with torch.no_grad():
                weight.fill_(2.0)
            assert read().unique().tolist() == [2.0]
            with autocast.autocast_cache(enabled=False):
                assert read().dtype == torch.float32
        with autocast.autocast_cache(enabled=True):
            assert read().data_ptr() != first.data_ptr(), "of another step"


@canary(autograd, "is_in_backward", "current_backward")
def test_backwards_are_noticed_and_have_numbers() -> None:
    noticed: list[bool] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda _: noticed.append(autograd.is_in_backward()))
    parameter.sum().backward()
    assert noticed == [True]
    assert not autograd.is_in_backward()
    numbers: list[int] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda _: numbers.append(autograd.current_backward()))
    x = torch.ones(2, requires_grad=True)
    (torch.utils.checkpoint.checkpoint(lambda x: x * parameter, x, use_reentrant=True) * parameter).sum().backward()
    parameter.sum().backward()
    assert len(numbers) == len(set(numbers)) == 3


@canary(tensors, "untransformed")
def test_tensors_inside_of_transforms() -> None:
    seen: list[torch.Size] = []

    def function(x: Tensor) -> Tensor:
        seen.append(tensors.untransformed(x).shape)
        return x.sum()

    torch.vmap(torch.func.grad(function))(torch.ones(2, 3))
    assert seen == [torch.Size((2, 3))]
    plain = torch.ones(2)
    assert tensors.untransformed(plain) is plain


@canary(tensors, "makes_a_parameter")
def test_parameters_made_of_a_subclass() -> None:
    seen: list[bool] = []

    class Seeing(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach:
                seen.append(tensors.makes_a_parameter())
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Seeing)
    nn.Parameter(tensor)
    tensor.detach()
    assert seen == [True, False]


@canary(tensors, "storage_id", "storage_of")
def test_storages() -> None:
    with fake_tensors.FakeTensorMode():
        tensor, other = torch.zeros(2), torch.zeros(2)
    assert tensors.storage_id(tensor.untyped_storage()) == tensors.storage_id(tensor[:1].untyped_storage())
    assert tensors.storage_id(tensor.untyped_storage()) != tensors.storage_id(other.untyped_storage())
    assert tensors.storage_of(tensor) == tensors.storage_id(tensor.untyped_storage())


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
    parameter = nn.Parameter(torch.zeros(2))
    assert not tensors.has_gradient_hooks(parameter)
    handle = parameter.register_hook(lambda gradient: None)
    assert tensors.has_gradient_hooks(parameter)
    handle.remove()
    assert not tensors.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    assert tensors.has_gradient_hooks(parameter)


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
    tensor = torch.zeros(2, requires_grad=True)
    _Passed.apply(tensor).backward(torch.ones(2))
    gradient = torch.ones(2)
    (_Passed.apply(tensor) + _Passed.apply(tensor)).backward(gradient)
    assert _Passed.referred[1:] == [True, True]


@canary(modules, "CALL", "call_of")
def test_what_a_call_of_a_module_calls() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *args: "hooked")
    assert modules.call_of(module)(torch.ones(2)) == "hooked"
    vars(module)[modules.CALL] = lambda *args: "called"
    assert module(torch.ones(2)) == "called"
    assert modules.CALL not in vars(copy.deepcopy(module))
    module.compile(backend="eager")
    assert vars(module)[modules.CALL](torch.ones(2)) == "hooked"


@canary(modules, "runs_beneath_torch_functions", "is_compiled", "is_wrapper_of_compiler")
def test_forwards_that_no_torch_function_sees() -> None:
    module = nn.Linear(2, 2)
    assert not modules.runs_beneath_torch_functions(module)
    assert modules.is_compiled(torch.compile(module, backend="eager"))
    assert modules.runs_beneath_torch_functions(torch.compile(module, backend="eager"))
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit.script"):
        scripted = torch.jit.script(module)
    assert modules.runs_beneath_torch_functions(scripted)
    assert not modules.is_compiled(scripted)
    module.compile(backend="eager")
    assert modules.runs_beneath_torch_functions(module)


@canary(modules, "APPLY", "put")
def test_what_changes_tensors_of_a_module() -> None:
    module = nn.GRU(2, 2)
    weight = nn.Parameter(torch.zeros_like(module.weight_hh_l0))
    modules.put(module, "weight_hh_l0", weight)
    assert module.weight_hh_l0 is weight
    assert any(tensor is weight for tensor in module.all_weights[0])
    plain = nn.BatchNorm1d(2)
    mean = torch.ones(2)
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
def test_hooks_that_look() -> None:
    layer, called, seen = nn.Linear(2, 2), list[str](), list[str]()
    own = (
        layer.register_forward_pre_hook(lambda module, args: called.append("before")),
        layer.register_forward_hook(lambda module, args, output: called.append("after")),
    )
    of_all = (
        register_module_forward_pre_hook(lambda module, args: called.append("before any")),
        register_module_forward_hook(lambda module, args, output: called.append("after any")),
    )
    for owner, handles, kind in ((layer, own, ""), (None, of_all, " any")):
        for registry, handle, name in zip(
            modules.observer_registries(owner), handles, ("before", "after"), strict=True
        ):
            registry[handle.id] = lambda *args, name=name + kind: seen.append(name)
    layer(torch.ones(2))
    for handle in (*own, *of_all):
        handle.remove()
    layer(torch.ones(2))
    assert called == []
    assert seen == ["before any", "before", "after any", "after"]


@canary(
    modules,
    "PARAMETERS",
    "BUFFERS",
    "CHILDREN",
    "parameters_of",
    "buffers_of",
    "children_of",
    "RunningNorm",
    "BatchNorm",
    "named_state",
)
def test_registries_of_modules() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    assert modules.children_of(module) == {"0": norm} == vars(module)[modules.CHILDREN]
    assert modules.parameters_of(norm) == {"weight": norm.weight, "bias": norm.bias} == vars(norm)[modules.PARAMETERS]
    assert modules.buffers_of(norm).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    assert modules.buffers_of(norm) is vars(norm)[modules.BUFFERS]
    modules.parameters_of(norm)["weight"] = other = nn.Parameter(torch.ones(2))
    assert norm.weight is other
    found = {name: (tensor, owner) for name, tensor, owner in modules.named_state(module)}
    assert found.keys() == dict([*module.named_parameters(), *module.named_buffers()]).keys()
    assert found["0.weight"] == (other, norm)
    assert isinstance(norm, modules.RunningNorm)
    assert isinstance(nn.InstanceNorm1d(2), modules.RunningNorm)
    assert not isinstance(nn.LayerNorm(2), modules.RunningNorm)
    assert issubclass(nn.SyncBatchNorm, modules.BatchNorm)
    assert not isinstance(nn.InstanceNorm1d(2), modules.BatchNorm)


@canary(
    modules,
    *("forward_hooks", "forward_hooks_with_kwargs", "forward_hook_registries", "has_hooks"),
    *("forward_hooks_copied", "attributes_replaced"),
)
def test_hooks_of_modules() -> None:
    module = nn.Linear(1, 1)
    assert not modules.has_hooks(module)
    with modules.forward_hooks_copied(module):
        handle = module.register_forward_hook(lambda *args, **kwargs: None, with_kwargs=True)
        assert list(modules.forward_hooks(module)) == [handle.id] == list(modules.forward_hooks_with_kwargs(module))
        assert modules.has_hooks(module)
        assert sum(handle.id in registry for registry in modules.forward_hook_registries(module)) == 2
        modules.forward_hooks(module).pop(handle.id)
        module(torch.zeros(1))
    assert not modules.has_hooks(module)
    with modules.attributes_replaced(module, {"forward": len, "training": False}):
        assert module.forward is len
        assert not module.training
    assert "forward" not in vars(module)
    assert module.training
    for register in (
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    ):
        handle = register(lambda *args: None)
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
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@canary(dispatch, "OperatorMode", "TorchDispatchMode", "dispatch_modes", "no_dispatch_modes")
def test_dispatch_modes() -> None:
    with _Operators() as mode, fake_tensors.FakeTensorMode() as fake, _Operators() as inner:
        assert dispatch.dispatch_modes() == [fake, mode, inner]
        with dispatch.no_dispatch_modes():
            real = torch.zeros(2)
            assert dispatch.dispatch_modes() == []
        assert mode.calls == []
    assert type(real) is Tensor
    with _Operators() as mode:
        torch.zeros(2).neg()
    assert mode.calls == [torch.ops.aten.zeros.default, torch.ops.aten.neg.default]
    eager = torch.compiler.set_stance("force_eager")
    with eager, pytest.warns(UserWarning, match="flex_attention"), _Operators() as mode:
        flex_attention(*[torch.zeros(1, 1, 2, 2)] * 3)
    assert torch.ops.higher_order.flex_attention in mode.calls


@canary(dispatch, "OpOverload", "schema_of", "written_arguments")
def test_schemas() -> None:
    op = torch.ops.aten.native_batch_norm.default
    assert isinstance(op, dispatch.OpOverload)
    names = [argument.name for argument in dispatch.schema_of(op).arguments]
    assert names[3:5] == ["running_mean", "running_var"]
    tensor, out = torch.zeros(2), torch.zeros(2)
    assert dispatch.written_arguments(torch.ops.aten.add_.Tensor, (tensor, out), {}) == [tensor]
    written = dispatch.written_arguments(torch.ops.aten.add.out, (tensor, tensor), {"out": out})
    assert len(written) == 1
    assert written[0] is out
    assert dispatch.written_arguments(torch.ops.aten.add.Tensor, (tensor, out), {}) == []


@canary(dispatch, "makes_a_view")
def test_operators_that_make_a_view() -> None:
    aten = torch.ops.aten
    assert all(map(dispatch.makes_a_view, (aten.t.default, aten.view.default, aten.detach.default, aten.select.int)))
    assert not any(map(dispatch.makes_a_view, (aten._to_copy.default, aten.add_.Tensor, aten.add.out, aten.mm.default)))
    others = aten.view.dtype, aten.view_as_complex.default, aten.split.Tensor, torch.ops.higher_order.flex_attention
    assert not any(map(dispatch.makes_a_view, others))


@canary(dispatch, "is_in_compiled_code")
def test_compiled_code_is_known_in_a_dispatch_mode() -> None:
    seen: list[bool] = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(dispatch.is_in_compiled_code())
            return func(*args, **(kwargs or {}))

    module = nn.ReLU()
    with Mode():
        module(torch.ones(2))
        module.compile(backend="eager")
        x = torch.ones(2)
        module(x)
    assert seen == [False, False, False, True]


@canary(dispatch, "alias_below_autograd", "autograd_recording")
def test_a_dispatch_makes_aliases_and_may_record_a_graph() -> None:
    aliases, made, weight = list[Tensor](), list[Tensor](), torch.ones(2, requires_grad=True)

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                aliases.append(dispatch.alias_below_autograd(answer))
                made.append(weight * 2)
                with dispatch.autograd_recording():
                    made.append(weight * 2)
            return answer

    with Mode():
        tensor = torch.ones(2, requires_grad=True).exp()
    version = tensors.version_of(aliases[0])
    tensor.detach().add_(1.0)
    assert tensors.version_of(aliases[0]) == version + 1
    assert aliases[0].grad_fn is None
    assert aliases[0].tolist() == tensor.tolist()
    assert [each.requires_grad for each in made] == [False, True]


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
    assert dispatch.LOCAL_SCALAR_DENSE(tensor[1]) == 1.0
    assert dispatch.TO_COPY(tensor, dtype=torch.int64).dtype == torch.int64
    assert dispatch.UNSAFE_VIEW(tensor, [3, 1]).shape == (3, 1)
    assert dispatch.RESHAPE_ALIAS(tensor, [3, 1], [1, 1]).shape == (3, 1)
    assert len(dispatch.UNIQUE2(tensor)) == 3, "values, inverse, counts"
    dispatch.INDEX_PUT_IMPL(tensor, [torch.tensor([0])], torch.tensor([5.0]))
    assert tensor.tolist() == [5.0, 1.0, 2.0]
    with _Operators() as mode:
        tensor.unique()
        tensor[0].item()
        tensor.to(torch.int64)
    assert {dispatch.UNIQUE2, dispatch.LOCAL_SCALAR_DENSE, dispatch.TO_COPY} <= set(mode.calls)
    tensor = torch.arange(3.0)
    assert torch.equal(dispatch.SOFTMAX(tensor, 0, False), tensor.softmax(0))
    assert torch.equal(dispatch.LOG_SOFTMAX(tensor, 0, False), tensor.log_softmax(0))
    output, _ = dispatch.FUSED_RMS_NORM(tensor, [3], None, 1e-5)
    torch.testing.assert_close(output, F.rms_norm(tensor, [3], eps=1e-5))
    with _Operators() as mode:
        tensor.softmax(0)
        tensor.log_softmax(0)
    assert mode.calls == [dispatch.SOFTMAX, dispatch.LOG_SOFTMAX]


@canary(dispatch, "foreach_multiply", "unscale_and_check")
def test_lists_are_multiplied_and_what_is_not_finite_is_found() -> None:
    given = [torch.tensor([3.0, 4.0]), torch.tensor([-2.0], dtype=torch.bfloat16)]
    dispatch.foreach_multiply(given, torch.tensor(0.5))
    assert [(tensor.tolist(), tensor.dtype) for tensor in given] == [
        ([1.5, 2.0], torch.float32),
        ([-1.0], torch.bfloat16),
    ]
    for last, found in ((1.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        tensors, flag = [torch.tensor([4.0, 8.0]), torch.tensor([last], dtype=torch.float16)], torch.zeros(1)
        dispatch.unscale_and_check(tensors, flag, torch.full((1,), 0.25))
        assert tensors[0].tolist() == [1.0, 2.0]
        assert flag.item() == found


# -------------------------------------------------------------------------------------------------------- fake tensors


@canary(
    fake_tensors,
    *("FakeTensor", "FakeTensorMode", "unset_fake_temporarily"),
    *("DataDependentOutputException", "DynamicOutputShapeException"),
)
def test_fake_tensors() -> None:
    with fake_tensors.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.zeros(2)
        assert (fake + torch.ones(2)).shape == (2,)
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
    name = "torch._subclasses.fake_tensor"
    assert logging.getLogger(name) in (importlib.import_module(name).log, logging.getLogger(name))
    assert importlib.import_module(name).log.name == name
    with fake_tensors.on_fake_tensors(fake_tensors.FakeTensorMode()):
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        assert importlib.import_module(name).log.disabled
    assert not importlib.import_module(name).log.disabled
    assert caplog.records == []


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
    @dataclass
    class Other(_Pair):
        pass

    for _ in range(2):
        pytree.register_dataclass(_Pair)
        pytree.register_dataclass(Other)
        assert pytree.registered_dataclasses() == [_Pair, Other]
        assert pytree.tree_map(str, [_Pair(1, None), Other(2, 3)]) == [_Pair("1", None), Other("2", "3")]
        pytree.forget_dataclasses([_Pair, Other])
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

    seen: list[Any] = []
    tensor = torch.ones(2, requires_grad=True)
    with custom_functions.custom_functions_seen(answer):
        _Doubled.apply(tensor)
        _apply_doubled(tensor).sum().backward()
    _Doubled.apply(tensor)
    assert seen == [_Doubled, _Doubled]
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2.0, 2.0]


@canary(autograd, "checkpoints_replaced", "recomputed_by", "is_reentrant", "StopRecomputation")
def test_checkpoints() -> None:
    calls: list[str] = []

    def function(tensor: Tensor) -> Tensor:
        calls.append("function")
        try:
            return tensor.exp().neg()
        except autograd.StopRecomputation:
            calls.append("stopped")
            raise

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            calls.append("again")
            return function(*args)

        return called

    tensor = torch.ones(2, requires_grad=True)
    with autograd.recomputed_by(again):
        output = checkpoint(function, tensor, use_reentrant=False)
    assert calls == ["function"]
    output.sum().backward()
    assert calls == ["function", "again", "function", "stopped"]

    seen: list[Any] = []

    def answer(cls: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append((autograd.is_reentrant(cls), args[0]))
        return apply(*args, **kwargs)

    with custom_functions.custom_functions_seen(answer):
        checkpoint(function, tensor, use_reentrant=True)
    assert seen == [(True, function)]


@canary(autograd, "checkpoints_noted", "is_checkpointing")
def test_checkpoints_that_are_made() -> None:
    seen: list[bool] = []

    def function(tensor: Tensor) -> Tensor:
        seen.append(autograd.is_checkpointing())
        return tensor.exp()

    tensor = torch.ones(2, requires_grad=True)
    with autograd.checkpoints_noted() as noted:
        output = checkpoint(function, tensor, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        function(tensor)
    assert noted == [function]
    assert seen == [True, False]
    output.sum().backward()
    assert seen == [True, False, True]  # computed again
    assert not autograd.is_checkpointing()


@canary(autograd, "has_reentrant_checkpoints")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_reentrant_checkpoints_in_a_graph(use_reentrant: bool) -> None:
    tensor = torch.ones(2, requires_grad=True)
    output = checkpoint(torch.exp, tensor, use_reentrant=use_reentrant) * 2
    assert autograd.has_reentrant_checkpoints([tensor, output]) == use_reentrant


# ------------------------------------------------------------------------------------------------ DTensor, collectives


@canary(dtensor, "ShardingRules", "Propagation", "Move", "NoRule")
def test_rules_of_dtensor_without_process_groups() -> None:
    rules = dtensor.ShardingRules(2)
    x, weight = torch.empty(3, 4, device="meta"), torch.empty(4, 8, device="meta")
    placements = {id(x): Replicate(), id(weight): Shard(1)}
    found = rules.propagate(torch.ops.aten.mm.default, (x, weight), {}, lambda tensor: placements[id(tensor)])
    assert found == dtensor.Propagation(outputs=(Shard(1),), moves=())
    placements[id(x)] = Shard(0)
    found = rules.propagate(torch.ops.aten.mm.default, (x, weight), {}, lambda tensor: placements[id(tensor)])
    assert len(found.moves) == 1
    assert isinstance(found.moves[0], dtensor.Move)
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
    gone = weakref.ref(mesh)
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
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

    class Calls(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            def note(*paths: str) -> None:
                calls.append(tuple(Path(path).name for path in paths))

            open_now.enter_context(lightning_helpers.last_linked(trainer, note, note))

    keeps = ModelCheckpoint(tmp_path, filename="{epoch}", save_last="link")
    settings: Any = {**QUIET, "max_epochs": 2, "limit_train_batches": 1, "limit_val_batches": 0}
    with contextlib.ExitStack() as open_now:
        L.Trainer(callbacks=[keeps, Calls()], **settings).fit(BoringModel())
    assert calls == [
        ("epoch=0.ckpt", "last.ckpt"),
        ("epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"),
        ("epoch=1.ckpt", "last.ckpt"),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=1.ckpt"]
    assert "_link_checkpoint" not in vars(keeps)


@canary(dtensor, "clear_caches")
def test_caches_of_dtensor_hold_meshes_until_they_are_cleared(workers: WorkerPools) -> None:
    assert workers(2).run(_meshes_forgotten) == [(True, True)] * 2


def _finished_backward() -> list[float]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    assert isinstance(root, FSDPModule)
    model(torch.ones(1, 2))
    pipelining.finish_backward(root)  # where no backward began
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
    for _ in range(2):
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    root.set_requires_gradient_sync(True)
    root.set_is_last_backward(True)
    pipelining.finish_backward(root)
    gradient = model[0].weight.grad
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor().flatten().tolist()


def _units_aside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[str] = []
    model[0].register_forward_hook(lambda *args: seen.append("user's"))
    for layer in model:
        fsdp_units.let_be_copied(fully_shard(layer, mesh=init_device_mesh("cpu", (2,))))
    model(torch.ones(1, 2))
    copied = copy.deepcopy(model)
    assert type(copied[0]) is nn.Linear
    assert copied[0].weight is not model[0].weight
    assert isinstance(copied[0].weight, DTensor)
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
        for name in ("weight", "bias"):
            setattr(layer, name, nn.Parameter(getattr(layer, name).full_tensor().detach()))
    fsdp_units.forget_units(model)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    assert model(torch.ones(1, 2)).shape == (1, 2)


@canary(fsdp_units, "without_units", "let_be_copied", "forget_units")
def test_units_are_put_aside_and_copied(workers: WorkerPools) -> None:
    workers(2).run(_units_aside)


def _shards_in_other_memory() -> None:
    model, policy = nn.Linear(3, 5), CPUOffloadPolicy(pin_memory=False)
    weight, bias = (parameter.detach().clone() for parameter in model.parameters())
    of_two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("two", "one"))
    for mesh in (of_two["two"], of_two["one"]):
        unit = fully_shard(copy.deepcopy(model), mesh=mesh, offload_policy=policy, reshard_after_forward=True)
        assert isinstance(unit, FSDPModule)
        parameters, made = dict(unit.named_parameters()), []

        def memory(shape: torch.Size, dtype: torch.dtype, made: list[Tensor] = made) -> Tensor:
            made.append(torch.zeros(shape, dtype=dtype))
            return made[-1]

        fsdp.move_shards(unit, memory)
        spans = [(t.data_ptr(), t.numel()) for t in made]
        assert [(shard.data_ptr(), shard.numel()) for shard in fsdp.shards_of(unit)] == spans
        seen: list[int] = []
        fsdp.when_gathered(unit, lambda shards, seen=seen: seen.extend(shard.data_ptr() for shard in shards))
        for step in range(2):
            unit(torch.ones(1, 3)).sum().backward()
            assert len(seen) == (step + 1) * 2 * 2, "in the forward and in the backward"
        assert set(seen) == {pointer for pointer, _ in spans}
        assert dict(unit.named_parameters()) == parameters
        for fqn, parameter in unit.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().untyped_storage().data_ptr() in {pointer for pointer, _ in spans}
            torch.testing.assert_close(parameter.full_tensor().detach(), weight if fqn == "weight" else bias)
        with torch.no_grad():
            for parameter in unit.parameters():
                parameter.zero_()
        assert all(not tensor.any() for tensor in made)
        assert not unit(torch.ones(1, 3)).any()


@canary(fsdp, "groups_of", "shards_of", "move_shards", "when_gathered")
def test_shards_in_other_memory(workers: WorkerPools) -> None:
    workers(2).run(_shards_in_other_memory)


def _gathered_in_other_dtypes() -> tuple[Any, ...]:
    unit = fully_shard(nn.Linear(3, 5), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    assert isinstance(unit, FSDPModule)
    x = torch.ones(2, 3)
    unit(x).sum().backward()
    weight, bias = fsdp.parameters_of_unit(unit)
    assert [weight.sharded, bias.sharded] == [*unit.parameters()]
    assert weight.memory.dtype == torch.float32
    assert weight.memory.untyped_storage().size() == 0
    seen: list[Tensor] = []

    def stand_in(half: Tensor) -> Tensor:
        seen.append(half)
        return half

    assert weight.gather_in(torch.bfloat16, stand_in) is weight.gathered
    unit.unshard()
    assert (unit.weight.dtype, unit.bias.dtype) == (torch.bfloat16, torch.float32)
    values = weight.sharded.full_tensor().bfloat16()  # type: ignore[attr-defined]
    return torch.equal(seen[0], values), torch.equal(unit.weight, values), unit.weight.requires_grad  # type: ignore[arg-type]


@canary(fsdp, "UnitParameter", "parameters_of_unit")
def test_a_parameter_is_gathered_in_another_dtype(workers: WorkerPools) -> None:
    assert workers(2).run(_gathered_in_other_dtypes) == [(True, True, True)] * 2


def _reset_units() -> list[bool]:
    unit = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    parameters = list(unit.parameters())
    unit(torch.ones(1, 2)).sum().backward()
    unit(torch.ones(1, 2))
    unit.unshard()
    fsdp.reset(unit, parameters)
    gradients = [parameter.grad for parameter in parameters]
    return [now is p and g is not None for now, p, g in zip(unit.parameters(), parameters, gradients, strict=True)]


@canary(fsdp, "reset")
def test_a_reset_of_units_keeps_gradients(workers: WorkerPools) -> None:
    assert workers(2).run(_reset_units) == [[True, True]] * 2, "sharded, with gradients"


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


@canary(fsdp_changes, "ChangeableArguments")
def test_arguments_that_a_unit_changes(workers: WorkerPools) -> None:
    workers(2).run(_changed_arguments)


@canary(pipelining, "finish_backward")
def test_a_backward_that_fsdp_did_not_see_end(workers: WorkerPools) -> None:
    # Two backwards, each the mean over inputs 1 and 2, times the two rows of the second layer.
    assert workers(2).run(_finished_backward) == [[6.0] * 4, [6.0] * 4]


# ---------------------------------------------------------------------------------------------------------- pipelining


class _Doubling(nn.Module):
    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        tensor = received[0] if received else torch.ones(int(index) + 1, requires_grad=True)
        return tensor * 2 if not received else (tensor * 2).sum()


def _varying_microbatches() -> list[str]:
    def metas(index: int) -> tuple[Tensor, ...]:
        return (torch.empty(index + 1, device="meta", requires_grad=True),)

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    sent = [metas(i) for i in range(3)]
    stage = pipelining.ShapedStage(
        _Doubling(),
        rank,
        2,
        inputs=[()] * 3 if rank == 0 else sent,
        outputs=sent if rank == 0 else [(torch.empty((), device="meta", requires_grad=True),)] * 3,
        device=torch.device("cpu"),
        group=group,
        is_unsplit=False,
    )
    schedule = pipelining.InOrder([stage], 3, [0, 1], loss_fn=lambda output, target: output)
    losses: list[Tensor] = []
    indices = torch.arange(3)
    schedule.step(index=indices, target=indices, losses=losses, return_outputs=False)
    outputs: list[Tensor] = []
    stage.submod.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        pipelining.InOrder([stage], 3, [0, 1], loss_fn=None).step(index=indices, return_outputs=False)
    if rank == 1:
        assert [loss.item() for loss in losses] == [output.item() for output in outputs] == [4.0, 8.0, 12.0]
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
    assert received.grad is not None
    assert (received.grad == 3.0).all()
    assert weight.grad is None
    end()
    assert weight.grad is not None
    assert (weight.grad == 2.0).all()


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
    held = torch.zeros(1000)
    peak = profiling.AllocatedPeak()
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
    def computation(tensor: Tensor) -> list[Tensor]:
        kinds.append(isinstance(tensor, fake_tensors.FunctionalTensor))
        return [tensor.sin() * 2]

    kinds: list[bool] = []
    tensor = torch.ones(2, requires_grad=True)
    compiled = capture.capture(computation, [tensor], "aot_eager")
    assert kinds
    assert all(kinds), "stand-ins are FunctionalTensors"
    (output,) = compiled(tensor)
    output.sum().backward()
    assert torch.equal(output, tensor.sin() * 2)
    assert tensor.grad is not None
    assert torch.allclose(tensor.grad, tensor.cos() * 2)
    with pytest.raises(capture.NotCompilable, match="reads the value"):
        capture.capture(lambda tensor: [tensor] if tensor.sum() > 0 else [tensor * 2], [tensor], "aot_eager")
    other = torch.ones(2)
    with pytest.raises(capture.NotCompilable, match="neither its arguments"):
        capture.capture(lambda tensor: [tensor + other], [tensor], "aot_eager")
    assert capture.recompile_limit() > 1


def _saved(sizes: list[int]) -> torch.autograd.graph.saved_tensors_hooks:
    """Notes how large tensors are that a backward keeps."""

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@canary(joint_graph, "JointGraphPass")
def test_marks_in_a_joint_graph() -> None:
    """A buffer that is changed is read as it was; of a product and its sine, the backward has what is marked."""

    def computation(tensor: Tensor, factor: Tensor, buffer: Tensor) -> list[Tensor]:
        product = (tensor @ factor) * buffer.clone()
        buffer.add_(1)
        return [product.sin().cos()]

    def kept(is_kept: Callable[[dispatch.OpOverload], bool] | None) -> int:
        tensor, factor = torch.ones(2, 2, requires_grad=True), torch.full((2, 64), 0.1, requires_grad=True)
        buffer, sizes = torch.ones(()), list[int]()
        compiled = capture.capture(computation, [tensor, factor, buffer], "aot_eager", is_kept=is_kept)

        for num in (1, 2):
            tensor.grad = None
            sizes.clear()
            with _saved(sizes):
                (output,) = compiled(tensor, factor, buffer)
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
def test_what_a_compiled_backward_computes_again() -> None:
    """Of a product and its sine, which the backward needs, only what is marked is not kept."""

    def kept(is_marked: bool) -> int:
        def computation(tensor: Tensor, factor: Tensor) -> list[Tensor]:
            assert capture.is_captured(tensor)
            with capture.recomputed_when_compiled() if is_marked else contextlib.nullcontext():
                product = tensor @ factor
            return [product.sin()]

        tensor, factor = torch.ones(2, 2, requires_grad=True), torch.ones(2, 64, requires_grad=True)
        compiled = capture.capture(computation, [tensor, factor], "aot_eager")
        sizes: list[int] = []

        with _saved(sizes):
            (output,) = compiled(tensor, factor)
        output.sum().backward()
        torch.testing.assert_close(tensor.grad, torch.full((2, 2), 64 * math.cos(2.0)))
        return sum(sizes)

    assert kept(True) == 2 * 2 + 2 * 64
    assert kept(False) == 2 * 2 + 2 * 64 + 2 * 64
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

    eager: list[int] = []
    waits = CountedWait(not_told)
    wait = functools.partial(waits, "")
    run = dynamo.compiled(function, backend="aot_eager", mode="default", compiling=wait)
    module, tensor = nn.Linear(2, 2), torch.ones(2)
    with dynamo.modules_watched():
        torch.manual_seed(0)
        output = run(module, tensor)
        assert (eager, waits.num) == ([], 1)
        torch.manual_seed(0)
        assert torch.equal(output, function(module, tensor))
        eager.clear()
        module.register_forward_hook(lambda module, args, output: output * 0)
        assert not run(module, tensor).any(), "hooks that are added later are called"
        with pytest.raises(dynamo.compiler_errors()) as broken:
            run(module, torch.ones(1, 2))
        assert not dynamo.is_limit(broken.value)
        assert not eager, "nothing of it has run"
        with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(dynamo.compiler_errors()) as limit:
            run(module, tensor.double())
        assert dynamo.is_limit(limit.value)


@canary(backends, "compile_graph")
def test_backends_compile_graphs() -> None:
    class Doubled(nn.Module):
        def forward(self, tensor: Tensor) -> tuple[Tensor]:
            return (tensor * 2,)

    graph, tensor = torch.fx.symbolic_trace(Doubled()), torch.ones(2)
    (output,) = backends.compile_graph(graph, [tensor], "aot_eager", "default")(tensor)
    assert torch.equal(output, tensor * 2)


# ------------------------------------------------------------------------------------------ Lightning and torchmetrics


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


@canary(lightning_helpers, "ScriptLauncher", "connect", "reduce_tensor")
def test_helpers_of_strategies() -> None:
    assert list(inspect.signature(lightning_helpers.ScriptLauncher).parameters) == [
        "cluster_environment",
        "num_processes",
        "num_nodes",
    ]
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
    given = {
        "state_dict": {"weight": torch.ones(1, 1), "bias": torch.ones(1)},
        "hyper_parameters": {"num": 3},
        "pytorch-lightning_version": L.__version__,
    }
    monkeypatch.setattr(saving, "pl_load", saving.pl_load)  # undone afterwards
    lightning_helpers.load_folders(lambda path, map_location, weights_only: given if path == "known" else None)
    assert _Linear.load_from_checkpoint("known").num == 3
    torch.save({**given, "hyper_parameters": {"num": 4}}, tmp_path / "file")
    assert _Linear.load_from_checkpoint(tmp_path / "file").num == 4


class _Linear(L.LightningModule):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight, self.bias, self.num = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1)), num


class _Strategy(ParallelStrategy):
    root_device = torch.device("cpu")
    optimizer_state = barrier = broadcast = reduce = all_gather = model_to_device = None  # type: ignore[assignment]


@canary(lightning_helpers, "leave_out_module_names")
def test_profilers_record_names_of_modules() -> None:
    trainer = L.Trainer(profiler=PyTorchProfiler(), logger=False, accelerator="cpu")
    assert lightning_helpers.leave_out_module_names(trainer)
    assert not lightning_helpers.leave_out_module_names(trainer)
    assert not PyTorchProfiler(record_module_names=False)._record_module_names
    profiler = PyTorchProfiler()
    model = nn.Sequential(nn.Linear(2, 2))
    profiler._register = RegisterRecordFunction(model)
    profiler._register.__enter__()
    assert model[0]._forward_hooks
    trainer.profiler = profiler
    assert lightning_helpers.leave_out_module_names(trainer)
    assert not model[0]._forward_hooks


@canary(lightning_helpers, "reset_optimizers", "layer_sync_of", "has_own_io")
def test_what_strategies_hold() -> None:
    strategy = _Strategy()
    strategy.optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))])]
    lightning_helpers.reset_optimizers(strategy)
    assert strategy.optimizers == []
    assert lightning_helpers.layer_sync_of(strategy) is None
    strategy._layer_sync = plugin = TorchSyncBatchNorm()
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
    noted: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def note(signum: int, frame: object) -> None:
        noted.append(signum)

    with lightning_helpers.signals_noted(trainer, note, note):
        trainer._signal_connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        lightning_helpers.put_back_at_end(trainer, signal.SIGUSR2, note)
        trainer._signal_connector.teardown()
    assert noted == [signal.SIGTERM]
    assert signal.signal(signal.SIGUSR2, signal.SIG_DFL) is note
    assert signal.getsignal(signal.SIGTERM) is before
    lightning_helpers.stop_in_time(trainer)
    assert trainer.received_sigterm

    batches: list[None] = []
    with lightning_helpers.called_before_batches(trainer, lambda: batches.append(None)):
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert batches == [None]
    assert "_broadcast_sigterm_tensor" in type(trainer.fit_loop.epoch_loop).advance.__code__.co_names

    requeued: list[int] = []
    connector = type(trainer._signal_connector)
    assert _parameters(connector._slurm_sigusr_handler_fn) == {"self", "signum", "_"}
    monkeypatch.setattr(connector, "_slurm_sigusr_handler_fn", lambda self, signum, _: requeued.append(signum))
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


@canary(lightning_helpers, "logging_as_alone")
def test_logging_asks_whether_there_are_other_processes() -> None:
    asked = result._ResultCollection._get_cache.__code__.co_names
    assert "_distributed_is_initialized" in asked
    before = result._distributed_is_initialized
    with lightning_helpers.logging_as_alone():
        assert not result._distributed_is_initialized()
        assert result._distributed_is_initialized is not before
    assert result._distributed_is_initialized is before


@canary(lightning_helpers, "set_device")
def test_modules_know_their_device() -> None:
    module = L.LightningModule()
    lightning_helpers.set_device(module, device=torch.device("meta"))
    assert module.device == torch.device("meta")


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
        assert lightning_helpers.active_loaders(trainer) is not None
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
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def fail() -> None:
        drawn.append(draw())
        raise KeyError

    drawn: list[tuple[float, float, float]] = []
    with pytest.raises(KeyError), lightning_helpers.random_states_kept():
        fail()
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
    first, second = torch.arange(6.0).view(2, 3), torch.arange(4).to(torch.uint8)
    other = torch.full((10,), 7.0)  # larger than what it stands for

    def content(storage: torch.UntypedStorage) -> torch.UntypedStorage:
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
