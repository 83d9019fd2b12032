"""Compiling a graph by one of torch's backends. torch 2.13; ``lookup_backend`` is what ``torch.compile`` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def compile_graph(graph: nn.Module, inputs: list[Any], backend: str, mode: str) -> Callable[..., Any]:
    """Compile a graph whose random numbers stay those of eager code.

    Args:
        graph: Any module that takes and returns tensors, though they declare a GraphModule.
        inputs: Examples.
        backend: As for ``torch.compile``.
        mode: As for ``torch.compile``, with the backend "inductor".
    """
    from torch._dynamo import lookup_backend  # takes a second, which runs without compilation need not wait for

    compiler: Callable[..., Any] = lookup_backend(backend)
    if backend != "inductor":
        return compiler(graph, inputs)  # type: ignore[no-any-return]
    from torch._inductor import list_mode_options

    options = {**list_mode_options(mode), "fallback_random": True}
    return compiler(graph, inputs, config_patches=options)  # type: ignore[no-any-return]
