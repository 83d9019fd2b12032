"""Which values of a compiled forward its backward computes again: marks in the graph of both. torch 2.13.

AOTAutograd traces a forward and its backward into one graph. torch's partitioner cuts it, and chooses what the forward
keeps for the backward by what memory and time that takes, unless nodes are marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, InputMutationAOTOutput, PlainAOTInput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_3d.torch_internals.dispatch import IsKept, OpOverload, schema_of

_MARK = "recompute"
_AUTHORS_CHECKPOINT = "ac_graph_id"
_TANGENTS = "tangents"
_CHANGE = torch.ops.aten.copy_.default
"""Writes what became of an input into it; an input that has a gradient is written behind the graph, from a result."""
_SMALL = 2**16
"""Bytes of an input up to which it is copied where it may change."""
_aten = torch.ops.aten
_FILLS = frozenset(
    {
        *(_aten.bernoulli.p, _aten.bernoulli.Tensor, _aten.cauchy.default, _aten.exponential.default),
        *(_aten.geometric.default, _aten.log_normal.default, _aten.normal_functional.default),
        *(_aten.random.default, getattr(_aten.random, "from"), _aten.random.to, _aten.uniform.default),
    }
)
"""The operators that remain in graphs of those that fill their first argument with random numbers."""
_ORIGINS = "desc"
"""Which input or result of the function a placeholder is, or each result of the graph."""


class JointGraphPass(CustomGraphPass):
    """Marks nodes, the last thing before the graph is cut.

    Args:
        is_kept: Of operators whose results are kept, where those of all other operators of torch are computed again,
            unless the code checkpoints parts of itself; None leaves the choice to the partitioner.
    """

    def __init__(self, is_kept: IsKept | None) -> None:
        self._is_kept = is_kept

    def __call__(self, graph: Graph) -> None:
        """Mark the nodes of a graph; one without a backward is left as it is.

        Raises:
            RuntimeError: compiled code would give other numbers than eager code.
        """
        refuse_wrong_code(graph)
        if not any(map(_is_tangent, graph.nodes)):
            return
        _copy_changing_inputs(graph)
        _tell_dtypes(graph)
        if self._is_kept is not None:
            _mark(graph, self._is_kept)

    def uuid(self) -> object:
        """Part of the key by which compiled code is found again."""
        rule = "" if self._is_kept is None else f"{self._is_kept.__module__}.{self._is_kept.__qualname__}"
        return get_hash_for_files((__file__,), extra=rule)

    def partition(
        self, module: GraphModule, inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Mark a graph and cut it, as a ``partition_fn`` of AOTAutograd."""
        self(module.graph)
        cut: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(module, inputs, **kwargs)
        return cut


def refuse_wrong_code(graph: Graph) -> None:
    """Refuse to compile what would give other numbers than eager code.

    Sums with a factor: some of inductor's patterns leave it out, as in ``torch.add(x, a @ b, alpha=0.1)``. Random
    numbers that fill a part of a tensor that is not one stretch of memory: eager code draws in another order there.

    Raises:
        RuntimeError: the graph has one of them.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.add.Tensor and node.kwargs.get("alpha", 1) != 1:
            raise RuntimeError("it adds with a factor (alpha), which compiled code may leave out: multiply, then add")
        if node.target not in _FILLS or not isinstance(node.args[0], Node):
            continue
        filled = node.args[0].meta["val"]
        if not is_non_overlapping_and_dense_or_false(filled):
            raise RuntimeError(
                f"it draws random numbers into a view of shape {tuple(filled.shape)} and strides {filled.stride()}, in"
                " another order than eager code"
            )


def _is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith(_TANGENTS)


def _copy_changing_inputs(graph: Graph) -> None:
    """Let a backward read what changes in place as the forward found it.

    The partitioner may let it compute a value again from a buffer that the forward has changed in place since: other
    gradients, silently (pytorch pull request 197039); or from an argument that has a gradient, which raises. Small
    inputs without gradients may be buffers that other code changes before the backward, which eager code allows where
    autograd saves what was computed from them.
    """
    inputs = graph.find_nodes(op="placeholder")
    results = graph.output_node().meta.get(_ORIGINS, ())
    changed_behind = {result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)}
    differentiated = {result.grad_of for result in results if isinstance(result, GradAOTOutput)}
    for source in inputs:
        origin = source.meta.get(_ORIGINS)
        changes = [user for user in source.users if user.target is _CHANGE and user.args[0] is source]
        may_change = isinstance(origin, PlainAOTInput) and origin not in differentiated and _is_small(source)
        if not changes and origin not in changed_behind and not may_change:
            continue
        with graph.inserting_after(inputs[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
        copy.meta.update(val=source.meta["val"].clone(), **{_MARK: CheckpointPolicy.MUST_SAVE})
        source.replace_all_uses_with(copy, delete_user_cb=partial(_is_other, (copy, *changes)))


def _is_small(node: Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return False
    num_bytes = value.numel() * value.itemsize
    return isinstance(num_bytes, int) and num_bytes <= _SMALL  # else its shape is a variable


def _is_other(own: tuple[Node, ...], user: Node) -> bool:
    return user not in own


def _tell_dtypes(graph: Graph) -> None:
    """Let what is made in the default dtype be made in the same in a backward, which may have another default."""
    for node in filter(_is_computation, graph.nodes):
        value, takes = node.meta["val"], {argument.name for argument in schema_of(node.target).arguments}
        if "dtype" in takes and not node.all_input_nodes and isinstance(value, Tensor):
            node.kwargs = {"dtype": value.dtype, **{name: to for name, to in node.kwargs.items() if to is not None}}


def _mark(graph: Graph, is_kept: IsKept) -> None:
    if any(_AUTHORS_CHECKPOINT in node.meta for node in graph.nodes):
        return
    of_backward: set[Node] = set()
    for node in graph.nodes:
        if _is_tangent(node) or not of_backward.isdisjoint(node.all_input_nodes):
            of_backward.add(node)
        elif _is_computation(node) and node.meta.get(_MARK) is None:
            kept = is_kept(node.target)
            node.meta[_MARK] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_computation(node: Node) -> bool:
    """Whether it makes tensors by an operator of torch."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace not in ("aten", "prims", "_c10d_functional") or schema_of(node.target).is_mutable:
        return False
    return isinstance(node.meta.get("val"), Tensor | tuple | list)
