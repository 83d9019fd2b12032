"""Undoing what a traced step does to the module besides computing: counters, lists, metrics, random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_3d.torch_internals.modules import BUFFERS
from lightning_3d.torch_internals.random_states import random_states_kept
from lightning_3d.trace.ghost import Ghost


@contextmanager
def undone(module: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Run something and put the attributes of all modules and all RNG states back.

    Covers attributes that are set, lists, dicts and sets that are changed in place, and tensors outside blocks (a
    trace does not touch those of blocks).
    What reaches beyond the module (files, loggers used directly) stays done.
    """
    inside = {id(inner) for block in blocks for inner in block.modules()}
    saved = [(m, _snapshot(vars(m), with_tensors=id(m) not in inside)) for m in module.modules()]
    try:
        with random_states_kept():
            yield
    finally:
        for owner, (attributes, contents) in saved:
            vars(owner).clear()
            vars(owner).update(attributes)
            for value, content in contents:
                _put_back(value, content)


def _snapshot(attributes: dict[str, Any], *, with_tensors: bool) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    contents: list[tuple[Any, Any]] = []
    for value in attributes.values():
        if isinstance(value, (list, dict, set)):
            contents.append((value, value.copy()))
        if with_tensors and isinstance(value, Tensor) and not isinstance(value, (nn.Parameter, Ghost)):
            contents.append((value, value.detach().clone()))
    if with_tensors:
        contents += [(b, b.detach().clone()) for b in attributes[BUFFERS].values() if b is not None]
    return dict(attributes), contents


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        value.detach().copy_(content)
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)
