"""The memory that one call of a block takes while it runs, measured on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.model.snapshot import preserved
from lightning_3d.planning.loads import Inputs
from lightning_3d.planning.memory.live_bytes import LiveBytes
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode
from lightning_3d.torch_internals.pipelining import begin_split_backward, splittable
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.trace.fake_blocks import with_state
from lightning_3d.trace.ghost import TensorMeta

T = TypeVar("T")

_Forward = Callable[[], list[Tensor]]
"""Runs a block; returns the outputs that require grad."""

_FLOPS_PER_BYTE = 32
"""Operations of a device while it writes a byte, about; weighs products of matrices against other operators."""


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Bytes above those before, at most, in one call of a block."""

    forward: int
    """While autograd keeps what the backward needs."""
    forward_alone: int
    """Without autograd."""
    backward: int
    """Above what the forward had kept, with the gradients of outputs and inputs."""
    input_backward: int
    """The same for gradients of inputs alone, where the backward is split."""
    held: int
    """Bytes that wait for the gradients of the weights, where the backward is split."""
    weight_backward: int
    """Above these and what the forward had kept."""
    full_cost: int
    """The time of another forward; a number to compare."""
    selective_cost: int
    """The time of another forward but for its costly operators."""

    def divided(self, number: int, returned: int) -> BlockMemory:
        """That of each of a number of ranks that share the block's weights, about; outputs are whole.

        Args:
            returned: Bytes of its outputs.
        """
        if number == 1:
            return self
        parts = {name: value // number for name, value in vars(self).items()}
        whole = returned - returned // number
        parts |= {name: parts[name] + whole for name in ("forward", "forward_alone", "backward")}
        return BlockMemory(**parts)


def measure_memory(block: nn.Module, inputs: Inputs, device: torch.device) -> BlockMemory:
    """Run a block on fake tensors, forward and backward.

    Args:
        inputs: Of a call.
        device: Where it would run.

    Raises:
        Exception: of the block, which can't run without data.
    """
    with preserved(block), FakeTensorMode(allow_non_fake_inputs=True):
        parameters = {
            name: torch.empty(p.shape, dtype=p.dtype, device=device).requires_grad_(p.requires_grad)
            for name, p in block.named_parameters()
        }
        for parameter in parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        buffers = {name: torch.empty_like(b, device=device) for name, b in block.named_buffers()}
        run = _Run(block, parameters, buffers, inputs, device)
        forward_alone = run.alone()
        with FlopCounterMode(display=False) as counter:
            run.alone()
        forward, cheap, backward = run.whole()
        input_backward, held, weight_backward = run.split() or (backward, 0, 0)
    return BlockMemory(
        forward=forward,
        forward_alone=forward_alone,
        backward=backward,
        input_backward=input_backward,
        held=held,
        weight_backward=weight_backward,
        full_cost=counter.get_total_flops() // _FLOPS_PER_BYTE + cheap,
        selective_cost=cheap,
    )


class _Run:
    """Runs of a block."""

    def __init__(
        self,
        block: nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Inputs,
        device: torch.device,
    ) -> None:
        self._block, self._parameters, self._buffers = block, parameters, buffers
        self._inputs, self._device = inputs, device

    def alone(self) -> int:
        """The peak of a forward without autograd."""

        def run(forward: _Forward, arguments: list[Tensor]) -> int:
            bytes_ = LiveBytes()
            with bytes_:
                forward()
                return bytes_.peak

        with torch.no_grad():
            return self._with_forward(run)

    def whole(self) -> tuple[int, int, int]:
        """The peak of a forward, the bytes of its cheap results, and the peak of its backward."""

        def run(forward: _Forward, arguments: list[Tensor]) -> tuple[int, int, int]:
            bytes_ = LiveBytes()
            with bytes_:
                outputs = forward()
                peak, cheap, before = bytes_.peak, bytes_.num_cheap, bytes_.restart()
                if outputs:
                    gradients = [torch.empty_like(output) for output in outputs]
                    torch.autograd.backward(outputs, gradients)
                return peak, cheap, bytes_.peak - before

        return self._with_forward(run)

    def split(self) -> tuple[int, int, int] | None:
        """The peak of a backward of inputs alone, what that leaves for the weights, and the peak of the rest.

        None where it can't be split.
        """

        def run(forward: _Forward, arguments: list[Tensor]) -> tuple[int, int, int] | None:
            bytes_ = LiveBytes()
            with bytes_:
                received = [argument for argument in arguments if argument.requires_grad]
                outputs = list(splittable(forward(), received))
                before, weights = bytes_.restart(), [p for p in self._parameters.values() if p.requires_grad]
                if not outputs or not received:
                    return None
                gradients = [torch.empty_like(output) for output in outputs]
                end = begin_split_backward(outputs, gradients, received, weights)
                del gradients
                of_inputs = bytes_.peak - before
                held = bytes_.restart() - before
                end()
                return of_inputs, max(held, 0), max(bytes_.peak - before - held, 0)

        try:
            return self._with_forward(run, leaves=True)
        except Exception:  # of torch, or of a block that changes its input, a leaf here
            return None

    def _with_forward(self, run: Callable[[_Forward, list[Tensor]], T], *, leaves: bool = False) -> T:
        def call(forward: Callable[..., Any]) -> T:
            args, kwargs = tree_map(lambda leaf: self._made(leaf, is_leaf=leaves), self._inputs)
            arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]

            def differentiable() -> list[Tensor]:
                outputs = tree_leaves(forward(*args, **kwargs))
                return [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]

            return run(differentiable, arguments)

        return with_state(self._block, {**self._parameters, **self._buffers}, call)

    def _made(self, leaf: Any, *, is_leaf: bool) -> Any:
        if not isinstance(leaf, TensorMeta):
            return leaf
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device).requires_grad_(leaf.requires_grad)
        return made if is_leaf else made.clone()  # a leaf of autograd can't be changed in place
