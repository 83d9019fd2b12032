"""Running the blocks of a model on fake tensors: what they return, and what their forwards change besides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import TraceError
from lightning_3d.model.named_state import named_state
from lightning_3d.model.pytrees import copied, is_opaque
from lightning_3d.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from lightning_3d.torch_internals.pytree import tree_flatten, tree_unflatten
from lightning_3d.torch_internals.tensors import version_of
from lightning_3d.trace.attribute_reads import AttributeReads, Read
from lightning_3d.trace.fake_run import RandomRun, run_with_state, running_statistics
from lightning_3d.trace.side_outputs import (
    HookCall,
    SideOutputs,
    attributes_of,
    changed_attributes,
    run_and_pack,
    set_attribute,
)


class Fakes:
    """Fake tensors in place of ghosts and real tensors, one for each.

    Args:
        device: Where parameters live when they are at hand.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._fakes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self._fakes:
            self._fakes[tensor] = self.mode.from_tensor(tensor)
        fake: Tensor = self._fakes[tensor]
        return fake

    def of_state(self, tensor: Tensor) -> Tensor:
        """The fake of a parameter or buffer, which may be sharded or absent."""
        if tensor not in self._fakes:
            with self.mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._fakes[tensor] = fake.requires_grad_(tensor.requires_grad)
        return self.of(tensor)

    def put(self, tensor: Tensor, fake: Tensor) -> None:
        """Let this be the fake of a tensor."""
        self._fakes[tensor] = fake


class FakeBlocks:
    """The blocks of a model, with fake parameters and buffers.

    Args:
        blocks: FQN -> block.
        kept_hooks: FQN -> forward hooks in the block that are part of it.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        fakes: Fakes,
        kept_hooks: Mapping[str, frozenset[HookCall]],
    ) -> None:
        self._fakes, self._kept_hooks = fakes, kept_hooks
        self.unsent_attributes: dict[str, frozenset[str]] = {}
        """Block FQN -> names in it of attributes that its forward changes otherwise than by setting tensors."""
        self.read_attributes: dict[str, dict[str, Read]] = {fqn: {} for fqn in blocks}
        """Block FQN -> name in it of an attribute that its forward reads -> its value."""
        self._reads = AttributeReads()
        self.changed_buffers: set[str] = set()
        """FQNs of buffers that their block's forward changes."""
        self.tensors: set[Tensor] = set()
        """The real parameters and buffers."""
        self._state: dict[str, dict[str, Tensor]] = {fqn: {} for fqn in blocks}  # name in the block -> fake tensor
        owners = {inner: (fqn, name) for fqn, block in blocks.items() for name, inner in block.named_modules()}
        for name, tensor, owner in named_state(module):
            if owner in owners:
                fqn, inner = owners[owner]
                self._state[fqn][f"{inner}.{name.rpartition('.')[2]}".removeprefix(".")] = fakes.of_state(tensor)
                self.tensors.add(tensor)

    def run(self, fqn: str, block: nn.Module, arguments: Any, known: Mapping[int, Tensor]) -> tuple[Any, SideOutputs]:
        """Run a block.

        Args:
            arguments: Fake (args, kwargs).
            known: Position among the flat arguments -> real tensor, of those that come from the batch alone.

        Returns:
            What ``pack_outputs`` makes of its outputs, and what the side outputs are.
        """
        fakes, spec = tree_flatten(arguments)
        state = dict(self._state[fqn])
        versions = {name: version_of(tensor) for name, tensor in state.items()}
        kept = self._kept_hooks.get(fqn, frozenset())
        before = attributes_of(block)
        opaque = {i: copied(leaf) for i, leaf in enumerate(fakes) if is_opaque(leaf)}  # a failing run changes them
        try:
            with self._reads.noted(fqn, block, self.read_attributes[fqn]):
                packed, side = run_and_pack(block, kept, arguments, partial(run_with_state, block, state))
        except TraceError:
            raise
        except Exception:  # the run on random tensors raises the same if the block is to blame
            for name, attribute in before.items():
                set_attribute(block, name, attribute.value)
            random = RandomRun(fakes, known, self._fakes.mode)
            with random, self._reads.noted(fqn, block, self.read_attributes[fqn]):
                arguments = tree_unflatten([opaque.get(i, leaf) for i, leaf in enumerate(random.arguments)], spec)
                random_state = random.tensors_like(self._state[fqn])
                packed, side = run_and_pack(block, kept, arguments, partial(run_with_state, block, random_state))
            packed = random.as_fakes(packed)
        _, others = changed_attributes(block, before)
        self.unsent_attributes[fqn] = self.unsent_attributes.get(fqn, frozenset()) | others
        fresh, normalised = self._state[fqn], running_statistics(block)
        self.changed_buffers |= {
            f"{fqn}.{name}"
            for name, tensor in state.items()
            if tensor is not fresh[name] or version_of(tensor) != versions[name] or name in normalised
        }
        return packed, side
