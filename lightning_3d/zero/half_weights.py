"""Stage 3: weights that a step reads through autocast alone are gathered in its 16 bits, half the bytes.

Autocast casts the full fp32 weight of a linear layer before it multiplies; a layer norm reads its own in fp32. The
first training step gathers all in fp32, and notes which weights nothing but casts reads. From the second on a unit
gathers these as they are cast, and what hangs in the module is a `HalfWeight`: a parameter in fp32 to everyone.

    autocast's cast         copies what was gathered      the same numbers, as each rank casts its rows before
    whatever else reads it  gathers it once more in fp32  right, and slower: a validation without autocast, a penalty
    its gradient            in fp32                       what casts give back, summed as ever

Weights that compiled code reads stay in fp32: a compiler follows no `HalfWeight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.torch_internals.dispatch import (
    TO_COPY,
    Operator,
    OperatorMode,
    is_in_compiled_code,
    makes_a_view,
    name_of,
)
from lightning_3d.torch_internals.fsdp import UnitParameter, parameters_of_unit, when_gathered
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import make_wrapper_like, no_torch_function, storage_of
from lightning_3d.zero.dp_comm import DPComm
from lightning_3d.zero.shard import plain


class HalfWeight(Tensor):
    """A gathered fp32 weight, as modules have it, or a view of it, of which the unit gathered 16-bit values.

    Args:
        half: That view of these.
        gather: Gives that view of the weight in fp32; of the weight itself every replica calls it.
        weight: What this is a view of; None for the weight itself.
    """

    @staticmethod
    def __new__(cls, half: Tensor, gather: Callable[[], Tensor], weight: HalfWeight | None = None) -> HalfWeight:
        made: HalfWeight = make_wrapper_like(cls, half, dtype=torch.float32)
        return made

    def __init__(self, half: Tensor, gather: Callable[[], Tensor], weight: HalfWeight | None = None) -> None:
        self._half, self._gather, self._weight = half, gather, weight
        self._full: Tensor | None = None

    @property
    def is_read_in_full(self) -> bool:
        """Whether the weight is there in fp32, where code may have changed it."""
        return (self if self._weight is None else self._weight)._full is not None

    def full(self) -> Tensor:
        """The values in fp32, of the weight the same tensor until the unit is gathered anew."""
        if self._weight is not None:
            return self._gather()
        if self._full is None:
            self._full = self._gather()
        return self._full

    def renew(self) -> None:
        """After the unit was gathered."""
        self._full = None

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Operator, types: Sequence[type], args: Args = (), kwargs: Any = None
    ) -> object:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, HalfWeight):
            if _is_cast(func, kwargs, first._half.dtype) and not first.is_read_in_full:
                return func(first._half, **kwargs)  # a copy, laid out as one of the weight in fp32
            if makes_a_view(func):
                half = func(first._half, *args[1:], **kwargs)
                weight = first if first._weight is None else first._weight
                return HalfWeight(half, lambda: func(first.full(), *args[1:], **kwargs), weight)
        args, kwargs = tree_map_only(HalfWeight, lambda weight: weight.full(), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has a private argument
        return f"HalfWeight(shape={tuple(self.shape)}, gathered={self._half.dtype})"


def _is_cast(func: object, kwargs: Mapping[str, object], dtype: torch.dtype) -> bool:
    """Whether an operator casts as autocast does."""
    return func is TO_COPY and kwargs.get("dtype") == dtype


class HalfWeights:
    """Finds the weights of units that are gathered in 16 bits.

    Args:
        units: None of them gathered yet.
        dtype: To which autocast casts.
        value: Gathers a parameter of a unit in full; every replica calls it.
    """

    def __init__(
        self,
        units: Sequence[FSDPModule],
        replicas: DPComm,
        dtype: torch.dtype,
        device: torch.device,
        value: Callable[[Any], Tensor],
    ) -> None:
        self._replicas, self._dtype, self._device, self._value = replicas, dtype, device, value
        self._units = units
        self._parameters = [parameter for unit in units for parameter in parameters_of_unit(unit)]
        self._readers: _Readers | None = _Readers(dtype)
        self._gathered: dict[UnitParameter, HalfWeight] = {}
        self.texts: tuple[str, ...] = ()
        """Lines for the plan."""
        for unit in units:
            when_gathered(unit, partial(self._after_gather, parameters_of_unit(unit)))

    def _after_gather(self, parameters: Sequence[UnitParameter], _: object) -> None:
        for parameter in parameters:
            if (gathered := self._gathered.get(parameter)) is not None:
                gathered.renew()
            elif self._readers is not None and parameter.sharded.dtype == torch.float32:
                self._readers.watch(parameter)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a part of a step inside."""
        if self._readers is None or not torch.is_grad_enabled():
            yield
            return
        with self._readers:
            yield
        self._readers.has_seen = True

    def begin_step(self) -> None:
        """Between steps; every replica calls it."""
        if self._readers is None or not self._readers.has_seen:
            return
        readers, self._readers = self._readers, None
        is_read = [parameter in readers.casts and parameter not in readers.others for parameter in self._parameters]
        own = torch.tensor(is_read, dtype=torch.uint8, device=self._device)  # replicas' data may take other paths
        everyone = self._replicas.all_gather(own.new_empty(self._replicas.num_shards, len(own)), own)()
        chosen = [p for p, is_alike in zip(self._parameters, everyone.amin(0).tolist(), strict=True) if is_alike]
        for unit in self._units:
            unit.reshard()
        for parameter in chosen:
            self._gather_half(parameter)
        if chosen:
            sizes = [sum(p.sharded.numel() for p in parameters) for parameters in (chosen, self._parameters)]
            share = f"{sizes[0] / sizes[1]:.0%} of the parameters"
            self.texts = (f"gathered in {str(self._dtype)[6:]}, as autocast alone reads them: {share}",)

    def _gather_half(self, parameter: UnitParameter) -> None:
        before = parameter.gathered

        def stand_in(half: Tensor) -> Tensor:
            weight = self._gathered[parameter] = HalfWeight(half, lambda: plain(self._value(parameter.sharded)))
            return weight

        now = parameter.gather_in(self._dtype, stand_in)
        if before.requires_grad:  # a backward through the graph of an earlier step
            before.register_post_accumulate_grad_hook(partial(_hand_on, now))


def _hand_on(now: nn.Parameter, before: Tensor) -> None:
    assert before.grad is not None
    now.grad = before.grad if now.grad is None else now.grad + before.grad
    before.grad = None


class _Readers(OperatorMode):
    """Notes what reads gathered parameters, below autograd."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._watched: dict[int | None, UnitParameter] = {}  # by the storage that it is gathered into
        self.casts: set[UnitParameter] = set()
        """Read by casts to the dtype."""
        self.others: set[UnitParameter] = set()
        """Read by something else."""
        self.has_seen = False
        """Whether a part of a step has run."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is: in a mode that looks into it, it runs eagerly, and ``fullgraph`` fails."""
        return True

    def watch(self, parameter: UnitParameter) -> None:
        """Note what reads a parameter, which is gathered now."""
        self._watched[storage_of(parameter.memory)] = parameter

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not makes_a_view(func) and not name_of(func).startswith("fsdp::"):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and (parameter := self._watched.get(storage_of(leaf))) is not None:
                    is_cast = _is_cast(func, kwargs, self._dtype) and not is_in_compiled_code()
                    (self.casts if is_cast else self.others).add(parameter)
        return func(*args, **kwargs)
