"""Compiling a graph by one of torch's backends. torch 2.13; they are the ones that ``torch.compile`` looks up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.fx import GraphModule

from lightning_3d.torch_internals.dispatch import IsKept
from lightning_3d.torch_internals.patches import replaced


def compile_graph(
    graph: nn.Module, inputs: Sequence[object], backend: str, mode: str, is_kept: IsKept | None = None
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph whose random numbers stay those of eager code, and whose backward may run several times.

    The backward is compiled with the forward, so that it fails here.

    Args:
        graph: Any module that takes and returns tensors, though they declare a GraphModule.
        inputs: Examples.
        backend: ``"inductor"`` or ``"aot_eager"``.
        mode: As for ``torch.compile``, with the backend "inductor".
        is_kept: Tells operators whose results are kept for the backward from those that it computes again; None leaves
            the choice to torch.
    """
    from torch._functorch._aot_autograd import graph_compile  # takes a second, as do those below

    # Else a backward writes into what it got from its forward, and refuses to run twice.
    nothing_donated: dict[str, object] = {"collect_bw_donated_buffer_idxs": lambda *args: []}
    settings = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with replaced("donated buffers", graph_compile, nothing_donated), settings:
        compiled: Callable[..., Sequence[torch.Tensor]] = _backend(backend, mode, is_kept)(graph, list(inputs))
    return compiled


def _backend(backend: str, mode: str, is_kept: IsKept | None) -> Callable[..., Callable[..., Sequence[torch.Tensor]]]:
    # These take a second, which runs without compilation need not wait for.
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import list_mode_options

    from lightning_3d.torch_internals.joint_graph import JointGraphPass, refuse_wrong_code

    marks = JointGraphPass(is_kept)
    if backend != "inductor":

        def without_backward(graph: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
            refuse_wrong_code(graph.graph)
            run: Callable[..., object] = boxed_nop(graph, inputs)
            return run

        return aot_autograd(
            fw_compiler=boxed_nop,
            inference_compiler=without_backward,
            partition_fn=marks.partition,
            keep_inference_input_mutations=True,
        )
    inductor: Callable[..., Callable[..., Sequence[torch.Tensor]]] = lookup_backend(backend)
    options = {**list_mode_options(mode), "fallback_random": True, "joint_custom_post_pass": marks}
    return partial(inductor, config_patches=options)
