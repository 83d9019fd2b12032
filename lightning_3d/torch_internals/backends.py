"""Compiling a graph by one of torch's backends. torch 2.13; they are the ones that ``torch.compile`` looks up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_3d.torch_internals.dispatch import OpOverload


def compile_graph(
    graph: nn.Module,
    inputs: list[Any],
    backend: str,
    mode: str,
    is_kept: Callable[[OpOverload], bool] | None = None,
) -> Callable[..., Any]:
    """Compile a graph whose random numbers stay those of eager code.

    Args:
        graph: Any module that takes and returns tensors, though they declare a GraphModule.
        inputs: Examples.
        backend: ``"inductor"`` or ``"aot_eager"``.
        mode: As for ``torch.compile``, with the backend "inductor".
        is_kept: Tells operators whose results are kept for the backward from those that it computes again; None leaves
            the choice to torch.
    """
    compiled: Callable[..., Any] = _backend(backend, mode, is_kept)(graph, inputs)
    return compiled


def _backend(backend: str, mode: str, is_kept: Callable[[OpOverload], bool] | None) -> Callable[..., Any]:
    # These take a second, which runs without compilation need not wait for.
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import list_mode_options

    from lightning_3d.torch_internals.joint_graph import JointGraphPass

    marks = JointGraphPass(is_kept)
    if backend != "inductor":
        return aot_autograd(fw_compiler=boxed_nop, partition_fn=marks.partition, keep_inference_input_mutations=True)
    inductor: Callable[..., Any] = lookup_backend(backend)
    options = {**list_mode_options(mode), "fallback_random": True, "joint_custom_post_pass": marks}
    return partial(inductor, config_patches=options)
