"""Running the blocks of a model while a step is traced: what they return, and what their forwards change besides.

Their forwards run on fake tensors. Some operators have no rule for these (``torch._grouped_mm`` in fp32), and some
blocks look into their data (experts that index by a mask). Such a block runs for real, on random tensors of the shapes
of its inputs and of its state: every rank can do that on its own, wherever the block lies, at the price of one block's
memory. What the batch alone determines (masks, positions) keeps its data.

Where glue has data when it runs, everything can run for real, on copies of the model's state: ``Copies`` takes the
place of ``Fakes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_3d.errors import TraceError
from lightning_3d.model.block_runner import AnyCallable, own_forward
from lightning_3d.model.code_caches import CodeCaches
from lightning_3d.model.pytrees import copied, is_opaque
from lightning_3d.torch_internals.dispatch import Operator, OperatorMode, draws_random_numbers
from lightning_3d.torch_internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    on_fake_tensors,
    unset_fake_temporarily,
)
from lightning_3d.torch_internals.modules import RunningNorm, named_state
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_flatten, tree_map_only, tree_unflatten
from lightning_3d.torch_internals.tensors import apart, version_of
from lightning_3d.trace.side_outputs import (
    HookCall,
    SideOutputs,
    attributes_of,
    changed_attributes,
    run_and_pack,
    set_attribute,
)

T = TypeVar("T")


def run_with_state(block: nn.Module, state: dict[str, Tensor], args: Args, kwargs: Kwargs) -> object:
    """Run the block's own forward with ``state`` in place of its parameters and buffers, past hooks and wrappers."""
    return with_state(block, state, lambda forward: forward(*args, **kwargs))


def with_state(block: nn.Module, state: dict[str, Tensor], run: Callable[[AnyCallable], T]) -> T:
    """Call ``run`` with the block's own forward while ``state`` is in place of its parameters and buffers.

    Args:
        state: Name in the block -> tensor; buffers that the forward sets anew are replaced in it.
    """
    renamed = {f"block.{name}": tensor for name, tensor in state.items()}
    result: T = torch.func.functional_call(_Held(block), renamed, (run,))
    state.update({name: renamed[f"block.{name}"] for name in state})
    return result


class _Held(nn.Module):
    """Hands the forward of its block to a function, so that the block's state is swapped once for several runs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, run: Callable[[AnyCallable], T]) -> T:
        return run(own_forward(self.block))


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
        self.arguments: list[object] = []
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

    def as_fakes(self, outputs: object) -> object:
        """After the run: fakes of what came out. In-place changes of arguments show in the versions of their fakes."""
        fakes: dict[int, Tensor] = {}  # id of a real tensor -> its fake
        for fake, leaf, version in zip(self._fakes, self.arguments, self._versions, strict=True):
            if isinstance(leaf, Tensor):
                fakes[id(leaf)] = fake
                if version_of(leaf) != version:
                    torch.autograd.graph.increment_version(fake)

        def as_fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in fakes:
                with self._mode:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
            return fakes[id(tensor)]

        return tree_map_only(Tensor, as_fake, outputs)


def running_statistics(block: nn.Module) -> frozenset[str]:
    """Names of the buffers in the block that batch normalisation changes; its operator does not tell."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in block.named_modules()
        if isinstance(module, RunningNorm) and module.training
        for name, _ in module.named_buffers(recurse=False)
    )


def random_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Positive numbers, which scales and variances may have to be; zeros for integers, which indices may be."""
    if tensor.is_floating_point() or tensor.is_complex():
        drawn = torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype  # torch draws no float8
        return torch.rand(tensor.shape, dtype=drawn, device=device).mul_(0.1).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


class RandomnessSeen(OperatorMode):
    """Notes whether an operator that draws random numbers was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        self.seen |= draws_random_numbers(func, args, kwargs)
        return func(*args, **kwargs)


class Copies:
    """Real tensors in place of ghosts and of the model's state: their data, and copies of it, which must be at hand.

    Args:
        device: Where to compute.
    """

    fake_mode: FakeTensorMode | None = None
    """That of fake tensors; None if there are data."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def mode(self) -> AbstractContextManager[object]:
        """To compute in."""
        return nullcontext()

    def of(self, tensor: Tensor) -> Tensor:
        """The one in place of a tensor."""
        made: Tensor = self._made.get(tensor, tensor)
        return made

    def of_state(self, tensor: Tensor) -> Tensor:
        """The one in place of a parameter or buffer."""
        if tensor not in self._made:
            self._made[tensor] = self._of_new_state(tensor).requires_grad_(tensor.requires_grad)
        return self.of(tensor)

    def put(self, tensor: Tensor, stand_in: Tensor) -> None:
        """Let this be the one in place of a tensor."""
        self._made[tensor] = stand_in

    def _of_new_state(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, copy=True)


class Fakes(Copies):
    """Fake tensors, in place of real ones too.

    Args:
        device: Where parameters live when they are at hand.
    """

    fake_mode: FakeTensorMode

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    @override
    def mode(self) -> AbstractContextManager[object]:
        return on_fake_tensors(self.fake_mode)

    @override
    def of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self._made:
            self._made[tensor] = self.fake_mode.from_tensor(apart(tensor))
        return super().of(tensor)

    @override
    def _of_new_state(self, tensor: Tensor) -> Tensor:
        with self.fake_mode:  # it may be sharded or absent
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)


class FakeBlocks:
    """The blocks of a model, with stand-ins for their parameters and buffers.

    Args:
        blocks: FQN -> block.
        kept_hooks: FQN -> forward hooks in the block that are part of it.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        fakes: Copies,
        kept_hooks: Mapping[str, frozenset[HookCall]],
    ) -> None:
        self._fakes, self._kept_hooks = fakes, kept_hooks
        self._caches = CodeCaches(module.modules())
        self.unsent_attributes: dict[str, frozenset[str]] = {}
        """Block FQN -> names in it of attributes that its forward changes otherwise than by setting tensors."""
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

    def run(
        self, fqn: str, block: nn.Module, arguments: Any, known: Mapping[int, Tensor]
    ) -> tuple[object, SideOutputs]:
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
            with self._caches.put_back():
                packed, side = run_and_pack(block, kept, arguments, partial(run_with_state, block, state))
        except TraceError:
            raise
        except Exception:  # the run on random tensors raises the same if the block is to blame
            if (mode := self._fakes.fake_mode) is None:
                raise
            for name, attribute in before.items():
                set_attribute(block, name, attribute.value)
            random = RandomRun(fakes, known, mode)
            with random, self._caches.put_back():
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
