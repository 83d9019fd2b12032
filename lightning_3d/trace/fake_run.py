"""Running a block without data: its forward on fake tensors, or on random ones where that fails.

Some operators have no rule for fake tensors (``torch._grouped_mm`` in fp32), and some blocks look into their data
(experts that index by a mask). Such a block runs for real, on random tensors of the shapes of its inputs and of its
state: every rank can do that on its own, wherever the block lies, at the price of one block's memory. What the batch
alone determines (masks, positions) keeps its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.model.block_runner import own_forward
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode, failures_unlogged, unset_fake_temporarily
from lightning_3d.torch_internals.modules import BatchNormBase
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.torch_internals.tensors import version_of


def run_with_state(block: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the block's own forward with ``state`` in place of its parameters and buffers, past hooks and wrappers.

    Args:
        state: Name in the block -> tensor; buffers that the forward sets anew are replaced in it.
    """
    renamed = {f"block.{name}": tensor for name, tensor in state.items()}
    with failures_unlogged():
        output = torch.func.functional_call(_ForwardOnly(block), renamed, args, kwargs)
    state.update({name: renamed[f"block.{name}"] for name in state})
    return output


class RandomRun:
    """Inside of the context the fake mode is off, and real tensors stand in for fake ones.

    Args:
        fakes: The flat arguments of a call, tensors as fakes.
        known: Position among them -> tensor whose data is known.
        mode: The mode of the fakes.
    """

    def __init__(self, fakes: Sequence[Any], known: Mapping[int, Tensor], mode: FakeTensorMode) -> None:
        self._fakes, self._known, self._mode = fakes, known, mode
        self._stand_ins: dict[int, Tensor] = {}  # id of a fake -> real tensor
        self._real_mode = ExitStack()
        self.arguments: list[Any] = []
        """The flat arguments with real tensors."""

    def __enter__(self) -> RandomRun:
        self._real_mode.enter_context(unset_fake_temporarily())
        leaves = [
            self._stand_in(leaf, self._known.get(i)) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self._fakes)
        ]
        # What a block gets is no leaf of autograd, so it may change it in place.
        self.arguments = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._versions = [version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in self.arguments]
        return self

    def __exit__(self, *exc: object) -> None:
        self._real_mode.close()

    def tensors_like(self, fakes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Real tensors for fake ones, the same for the same."""
        return {name: self._stand_in(fake) for name, fake in fakes.items()}

    def _stand_in(self, fake: Tensor, data: Tensor | None = None) -> Tensor:
        if id(fake) not in self._stand_ins:
            made = random_like(fake, fake.device) if data is None else data.detach().clone()
            self._stand_ins[id(fake)] = made.requires_grad_(fake.requires_grad)
        return self._stand_ins[id(fake)]

    def as_fakes(self, outputs: Any) -> Any:
        """After the run: fakes of what came out. In-place changes of arguments show in the versions of their fakes."""
        back = {}
        for fake, leaf, version in zip(self._fakes, self.arguments, self._versions, strict=True):
            if isinstance(leaf, Tensor):
                back[id(leaf)] = fake
                if version_of(leaf) != version:
                    torch.autograd.graph.increment_version(fake)
        made: dict[int, Tensor] = {}

        def as_fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in back and id(tensor) not in made:
                with self._mode:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
            return back[id(tensor)] if id(tensor) in back else made[id(tensor)]

        return tree_map_only(Tensor, as_fake, outputs)


def running_statistics(block: nn.Module) -> frozenset[str]:
    """Names of the buffers in the block that batch normalisation changes; its operator does not tell."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in block.named_modules()
        if isinstance(module, BatchNormBase) and module.training
        for name, _ in module.named_buffers(recurse=False)
    )


def random_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Positive numbers, which scales and variances may have to be; zeros for integers, which indices may be."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.rand(tensor.shape, dtype=tensor.dtype, device=device).mul_(0.1)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


class _ForwardOnly(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return own_forward(self.block)(*args, **kwargs)
