"""Why a step can't be traced, and where in the user's code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_3d.errors import TraceError
from lightning_3d.frames import line_text, user_lines
from lightning_3d.model.pytrees import holds_tensors, is_opaque
from lightning_3d.torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.ghost import Ghost

MISTAKES = (NameError, AttributeError, ImportError)
"""Errors that code raises by itself, whatever tensors it gets."""


def explained(error: Exception, failed_call: str, missing: Sequence[str], *, in_block: bool) -> TraceError:
    """Tell what to change in a step that failed while it was traced.

    Args:
        failed_call: The call that failed, and where.
        missing: FQNs of the blocks that were not called yet.
        in_block: Whether a block failed.
    """
    cause = f"({type(error).__name__}: {error})"
    if in_block:
        return TraceError(
            f"Block {failed_call} failed on fake and on random tensors, which tell the shapes of its outputs {cause}."
            " If it fails in one process too, mend the model; else its shapes depend on data: name finer or coarser"
            " blocks with pipeline.partition='type:REGEX', or use pipeline_parallel_size=1.",
            lacks_data=True,
        )
    others = f" and {len(missing) - 1} further blocks" if len(missing) > 1 else ""
    before = f"before the call of {missing[0]}{others}"
    if _needs_data(error, failed_call):
        return TraceError(
            f"The step can't be traced: {failed_call} needs the data of a tensor that comes from a block, {before}."
            " With a pipeline the data may be on another rank: move the call into a block, or after the last block, or"
            " use pipeline_parallel_size=1.",
            lacks_data=True,
        )
    return TraceError(
        f"The step can't be traced: {failed_call} failed on fake tensors, {before} {cause}. If it fails in one process"
        " too, mend the model; else move the call into a block, or after the last block.",
        lacks_data=True,
    )


DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""Functions that run a backward."""


def gradient_refused(name: str) -> TraceError:
    """The error of a gradient of blocks that code outside of them takes in a step."""
    return TraceError(
        f"{name} (called at {user_frame()}) differentiates tensors of blocks inside of the step, whose graph is on"
        " several ranks. Use pipeline_parallel_size=1.",
        lacks_data=True,
    )


def _needs_data(error: Exception, failed_call: str) -> bool:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return True
    return failed_call.partition(" ")[0] in ("tolist", "numpy", "__format__", "__array__", "__contains__")


def check_constant(value: object, name: str, where: str) -> None:
    """Raise for an output of a block in which pytrees don't find the tensors."""
    if isinstance(value, Tensor) or not holds_tensors(list(getattr(value, "__dict__", {}).values())):
        return
    raise TraceError(
        f"{name} (called at {where}) returned a {type(value).__name__} that holds tensors and is not a pytree, so they"
        " can't be sent to another pipeline stage. Return a tensor, tuple, list, dict, NamedTuple or dataclass, or"
        " register the class with torch.utils._pytree.register_pytree_node."
    )


def check_arguments(leaves: Sequence[object], name: str) -> None:
    """Raise for an argument of a block in which pytrees don't find tensors of other blocks."""
    for leaf in leaves:
        if is_opaque(leaf) and any(isinstance(member, Ghost) for member in tree_leaves(list(vars(leaf).values()))):
            raise TraceError(
                f"{name} (called at {user_frame()}) got a {type(leaf).__name__} that holds tensors of blocks and is"
                " not a pytree, so they can't be sent to another pipeline stage. Pass a tensor, tuple, list, dict,"
                " NamedTuple or dataclass, or register the class with torch.utils._pytree.register_pytree_node."
            )


def check_layout(leaf: object, name: str) -> None:
    """Raise for a jagged tensor, which nothing can stand for: its lengths are data."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        raise TraceError(
            f"{name} (called at {user_frame()}) takes or gives a nested tensor (torch.nested), whose lengths are data"
            " that a trace does not have. Pad it and pass a mask, or use tensor_parallel_size=1 and, in a pipeline,"
            " pipeline.mode=inline."
        )


def transformed(name: str) -> TraceError:
    """The refusal of blocks, or of what they gave, inside of transforms of ``torch.func``."""
    return TraceError(
        f"{name} (called at {user_frame()}) runs inside of a transform of torch.func (vmap, grad, jvp, ...) that gets"
        " blocks or what they gave, which a trace can't look into. Call the transform inside of a block (name its"
        " module with pipeline.partition='type:REGEX'; tensor parallel leaves it replicated), or use"
        " pipeline_parallel_size=1 and tensor_parallel_size=1."
    )


def user_frame() -> str:
    """Where the innermost frame outside torch and this package stands."""
    lines = user_lines(sys._getframe(1))
    return line_text(lines[-1]) if lines else "unknown"


def calls_blocks_unseen(name: str, fqns: Sequence[str]) -> TraceError:
    """The refusal of a custom autograd function that gets blocks."""
    return TraceError(
        f"{name} (called at {user_frame()}) is a torch.autograd.Function that gets the blocks"
        f" {', '.join(fqns[:2])}{', ...' if len(fqns) > 2 else ''} and calls them by itself, as reversible layers are:"
        " a pipeline can't cut between them. Use pipeline_parallel_size=1.",
        lacks_data=True,
    )
