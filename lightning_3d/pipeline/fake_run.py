"""What a block returns, without the data that goes in: its forward on fake tensors, or on random ones where that fails.

Some operators have no rule for fake tensors (``torch._grouped_mm`` in fp32), and some blocks look into their data
(experts that index by a mask). Such a block runs for real, on random tensors of the shapes of its inputs and of its
state: every rank can do that on its own, wherever the block lies, at the price of one block's memory. What the batch
alone determines (masks, positions) keeps its data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import TreeSpec, tree_map_only, tree_unflatten

from lightning_3d.pipeline.interception import own_forward


def run_on_fakes(block: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the block's own forward with ``state`` in place of its parameters and buffers, past hooks and wrappers.

    Args:
        state: Name in the block -> tensor; buffers that the forward sets anew are replaced in it.
    """
    renamed = {f"block.{name}": tensor for name, tensor in state.items()}
    with _quiet():
        output = torch.func.functional_call(_ForwardOnly(block), renamed, args, kwargs)
    state.update({name: renamed[f"block.{name}"] for name in state})
    return output


def run_on_random(
    block: nn.Module,
    state: Mapping[str, Tensor],
    fakes: Sequence[Any],
    known: Mapping[int, Tensor],
    spec: TreeSpec,
    mode: FakeTensorMode,
) -> Any:
    """Run the block's own forward for real; the outputs come back fake.

    Args:
        state: Name in the block -> fake tensor of the parameter's or buffer's shape.
        fakes: The flat arguments of the call, tensors as fakes.
        known: Position among them -> tensor whose data is known.
        spec: Their structure.
        mode: The mode of the fakes. An in-place change of an argument shows in the version of its fake.
    """
    with unset_fake_temporarily():
        stand_ins: dict[int, Tensor] = {}  # id of a fake -> real tensor

        def real(fake: Tensor, data: Tensor | None = None) -> Tensor:
            if id(fake) not in stand_ins:
                made = _random(fake) if data is None else data.detach().clone()
                stand_ins[id(fake)] = made.requires_grad_(fake.requires_grad)
            return stand_ins[id(fake)]

        leaves = [real(leaf, known.get(i)) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(fakes)]
        # They are no leaves of autograd in the real run either, so that in-place changes are allowed.
        given = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in given]
        args, kwargs = tree_unflatten(given, spec)
        output = run_on_fakes(block, {name: real(tensor) for name, tensor in state.items()}, args, kwargs)
        positions = {id(leaf): i for i, leaf in reversed(list(enumerate(given))) if isinstance(leaf, Tensor)}
        changed = [
            fake
            for fake, leaf, version in zip(fakes, given, versions, strict=True)
            if isinstance(leaf, Tensor) and leaf._version != version
        ]
    for fake in changed:
        torch.autograd.graph.increment_version(fake)

    def as_fake(tensor: Tensor) -> Tensor:
        if id(tensor) in positions:
            fake: Tensor = fakes[positions[id(tensor)]]
            return fake
        return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, as_fake, output)


def _random(fake: Tensor) -> Tensor:
    """Positive numbers, which scales and variances may have to be; zeros for integers, which indices may be."""
    if fake.is_floating_point() or fake.is_complex():
        return torch.rand(fake.shape, dtype=fake.dtype, device=fake.device).mul_(0.1)
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of an operator that fails on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


class _ForwardOnly(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return own_forward(self.block)(*args, **kwargs)
