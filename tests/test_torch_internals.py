"""Canaries: private symbols behind `torch_internals/` do what their adapters rely on, where a change would be silent.

An upgrade of torch, Lightning or torchmetrics that changes one fails here by the name of the adapter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import os
import signal
import subprocess
import sys
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_3d.torch_internals import (
    attention,
    attention_kernels,
    autocast,
    autograd,
    capture,
    dispatch,
    distributions,
    fake_tensors,
    joint_graph,
    launchers,
    lightning_helpers,
    modules,
    optimizers,
    patches,
    pipelining,
    tensors,
    versions,
)


def canary(adapter: ModuleType, *symbols: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark the check of some symbols of an adapter, whose failure then names them."""
    name = adapter.__name__.rpartition(".")[2]

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


def test_an_import_warns_of_other_versions_but_not_of_what_lightning_itself_calls() -> None:
    flatten = "from lightning.pytorch.utilities import _pytree; _pytree._tree_flatten(0)"
    code = f"import torch; torch.__version__ = '2.99.0'; import lightning_3d; {flatten}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("tested with torch 2.13 to 2.15, but 2.99.0 is installed") == 1
    assert "LeafSpec" not in done.stderr


@canary(dispatch, "draws_random_numbers", "may_write_any")
def test_what_operators_draw_and_write() -> None:
    aten, attend = torch.ops.aten, torch.ops.aten._scaled_dot_product_efficient_attention.default
    calls: list[tuple[Any, tuple[Any, ...]]] = [(attend, (None,) * 4 + (True,)), (attend, (None,) * 4 + (True, 0.1))]
    calls += [(aten.native_dropout.default, (None, 0.5, True)), (aten.mm.default, (None, None))]
    calls += [(aten._cudnn_rnn.default, (None,) * 11 + (p,)) for p in (0.0, 0.1)]
    assert [dispatch.draws_random_numbers(*each, {}) for each in calls] == [False, True, True, False, False, True]
    operators = torch.ops.c10d.allreduce_.default, aten.add_.Tensor
    assert [*map(dispatch.may_write_any, operators)] == [True, False]


@canary(modules, "TORCH_ATTRIBUTES")
@canary(tensors, "are_transforms_active")
def test_attributes_of_modules_and_transforms() -> None:
    assert vars(nn.Linear(2, 2)).keys() - modules.TORCH_ATTRIBUTES == {"in_features", "out_features"}
    assert not tensors.are_transforms_active()
    assert torch.vmap(lambda x: x + tensors.are_transforms_active())(torch.zeros(1)).item() == 1.0


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


@canary(modules, "forward_hooks", "forward_hooks_with_kwargs", "forward_hook_registries", "has_backward_hooks")
@canary(modules, "forward_hooks_copied")
def test_hooks_of_modules() -> None:
    module = nn.Linear(1, 1)
    with modules.forward_hooks_copied(module):
        handle = module.register_forward_hook(lambda *args, **kwargs: None, with_kwargs=True)
        assert list(modules.forward_hooks(module)) == [handle.id] == list(modules.forward_hooks_with_kwargs(module))
        assert sum(handle.id in registry for registry in modules.forward_hook_registries(module)) == 2
        modules.forward_hooks(module).pop(handle.id)
        module(torch.zeros(1))
    with patches.replaced("hooks", module, {"forward": len, "training": False}):
        assert (module.forward, module.training) == (len, False)
    assert ("forward" in vars(module), module.training) == (False, True)
    for kind in ("full_backward", "full_backward_pre"):
        assert not modules.has_backward_hooks(module)
        handle = getattr(module, f"register_{kind}_hook")(lambda *args: None)
        assert modules.has_backward_hooks(module)
        handle.remove()
    kinds = [f"_forward{pre}_hooks{kind}" for pre in ("", "_pre") for kind in ("", "_with_kwargs")]
    present = {name for name in vars(module) if name.startswith("_forward")}
    assert present == {*kinds, "_forward_hooks_always_called"}, "forward_hook_registries knows them all"


