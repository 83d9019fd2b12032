"""Running a block once to see what it does besides computing on tensors, which is all that can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.distributed.rng import Generators
from lightning_3d.model.snapshot import preserved
from lightning_3d.tensor.compiled.call import Call, Observed
from lightning_3d.tensor.compiled.draws import draws_noted
from lightning_3d.tensor.compiled.state import copied, own_part, read_state
from lightning_3d.torch_internals.capture import NotCompilable
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten
from lightning_3d.torch_internals.tensors import version_of
from lightning_3d.trace.side_outputs import Attribute, attributes_of, changed_attributes


@torch.inference_mode(False)  # whose tensors do not tell whether they were changed
def observe(block: nn.Module, run: Callable[..., Any], call: Call, device: torch.device) -> Observed:
    """Run a block on copies of its arguments and of its tensors; afterwards everything is as it was.

    Args:
        block: Its attributes are watched.
        run: Its forward.
        call: What to call it with.
        device: Its random numbers are watched, beside those of the CPU, of Python and of NumPy.

    Raises:
        NotCompilable: it drew random numbers that can't be drawn ahead, changed an argument, a parameter, or an
            attribute other than a buffer in place.
    """
    copies = copied(call.leaves)
    arguments = tree_unflatten(copies, call.spec)
    generators, state = Generators(device), read_state(block)
    own = copied(state.own())
    with torch.no_grad(), state.replaced(own), preserved(block), generators.preserved():
        attributes, buffers, states = attributes_of(block), _buffers(block), generators.states()
        with draws_noted() as draws:
            results = tree_leaves(run(*arguments[0], **arguments[1]))
        changed = _changed_attributes(block, attributes, buffers)
        after, states_after = copied(own), generators.states()
        generators.restore(states)
        drawn = draws.draw()
        is_all_drawn = generators.are_at(states_after)
    if not is_all_drawn:
        raise NotCompilable("it draws random numbers of Python or NumPy, or seeds generators")
    if changed:
        raise NotCompilable(f"its forward changes the attributes {changed}")
    found, found_spec = tree_flatten(arguments)
    if found_spec != call.spec or any(a is not b for a, b in zip(found, copies, strict=True)):
        raise NotCompilable("it changes a list or dict among its arguments")
    if any(isinstance(copy, Tensor) and version_of(copy) for copy in copies):
        raise NotCompilable("it changes its arguments in place")
    parameters = [i for i, tensor in enumerate(state.tensors) if isinstance(tensor, nn.Parameter)]
    before = state.own()
    if any(not torch.equal(after[i], before[i]) for i in parameters):
        raise NotCompilable("its forward changes its parameters")
    values = [own_part(leaf) for leaf in results if isinstance(leaf, Tensor)] + after
    return Observed(values=values, draws=draws, drawn=drawn)


def _buffers(block: nn.Module) -> Mapping[str, Tensor]:
    return dict(block.named_buffers(remove_duplicate=False))


def _changed_attributes(
    block: nn.Module, attributes: dict[str, Attribute], buffers: Mapping[str, Tensor]
) -> Sequence[str]:
    set_to_tensors, others = changed_attributes(block, attributes)
    now = _buffers(block)
    set_anew = {name for name in now.keys() | buffers.keys() if now.get(name) is not buffers.get(name)}
    return sorted({*set_to_tensors, *others, *set_anew})
