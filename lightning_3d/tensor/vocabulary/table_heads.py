"""Weights that code outside of blocks multiplies with as a head does: ``F.linear(x, self.tokens.weight)``.

No module is called for such a product. So while steps run, embedding tables, and matrices that glue owns, are of a
class that sees the functions of them, and answers products that widen by lazy logits. Views of them, as in
``x @ self.tokens.weight.T``, are seen likewise. Every other function finds a parameter as it ever was.

    table      F.linear(x, table), views of it           -> seen
    its view   F.linear(x, view), x @ view, views of it  -> seen
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.vocabulary.head_record import HeadRecord, obstacle_of
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks
from lightning_3d.torch_internals.dispatch import GET_DATA, SET_DATA, DisableTorchFunctionSubclass, is_in_place
from lightning_3d.torch_internals.modules import named_state, parameters_of
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import base_of, makes_a_parameter
from lightning_3d.zero.attributes import OWN_PREFIX
from lightning_3d.zero.gathering import wait_for
from lightning_3d.zero.outside_reads import gathered_as, whole_of

_HEAD, _MODE = f"{OWN_PREFIX}head", f"{OWN_PREFIX}mode"


class _Seen(Tensor):
    """A tensor whose functions are seen by a `TableHead`."""

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (product := _as_product(func, args, kwargs)) is not None:
            table, rows, weight, bias = product
            logits = _head_of(table).logits(rows, weight, bias)
            if logits is not None:
                return logits
        if func is Tensor.detach and makes_a_parameter():  # which has to be of the class of what it is made of
            _let_go(args[0])
            return nn.Parameter(args[0]) if isinstance(args[0], nn.Parameter) else func(*args, **kwargs)
        if is_in_place(getattr(func, "__name__", "")) or func in _SETTERS:
            for leaf in tree_leaves(args[:1]):
                if isinstance(leaf, _Seen):
                    _head_of(leaf).record.make_before(getattr(func, "__name__", str(func)))
        seen = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Seen)]
        with _as_ever(seen):
            output = func(*args, **kwargs)
        if seen and isinstance(output, Tensor):
            _head_of(seen[0]).see_output(output, seen[0], func)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_ever([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_ever([self]):
            return self.__reduce_ex__(protocol)


class _SeenParameter(_Seen, nn.Parameter):
    """A table."""


class _SeenTensor(_Seen):
    """A view of a table, or its values gathered without a gradient."""


_CLASSES: Mapping[type[Tensor], type[Tensor]] = {nn.Parameter: _SeenParameter, Tensor: _SeenTensor}
_OWN: Mapping[type[Tensor], type[Tensor]] = {seen: own for own, seen in _CLASSES.items()}


def _head_of(tensor: Any) -> TableHead:
    head: TableHead = vars(tensor)[_HEAD]
    return head


def _is_of_present_mode(tensor: Any) -> bool:
    """Whether gradients go to the table from what is made of a tensor now: not through a view made without them."""
    return vars(tensor)[_MODE] in (None, torch.is_grad_enabled())


@contextmanager
def _as_ever(tensors: Sequence[Any]) -> Iterator[None]:
    """Let tensors be as if nobody saw their functions, inside."""
    seen = {id(tensor): (tensor, type(tensor), _own_attributes(tensor)) for tensor in tensors}.values()
    for tensor, *_ in seen:
        _let_go(tensor)
    try:
        yield
    finally:
        for tensor, cls, attributes in seen:
            tensor.__class__ = cls
            vars(tensor).update(attributes)


def _own_attributes(tensor: Any) -> dict[str, Any]:
    return {name: vars(tensor)[name] for name in (_HEAD, _MODE)}


def _let_go(tensor: Any) -> None:
    """Give a tensor its own class back."""
    tensor.__class__ = _OWN[type(tensor)]
    del vars(tensor)[_HEAD], vars(tensor)[_MODE]


_SETTERS = {SET_DATA, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]  # a getset descriptor
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm})


def _as_product(func: Function, args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any] | None:
    """Read a call as the product of rows and a tensor that is seen: that, rows, ``[classes, width]``, bias or None."""
    if func is F.linear:
        rows, weight, bias = _linear(*args, **kwargs)
        return (weight, rows, weight, bias) if _is_weight(weight) and not isinstance(rows, _Seen) else None
    if func not in _PRODUCTS or kwargs or len(args) != 2 or isinstance(args[0], _Seen):
        return None
    rows, factor = args
    return (factor, rows, factor.t(), None) if _is_weight(factor) else None


def _is_weight(tensor: Any) -> bool:
    return isinstance(tensor, _Seen) and tensor.dim() == 2 and _is_of_present_mode(tensor)


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The arguments of ``F.linear``."""
    return input, weight, bias


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A matrix that glue may multiply with as a head does."""

    owner: nn.Module
    name: str
    """In its owner."""

    @property
    def parameter(self) -> nn.Parameter | None:
        """It may be absent, sharded, or what FSDP2 has gathered; None if the owner has none by this name now."""
        return parameters_of(self.owner).get(self.name)


def find_tables(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Table]:
    """Find tables of embeddings, and matrices that glue owns.

    Args:
        blocks: FQN -> block.

    Returns:
        FQN -> table; tied ones by the first name.
    """
    inside = {inner for block in blocks.values() for inner in block.modules()}
    embeddings = {block for block in blocks.values() if isinstance(block, nn.Embedding)}
    found: dict[Tensor, tuple[str, Table]] = {}
    others = set[Tensor]()
    for fqn, tensor, owner in named_state(module):
        if owner in inside and owner not in embeddings:
            others.add(tensor)  # its block multiplies with it
        elif isinstance(tensor, nn.Parameter) and tensor.dim() == 2 and tensor.is_floating_point():
            found.setdefault(tensor, (fqn, Table(owner=owner, name=fqn.rpartition(".")[2])))
    return {fqn: table for tensor, (fqn, table) in found.items() if tensor not in others}


class TableHead:
    """A table, and the products with it.

    Args:
        fqn: Its name.
        is_traced: Whether the step that was traced multiplies with it as a head does.
        is_absent: Whether another pipeline stage does so.
    """

    def __init__(self, fqn: str, table: Table, *, is_traced: bool = False, is_absent: bool = False) -> None:
        self.fqn, self._table, self._is_traced, self._is_absent = fqn, table, is_traced, is_absent
        self.record = HeadRecord()
        self._seen: list[weakref.ref[Tensor]] = []
        self._aliases: list[Tensor] = []  # of the same memory, by which its values may be changed unnoticed
        self._has_trained = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """See its functions inside."""
        if (parameter := self._table.parameter) is None:
            yield
            return
        wait_for([parameter])
        try:
            if isinstance(parameter, DTensor) and whole_of(parameter) is not None:
                with gathered_as(parameter, self._see):
                    yield
            else:
                self._see(parameter)
                yield
            self._has_trained |= torch.is_grad_enabled()
        finally:
            for reference in self._seen:
                if (tensor := reference()) is not None and type(tensor) in _OWN:
                    _let_go(tensor)
            self._seen.clear()
            self._aliases.clear()

    def _see(self, tensor: Tensor, mode: bool | None = None) -> None:
        if (cls := _CLASSES.get(type(tensor))) is not None:
            tensor.__class__ = cls
            vars(tensor).update({_HEAD: self, _MODE: mode})
            self._seen.append(weakref.ref(tensor))

    def see_output(self, tensor: Tensor, origin: Tensor, func: Function) -> None:
        """See the functions of a tensor that was made of one that is seen, if that is a matrix of the same memory."""
        if func == GET_DATA:
            self._aliases.append(tensor.detach())  # has its version
        if type(tensor) is not Tensor or tensor.dim() != 2 or not _is_of_present_mode(origin):
            return
        with DisableTorchFunctionSubclass():
            base = base_of(origin)
            is_view = base_of(tensor) is (origin if base is None else base)
        if is_view:
            self._see(tensor, torch.is_grad_enabled())

    def logits(self, rows: Any, weight: Tensor, bias: Any) -> Tensor | None:
        """The product with a view of it, lazily; None if it has to be made."""
        if not isinstance(rows, Tensor) or rows.dim() == 0 or weight.dim() != 2 or rows.shape[-1] != weight.shape[1]:
            return None
        if weight.shape[0] <= weight.shape[1] or self.record.is_read:
            return None
        if (reason := _obstacle(rows, weight, bias)) is not None:
            self.record.refuse(reason, has_grad=torch.is_grad_enabled())
            return None
        return self.record.lazily(rows, weight, bias, num_classes=weight.shape[0], aliases=self._aliases)

    @property
    def text(self) -> str | None:
        """The outcome in training, for people; None if it is no head."""
        is_seen = self.record.is_known or self.record.reason is not None
        if not is_seen and not self._is_traced:
            return None
        if not is_seen and self._has_trained and not self._is_absent:
            return f"{self.fqn}: makes logits, as they are made of a copy, or of what its block has gathered"
        return f"{self.fqn}: {self.record.text(is_absent=self._is_absent)}"


def _obstacle(rows: Tensor, weight: Tensor, bias: Any) -> str | None:
    is_plain = type(rows) is Tensor and rows.device == weight.device
    if not is_plain or not (bias is None or type(bias) in (Tensor, nn.Parameter)):
        return "its input or its bias is no plain tensor"
    if has_saved_tensor_hooks():
        return "it runs inside of a checkpoint or other hooks on saved tensors"
    return obstacle_of(rows, weight)
