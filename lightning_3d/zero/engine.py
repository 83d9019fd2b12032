"""The interface of all ZeRO stages to the strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.torch_internals.dispatch import foreach_multiply
from lightning_3d.zero.master_weights import is_half
from lightning_3d.zero.offload.store import Store
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.shard import RankShard, Shards, plain


class RankModule(nn.Module):
    """All that one rank holds. Runs one step of the user's module, inside the hooks of stage 3's units."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """Steps run inside of it."""

    def forward(self, run: Callable[..., object], *received: torch.Tensor) -> object:
        """Call ``run(*received)``; the tensors received from another pipeline stage pass through the root's hooks."""
        with self.around():
            return run(*received)


@dataclass(frozen=True)
class HeldGradients:
    """Gradients taken off the parameters."""

    grads: Mapping[nn.Parameter, Tensor]
    """As the parameters had them."""
    shards: Mapping[nn.Parameter, Tensor]
    """Reduced gradients of which this rank has its rows."""


NO_GRADIENTS = HeldGradients({}, {})


def _multiply(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply in place by a 0-d tensor, without reading it; 16-bit ones in fp32, as by a number of Python."""
    held = [plain(gradient) for gradient in gradients]
    for device in {tensor.device for tensor in held}:
        factor, own = scale.to(device), [tensor for tensor in held if tensor.device == device]
        for tensor in filter(is_half, own):
            tensor.copy_(tensor.float().mul_(factor))
        if others := [tensor for tensor in own if not is_half(tensor)]:
            foreach_multiply(others, factor)


class Zero(ABC):
    """The parameters that one rank holds, their gradients and who steps what.

    Args:
        module: The user's module; parameters of other pipeline stages are on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.root = RankModule(module)
        self._held: dict[nn.Parameter, Tensor] = {}  # this rank's rows of reduced gradients, in no `grad`
        self.shards: dict[nn.Parameter, RankShard] = {}
        """Parameters that this rank holds -> its part of the reduced gradient, which its optimizers step."""
        self.whole: dict[nn.Parameter, RankShard] = {}
        """Parameters that are stepped whole, by their owner or by all, while this rank holds a part, or nothing."""
        self.num_sharing = 1
        """Data-parallel ranks that share what is stepped."""
        self.owners: dict[nn.Parameter, int] = {}
        """Parameters that one of them steps whole, also those of other pipeline stages -> its index."""
        self.parameter_store = Store()
        """Holds parameters that do not lie on the device."""
        self.shows_gradients = True
        """Whether the user's code may look at gradients before the optimizer's step, so that they have to be whole."""

    @property
    def stepped(self) -> Shards:
        """Parameters that this rank holds -> what its optimizers step, of which it has states."""
        return ChainMap(self.whole, self.shards) if self.whole else self.shards

    @property
    def gathers(self) -> tuple[str, ...]:
        """Lines for the plan on how parameters are gathered; there once steps have shown it."""
        return ()

    @abstractmethod
    def assign_shards(self, kinds: Mapping[Optimizer, OptimizerKind]) -> None:
        """Settle which part of each parameter its optimizer steps, before training; ends with `release`."""

    def release(self) -> None:  # noqa: B027
        """Leave the parameters alone, after training."""

    def keep_states(self, new_state: Callable[[torch.Size, torch.dtype], Tensor]) -> None:
        """Let optimizer states that come from checkpoints lie in memory made so."""
        self.shards, self.whole = (
            {parameter: replace(shard, new_state=new_state) for parameter, shard in shards.items()}
            for shards in (self.shards, self.whole)
        )

    # ---- a step

    @abstractmethod
    def begin_step(self, *, splits_backward: bool) -> None:
        """Before the microbatches of a pipeline step.

        Args:
            splits_backward: Whether weight gradients come apart from the backward of their block.
        """

    def stage_backward(self, stage: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Around the backward of a microbatch on a pipeline stage, unless weight gradients come apart from it.

        Args:
            is_last: Whether it is this stage's last one in the step.
        """
        return nullcontext()

    @abstractmethod
    def end_step(self) -> None:
        """After the microbatches: reduce the gradients that are not reduced yet."""

    def sit_out(self, blocks: Sequence[nn.Module]) -> bool:
        """In a pipeline step that has failed on this rank: take part in what others do as they call these blocks.

        Returns:
            Whether it can; whole weights take nothing.
        """
        return True

    @abstractmethod
    def abandon_step(self) -> None:
        """In place of `end_step`, on all ranks, where the step has failed on some: drop its gradients."""

    @abstractmethod
    def set_accumulating(self, accumulating: bool) -> None:
        """Without a pipeline: whether the next backward is followed by another before the optimizer's step."""

    def before_backward(self, loss: Tensor) -> None:  # noqa: B027
        """Without a pipeline: before Lightning runs the backward of a loss."""

    def after_backward(self) -> None:  # noqa: B027  # hooks of the backward do most
        """Without a pipeline: after Lightning has run the backward of a loss."""

    def stop_sync(self) -> None:  # noqa: B027
        """Without a pipeline: after the last backward of a step; those that follow are not Lightning's."""

    @abstractmethod
    def sync_stray_grads(self) -> None:
        """Reduce gradients that the user's code accumulated outside of ``training_step``; a collective, called before
        ``optimizer.step``, of ranks that have run the same backwards.
        """

    def gather_grads(self) -> None:  # noqa: B027
        """After a backward: make the gradients whole if they may be seen; every rank calls it. At stage 3 ``grad`` is a
        shard.
        """

    @abstractmethod
    def begin_forward(self) -> None:
        """Before any step of the user's module."""

    @abstractmethod
    def wait_params(self) -> None:
        """Wait for all-gathers of parameters; at stage 3 reduce gradients outside of units, and reshard every unit."""

    def all_gather_params(self, parameters: Iterable[nn.Parameter]) -> None:  # noqa: B027
        """After an optimizer has stepped its shards of these parameters; stage 3 gathers them when they are read."""

    # ---- gradients

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of the reduced gradient: plain, of the shape of what its optimizer steps; a view."""
        held = self._held.get(parameter)
        return held if parameter.grad is None else self.shards[parameter].own(parameter.grad)

    def set_gradient(self, parameter: nn.Parameter, own: Tensor) -> None:
        """Give a parameter this rank's part of its reduced gradient."""
        if self.shards[parameter].size > 1:
            self._held[parameter] = own
        else:
            parameter.grad = self.shards[parameter].like_parameter(own)

    def held_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The plain tensors that these parameters' gradients lie in, whole or this rank's rows."""
        found = [gradient for p in parameters for gradient in (p.grad, self._held.get(p)) if gradient is not None]
        return list(map(plain, found))

    def widen_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make 16-bit gradients fp32, for hooks and norms, and for optimizers that step in fp32."""
        for parameter in parameters:
            if parameter.grad is not None and is_half(parameter.grad):
                parameter.grad_dtype = None  # any
                parameter.grad = parameter.grad.float()
            if (own := self._held.get(parameter)) is not None and is_half(own):
                self._held[parameter] = own.float()

    def take_gradients(self) -> HeldGradients:
        """Take all gradients off."""
        grads = {p: p.grad for p in self.shards if p.grad is not None}
        for parameter in grads:
            parameter.grad = None
        taken, self._held = HeldGradients(grads, self._held), {}
        return taken

    def put_gradients(self, held: HeldGradients) -> None:
        """Give back what was taken; there are no others now."""
        for parameter, gradient in held.grads.items():
            parameter.grad = gradient
        self._held = dict(held.shards)

    def add_gradients(self, held: HeldGradients, scale: Tensor) -> None:
        """Add `scale`, a 0-d tensor, times what was taken; it may be used up."""
        _multiply([*held.grads.values(), *held.shards.values()], scale)
        for parameter, gradient in held.grads.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for parameter, own in held.shards.items():
            before = self._held.get(parameter)
            self._held[parameter] = own if before is None else before.add_(own)

    def drop_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget gradients that an optimizer has used and nobody else sees; `zero_grad` finds the others."""
        for parameter in parameters:
            self._held.pop(parameter, None)