@canary(dispatch, "makes_a_view")
def test_operators_that_make_a_view() -> None:
    aten = torch.ops.aten
    assert all(map(dispatch.makes_a_view, (aten.t.default, aten.view.default, aten.detach.default, aten.select.int)))
    others = aten._to_copy.default, aten.add_.Tensor, aten.add.out, aten.mm.default, aten.view.dtype
    assert not any(map(dispatch.makes_a_view, (*others, aten.split.Tensor, torch.ops.higher_order.flex_attention)))


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
@pytest.mark.parametrize(("dtype", "has_mask"), [(torch.float32, True), (torch.bfloat16, False)])
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


@canary(attention_kernels, "attend", "attend_backward")
def test_the_backward_of_a_part_of_the_keys_is_that_part_of_the_whole_one() -> None:
    query, key, value, gradient = (torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2, 4))
    output, lse = attention_kernels.attend(query, key, value, is_causal=False, scale=0.3)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).mT
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    wanted = torch.autograd.grad(output, (query, key, value), gradient)
    lse = lse.contiguous()
    parts = [
        attention_kernels.attend_backward(
            gradient, query, key[..., own, :], value[..., own, :], output, lse, is_causal=False, scale=0.3
        )
        for own in (slice(0, 3), slice(3, 8))
    ]
    found = parts[0][0] + parts[1][0], *(torch.cat(of_both, -2) for of_both in zip(*parts, strict=True))
    torch.testing.assert_close((found[0], *found[2:]), wanted)


@canary(attention_kernels, "attend", "attend_backward")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_cuda_take_and_give_what_those_of_the_cpu_do(dtype: torch.dtype) -> None:
    def shapes(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        query, key, value = (torch.zeros(2, heads, 5, 16, dtype=dtype, device=device) for heads in (4, 2, 2))
        output, lse = attention_kernels.attend(query, key, value, is_causal=True, scale=None)
        found = attention_kernels.attend_backward(
            output, query, key, value, output, lse.contiguous(), is_causal=True, scale=None
        )
        return [(tensor.shape, tensor.dtype) for tensor in (output, lse, *found)]

    assert shapes("meta") == shapes("cpu")


@canary(fake_tensors, "on_fake_tensors")
def test_failures_on_fake_tensors_are_logged_there(caplog: pytest.LogCaptureFixture) -> None:
    log: logging.Logger = importlib.import_module("torch._subclasses.fake_tensor").log
    with fake_tensors.on_fake_tensors(fake_tensors.FakeTensorMode()):
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        log.error("not told")
    assert (log.filters, log.name, caplog.records) == ([], "torch._subclasses.fake_tensor", [])


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


def _saved(found: list[int], of: Callable[[Tensor], int] = Tensor.numel) -> torch.autograd.graph.saved_tensors_hooks:
    """Notes something of the tensors that a backward keeps, how large they are if nothing else is asked for."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(of(t)), t)[1], lambda t: t)  # type: ignore[func-returns-value]


@canary(joint_graph, "refuse_wrong_code")
def test_graphs_that_compilers_get_wrong() -> None:
    def total(factor: float, x: Tensor) -> Tensor:
        return torch.add(x, x @ x, alpha=factor)

    def drawn(step: int, x: Tensor) -> Tensor:
        return torch.empty(2, 8)[:, ::step].normal_() + x[0, 0]

    for function, right, wrong, words in ((total, 1, 0.1, "alpha"), (drawn, 1, 2, "random numbers")):
        for given, refused in ((right, contextlib.nullcontext()), (wrong, pytest.raises(RuntimeError, match=words))):
            traced = make_fx(functionalize(functools.partial(function, given)), tracing_mode="fake")(torch.ones(2, 2))
            with refused:
                joint_graph.refuse_wrong_code(traced.graph)


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


@canary(launchers, "ProcessObserver")
def test_a_process_may_end_by_itself_where_one_that_it_started_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    monkeypatch.setattr(launchers.time, "sleep", did.append)
    monkeypatch.setattr(os, "kill", lambda *args: did.append(args))
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait()
        observer = launchers.ProcessObserver(-1, [process], 7.0)
        assert observer._run()  # one look at the processes
    assert did == [7.0, (-1, signal.SIGKILL)]


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


class _Strategy(ParallelStrategy):
    root_device = torch.device("cpu")
    optimizer_state = barrier = broadcast = reduce = all_gather = model_to_device = None  # type: ignore[assignment]


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


@canary(distributions, "arguments_unchecked")
def test_arguments_of_distributions() -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # torch.compile leaves it off
    with distributions.arguments_unchecked():
        torch.distributions.Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)
