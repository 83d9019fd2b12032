"""Fake tensors in place of a block's parameters, buffers and arguments, so that its forward runs without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.model.pytrees import as_called
from lightning_3d.model.snapshot import preserved
from lightning_3d.torch_internals import flex_attention
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode, on_fake_tensors
from lightning_3d.torch_internals.modules import buffers_of, parameters_of
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map


@dataclass(frozen=True, kw_only=True, slots=True)
class Fakes:
    """The fake tensors that stand in for a block's parameters and arguments."""

    parameters: Mapping[str, Tensor]
    """By name, ties under every name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@contextmanager
def on_fakes(block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[Fakes]:
    """Let a block's forward run without data; afterwards the block is what it was.

    Args:
        block: On any device, meta included.
        args: Example arguments of its forward; only the metadata of tensors counts.
        kwargs: Example keyword arguments.
    """
    parameters = dict(block.named_parameters(remove_duplicate=False))
    fake_tensors = on_fake_tensors(FakeTensorMode(allow_non_fake_inputs=True))
    with preserved(block), flex_attention.calls_seen(), fake_tensors:
        device = _device_of([*tree_leaves((args, dict(kwargs))), *parameters.values()])
        fakes = {id(parameter): _fake(parameter, device) for parameter in parameters.values()}
        _stand_in(block, fakes, device)
        fake_args, fake_kwargs = tree_map(
            lambda leaf: _fake(leaf, device) if isinstance(leaf, Tensor) else leaf,
            as_called((tuple(args), dict(kwargs))),
        )
        by_name = {fqn: fakes[id(parameter)] for fqn, parameter in parameters.items()}
        yield Fakes(parameters=by_name, args=fake_args, kwargs=fake_kwargs)


def _device_of(leaves: Sequence[object]) -> torch.device:
    """One device for all fakes: the one that the arguments, else the parameters, really are on."""
    devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta")
    return next(devices, torch.device("cpu"))


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    """A leaf like `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)


def _stand_in(block: nn.Module, fakes: Mapping[int, Tensor], device: torch.device) -> None:
    """Hang fake parameters and buffers where the block's code finds the real ones."""
    for module in block.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                parameters_of(module)[name] = fakes[id(parameter)]  # type: ignore[assignment]  # not a Parameter
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                buffers_of(module)[name] = _fake(buffer, device)
