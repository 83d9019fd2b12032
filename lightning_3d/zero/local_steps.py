"""Optimizers step plain local tensors.

While an optimizer's ``step`` runs, its ``param_groups`` hold the plain part of each parameter that this rank steps, and
its ``state`` is keyed by them; before and after they hold the module's parameters. So ``foreach`` and ``fused`` work in
every layout, and no step pays for the dispatch of DTensors. 16-bit parameters may be stepped in fp32
(`MasterWeights`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.distributed.mesh import is_shard
from lightning_3d.distributed.tp_replica_sync import TPReplicaSync
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.optimizers import first_step_post_hook, make_hookable
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import Arguments
from lightning_3d.zero.absent_states import AbsentStates
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.loading import loading_states
from lightning_3d.zero.master_weights import MasterWeights, is_half, without_masters
from lightning_3d.zero.offload.steps import OffloadedSteps
from lightning_3d.zero.offload.windows import Part
from lightning_3d.zero.shard import plain
from lightning_3d.zero.swapped import StandIns, Swapped
from lightning_3d.zero.whole_steps import GatheredParameters, WholeSteps
from lightning_3d.zero.wrapped_optimizers import with_wrapped


class LocalSteps:
    """Lets optimizers step this rank's shards.

    Args:
        check: Called with an optimizer before its step; raises if it must not step now.
        offload: Steps them elsewhere than on the device, if that is wanted.
        masters: Steps 16-bit parameters in fp32, if that is wanted.
        whole: Brings whole parameters to those that step them.
        together: Optimizers that step all parameters together.
        has_gradients: Whether there are gradients before a closure is called, as in manual optimization, so that a step
            may begin with them (SAM).
        alike: Keeps what tensor parallel does not shard the same on its ranks; not in host memory.
    """

    def __init__(
        self,
        zero: Zero,
        *,
        check: Callable[[Optimizer], None],
        offload: OffloadedSteps | None,
        masters: MasterWeights | None,
        whole: WholeSteps,
        together: Collection[Optimizer],
        has_gradients: bool,
        alike: TPReplicaSync | None,
    ) -> None:
        self._check, self._alike = check, alike
        self._together, self._has_gradients = together, has_gradients
        self._zero, self._offload, self._masters = zero, offload, masters
        self._whole, self._gathered = whole, dict[Optimizer, GatheredParameters]()
        self._parts = StandIns()
        self._swapped: dict[Optimizer, Swapped] = {}
        self._lent: dict[Optimizer, list[nn.Parameter]] = {}  # parameters that are stepped in fp32 now
        self._unfinished: set[Optimizer] = set()  # whose step has begun
        self._depth: Counter[Optimizer] = Counter()  # steps that run: its own, and those of base classes inside of it
        self._optimizers: Sequence[Optimizer] = ()
        self.running = set[Optimizer]()
        """The optimizers whose own code steps parameters now."""

    @contextmanager
    def hooked(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Inside, ``step()`` of these optimizers sees this rank's plain shards in ``param_groups``."""
        self._optimizers = optimizers
        for optimizer in optimizers:
            make_hookable(optimizer)
            for one in with_wrapped(optimizer):
                self._take_own_rows(one)
        hooks = [optimizer.register_step_pre_hook(self._before) for optimizer in optimizers]
        hooks += [first_step_post_hook(optimizer, self._after) for optimizer in optimizers]
        try:
            with self._loading(optimizers), ExitStack() as stack:
                for kind in {type(optimizer) for optimizer in optimizers}:
                    stack.enter_context(self._switching(kind))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _loading(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Inside, states that are loaded lie where those of steps do, and have their dtype."""
        with ExitStack() as stack:
            for optimizer in optimizers:
                if self._masters is None:
                    stack.callback(optimizer.register_load_state_dict_pre_hook(without_masters).remove)
                if self._offload is not None:
                    self._bring_home(optimizer)
                    stack.enter_context(loading_states(optimizer, self._state_place, self._bring_home))
                elif self._masters is not None:
                    stack.enter_context(loading_states(optimizer, self._state_place))
            yield

    def _bring_home(self, optimizer: Optimizer) -> None:
        """Make master weights where they are to lie, one after the other, and move all other states there."""
        assert self._offload is not None
        for parameter in self._parameters(optimizer):
            is_here = not self._zero.stepped[parameter].owned_by_other
            if parameter.requires_grad and is_here and parameter not in self._zero.whole:
                self._make_master(optimizer, parameter, self._offload)
        self._offload.to_host(optimizer)

    def _make_master(self, optimizer: Optimizer, parameter: nn.Parameter, offload: OffloadedSteps) -> None:
        if self._masters is not None and self._is_widened(parameter):
            own = self._own(optimizer, parameter)
            if self._masters.make(optimizer, parameter, own):
                offload.to_host(optimizer, parameter)

    def _state_place(self, parameter: nn.Parameter) -> tuple[torch.device, torch.dtype]:
        device = plain(parameter).device if self._offload is None else torch.device("cpu")
        return device, torch.float32 if self._is_widened(parameter) else parameter.dtype

    def _is_widened(self, parameter: nn.Parameter) -> bool:
        return self._masters is not None and parameter in self._zero.shards and is_half(parameter)

    def _take_own_rows(self, optimizer: Optimizer) -> None:
        """Cut states that an optimizer makes when it is made (Adagrad)."""
        for parameter, state in list(optimizer.state.items()):
            if not isinstance(parameter, nn.Parameter) or parameter not in self._zero.stepped:
                continue
            own = (
                partial(self._whole.own, parameter)
                if parameter in self._zero.whole
                else self._zero.shards[parameter].own
            )
            full = {k: own(v) for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
            if self._zero.stepped[parameter].owned_by_other:
                del optimizer.state[parameter]
            else:
                dtype = torch.float32 if self._is_widened(parameter) else None
                state.update((key, value.to(dtype or value.dtype, copy=True)) for key, value in full.items())

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self._depth[optimizer] += 1
        if self._depth[optimizer] > 1:
            return args, kwargs
        if optimizer in self._unfinished:
            self.refuse_unfinished()
        rest = args[1:] if args and args[0] is optimizer else args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self._enter(optimizer)
            return args, kwargs

        given = dict[nn.Parameter, tuple[int, int]]()  # gradients with which the step goes on

        def enter() -> None:
            self._enter(optimizer)
            given.clear()
            given.update(self._swapped[optimizer].gradients())

        if optimizer in self._together and self._has_gradients:
            enter()

        def run() -> object:
            zeroed = self._swapped[optimizer].without_gradients(given) if optimizer in self._swapped else []
            self._finish(optimizer)  # a closure may be called again
            self._zero.drop_gradients(zeroed)
            for parameter in zeroed:
                parameter.grad = None
            self._unfinished.discard(optimizer)  # it trains, too
            result = closure()
            if optimizer in self._together:
                result = self._whole.mean_loss(result)
            enter()
            return result

        if rest:
            return (*args[: len(args) - len(rest)], run, *rest[1:]), kwargs
        return args, {**kwargs, "closure": run}

    def _after(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._depth[optimizer] -= 1
        if self._depth[optimizer] > 0:
            return
        del self._depth[optimizer]
        self._finish(optimizer)
        parameters = self._parameters(optimizer)
        self._zero.all_gather_params(self._trained(parameters))
        self._zero.drop_gradients([*parameters, *self._unused()])
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            shard = self._zero.stepped.get(parameter)
            if parameter.is_meta if shard is None else shard.owned_by_other:
                optimizer.state.setdefault(parameter, AbsentStates())
        self._unfinished.discard(optimizer)

    def _switching(self, kind: type[Optimizer]) -> AbstractContextManager[None]:
        """Let ``train()`` and ``eval()`` of schedule-free optimizers, which move parameters, see what they step."""
        methods = {name: found for name in ("train", "eval") if callable(found := getattr(kind, name, None))}
        return replaced("modes of optimizers", kind, {name: self._switch(found) for name, found in methods.items()})

    def _switch(self, method: Callable[..., object]) -> Callable[..., object]:
        def switch(given: Optimizer | LightningOptimizer, *args: object) -> object:
            """Collective, but inside of a step."""
            optimizer = given.optimizer if isinstance(given, LightningOptimizer) else given
            if optimizer not in self._optimizers or optimizer in self._depth:
                return method(optimizer, *args)
            self._zero.wait_params()
            self._gather(optimizer, steps=False)
            self._swap(optimizer, steps=False)
            try:
                result = method(optimizer, *args)
            finally:
                self._put_back(optimizer)
            self._finish(optimizer)
            self._zero.all_gather_params(self._trained(self._parameters(optimizer)))
            return result

        return switch

    def _unused(self) -> list[nn.Parameter]:
        """Parameters of no optimizer, which may get one: their gradients until then are not to be stepped."""
        used = {parameter for optimizer in self._optimizers for parameter in self._parameters(optimizer)}
        return [parameter for parameter in self._zero.shards if parameter not in used]

    def _enter(self, optimizer: Optimizer) -> None:
        self._check(optimizer)
        self._unfinished.add(optimizer)
        self._zero.wait_params()
        self._zero.sync_stray_grads()
        self._gather(optimizer, steps=True)
        if self._offload is not None:
            parts = self._offloaded(optimizer, self._offload)
            self._swapped[optimizer] = self._offload.enter(optimizer, parts)
        elif self._alike is not None:
            self._alike.before_step(optimizer, self._swap(optimizer, steps=True))
        else:
            self._swap(optimizer, steps=True)
        self.running.add(optimizer)

    def _gather(self, optimizer: Optimizer, *, steps: bool) -> None:
        """Bring cut parameters to those that step them: those with gradients, or all."""
        cut = [parameter for parameter in self._parameters(optimizer) if parameter in self._zero.whole]
        gradients = {p: own for p in cut if steps and (own := self._zero.gradient(p)) is not None}
        seen = [p for p in cut if not steps or p in gradients or self._zero.whole[p].owner is None]
        self._gathered[optimizer] = self._whole.gather(seen, gradients)

    def _swap(self, optimizer: Optimizer, *, steps: bool) -> list[Tensor]:
        """Give an optimizer this rank's parts; returns those that tensor parallel does not shard."""
        swapped: dict[nn.Parameter, nn.Parameter | None] = {}
        whole: list[Tensor] = []
        with DisableTorchFunctionSubclass():  # of parameters as they are held
            for parameter in self._parameters(optimizer):
                if self._is_elsewhere(optimizer, parameter):
                    swapped[parameter] = None
                    continue
                gradient = self._gradient(optimizer, parameter) if steps else None
                if gradient is not None and self._is_widened(parameter):
                    gradient = gradient.float()
                widens = gradient is not None if steps else bool(optimizer.state.get(parameter))
                part = self._part(optimizer, parameter, widens=widens)
                if parameter.requires_grad and not is_shard(parameter, "tp"):
                    whole.append(part)
                if part is not parameter:
                    part.grad = gradient
                    swapped[parameter] = part
        self._swapped[optimizer] = Swapped(optimizer, swapped)
        return whole

    def _offloaded(self, optimizer: Optimizer, offload: OffloadedSteps) -> list[Part]:
        parts: list[Part] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rounded: Tensor | None = None
                if parameter not in self._zero.shards:
                    part, gradient = parameter, parameter.grad
                elif self._is_elsewhere(optimizer, parameter):
                    continue
                elif (gradient := self._gradient(optimizer, parameter)) is not None:
                    self._make_master(optimizer, parameter, offload)  # of a group that was added in training
                    part = self._part(optimizer, parameter, widens=True)
                    if self._masters is not None and self._is_widened(parameter):
                        rounded = self._own(optimizer, parameter)
                if gradient is not None:
                    parts.append(Part(parameter=parameter, values=part, gradient=gradient, rounded=rounded))
        return parts

    def _is_elsewhere(self, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Whether this rank does not step it now, but its owner does if it has a gradient."""
        if parameter in self._zero.whole:
            return parameter not in self._gathered[optimizer].values
        return self._zero.shards[parameter].owned_by_other

    def _own(self, optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
        """The values of what this rank steps."""
        if parameter in self._zero.whole:
            return self._gathered[optimizer].values[parameter]
        return self._zero.shards[parameter].own(parameter)

    def _gradient(self, optimizer: Optimizer, parameter: nn.Parameter) -> Tensor | None:
        if parameter in self._zero.whole:
            return self._gathered[optimizer].gradients.get(parameter)
        return self._zero.gradient(parameter)

    def _part(self, optimizer: Optimizer, parameter: nn.Parameter, *, widens: bool) -> nn.Parameter:
        """The parameter that the optimizer steps.

        Args:
            widens: Whether in fp32, if that is wanted: not where it steps nothing, as of frozen parameters.
        """
        own = self._own(optimizer, parameter)
        if widens and self._masters is not None and self._is_widened(parameter):
            self._lent.setdefault(optimizer, []).append(parameter)
            return self._masters.checkout(optimizer, parameter, own, follows=self._offload is None)
        return parameter if self._zero.stepped[parameter].is_all else self._parts.of(parameter, own)

    def refuse_unfinished(self) -> None:
        """Where the user's code goes on after a step that an exception has left.

        Raises:
            StepError: each rank has stepped some of its parameters, and others have not got them.
        """
        for optimizer in self._unfinished:
            raise StepError(
                f"The last step of {type(optimizer).__name__} was left by an exception, with some parameters stepped"
                " and others not: end the run and resume from a checkpoint."
            )

    def leave(self, optimizer: Optimizer) -> None:
        """Give an optimizer the module's parameters back, if its step failed."""
        del self._depth[optimizer]
        self._put_back(optimizer)
        self._gathered.pop(optimizer, None)

    def _parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [p for group in optimizer.param_groups for p in group["params"] if p in self._zero.stepped]

    def _trained(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The trained ones of these parameters of which this rank holds something."""
        with DisableTorchFunctionSubclass():
            return [p for p in parameters if p.requires_grad and p in self._zero.shards]

    def _put_back(self, optimizer: Optimizer) -> None:
        self.running.discard(optimizer)
        if (swapped := self._swapped.pop(optimizer, None)) is not None:
            swapped.back()
        for parameter in self._lent.pop(optimizer, ()):
            assert self._masters is not None
            own = self._own(optimizer, parameter)
            self._masters.commit(
                optimizer, parameter, own, rounds=self._offload is None or optimizer not in self._unfinished
            )

    def _finish(self, optimizer: Optimizer) -> None:
        """After a step on all ranks: put back, and give new values of whole parameters to all that hold pieces."""
        self._put_back(optimizer)
        if self._offload is not None:
            self._offload.finish()
        if (gathered := self._gathered.pop(optimizer, None)) is not None:
            widened = {p: values for p, values in gathered.values.items() if self._is_widened(p)}
            others = {p: self._parts.let_go(p) for p in gathered.values if p not in widened}
            self._whole.give_back({**widened, **others}, gathered.pieces)
