"""The proof that a planned block computes what the dense block computes, made on random input before training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.model.block_runner import Compiled, own_forward, running
from lightning_3d.model.pytrees import as_called
from lightning_3d.model.reals import as_reals
from lightning_3d.model.snapshot import preserved
from lightning_3d.tensor.apply import apply_block
from lightning_3d.tensor.placement import marked
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map, tree_map_only
from lightning_3d.torch_internals.tensors import widened

_SEED = 20_250_101
"""Seed of the random inputs: any number, the same on all ranks."""
_CHUNK = 2**18
"""Elements that are compared at a time, so that copies in float64 stay small."""
_HEAD_ROWS = 64
"""Rows of an output head that are compared: each is computed alike, and its whole logits are what is largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """How far a planned block is from its dense self; the same on all ranks of the tp group."""

    output: float
    """Greatest relative difference of any output; infinite if the block failed or its outputs do not correspond."""

    input_gradient: float

    parameter_gradient: float

    tolerance: float

    error: str | None = None
    """The error that the planned block raised on this rank."""

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance."""
        return max(self.output, self.input_gradient, self.parameter_gradient) <= self.tolerance

    def __str__(self) -> str:
        verdict = "proved" if self.passed else "not proved"
        text = (
            f"{verdict}: relative difference of outputs {self.output:.1e}, input gradients {self.input_gradient:.1e}, "
            f"parameter gradients {self.parameter_gradient:.1e}, tolerance {self.tolerance:.1e}"
        )
        return text if self.error is None else f"{text}; {self.error}"


def verify_block(
    block: nn.Module,
    plan: BlockTensorPlan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: DeviceMesh,
    *,
    tolerance: float | None = None,
    excluded: Collection[nn.Parameter] = frozenset(),
    compiled: Callable[[nn.Module], Compiled | None] = lambda block: None,
) -> Verification:
    """Compare a copy of the block, sharded as planned, with the dense block: outputs and all gradients.

    Every rank of the tp group must call it. Both run in evaluation mode (no dropout) on the same random floating-point
    inputs; other inputs keep their values; without values booleans and the ids of an embedding table are random, other
    integers zero. An output head over the vocabulary is compared on few rows. Random state and block are left as they
    were, and no gradient stays behind. Memory: one more copy of this block, and its activations.

    Args:
        block: Dense, with full parameters that are equal on all ranks of the tp group and on the mesh's device.
        plan: The plan to prove.
        args: Example arguments of its forward; tensors may be fake or on the meta device.
        kwargs: Example keyword arguments.
        mesh: The tp axis.
        tolerance: Greatest relative difference; None means the square root of the parameters' machine epsilon
            (3e-4 in fp32, 9e-2 in bf16).
        excluded: As for `apply_block`.
        compiled: Gives what runs the forward of a sharded block compiled, if there is such a thing.
    """
    epsilons = [torch.finfo(p.dtype).eps for p in block.parameters() if p.is_floating_point()]
    limit = max(epsilons, default=torch.finfo(torch.float32).eps) ** 0.5 if tolerance is None else tolerance
    device = next((parameter.device for parameter in block.parameters()), torch.device(mesh.device_type))
    example = (tuple(args), dict(kwargs))
    if _is_head(block, plan):
        example = tree_map_only(Tensor, _few_rows, example)
    dtypes = {parameter.dtype for parameter in block.parameters() if parameter.is_floating_point()}
    inputs = _random_inputs(example, device, _num_ids(block), widens=dtypes == {torch.float32})
    devices = [device] if device.type != "cpu" else []
    error = None
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), preserved(block):
        block.eval()
        try:
            sharded_block = _sharded_copy(block, plan, mesh, excluded)
            running(sharded_block).compiled = compiled(sharded_block)
            pairs = zip(_run(block, inputs), _run(sharded_block, inputs), strict=True)
            differences = [_difference(dense, sharded, limit) for dense, sharded in pairs]
        except Exception as failure:  # whatever goes wrong, also in the dense block, the answer is "not proved"
            error = f"{type(failure).__name__}: {failure}"
            differences = [float("inf")] * 3
    agreed = torch.tensor(differences, dtype=torch.float32, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=mesh.get_group())
    output, input_gradient, parameter_gradient = agreed.tolist()
    return Verification(
        output=output,
        input_gradient=input_gradient,
        parameter_gradient=parameter_gradient,
        tolerance=limit,
        error=error,
    )


def _num_ids(block: nn.Module) -> int:
    """Upper bound of integers: the rows of a block that is a plain table; elsewhere they may index anything."""
    return block.num_embeddings if isinstance(block, nn.Embedding) and _runs_as(nn.Embedding, block) else 1


def _runs_as(kind: type[nn.Module], block: nn.Module) -> bool:
    return getattr(own_forward(block), "__func__", None) is kind.forward


def _is_head(block: nn.Module, plan: BlockTensorPlan) -> bool:
    return _runs_as(nn.Linear, block) and plan.has_vocabulary


def _few_rows(example: Tensor) -> Tensor:
    """A part of a linear layer's input (..., features), with as many dims."""
    for dim in range(example.ndim - 1):
        rows = example.shape[:-1].numel()
        if rows > _HEAD_ROWS:
            example = example.narrow(dim, 0, max(1, _HEAD_ROWS * example.shape[dim] // rows))
    return example


def _random_inputs(example: Any, device: torch.device, num_ids: int, *, widens: bool) -> Any:
    """Concrete inputs like the example; tensors that appear twice stay one tensor.

    Args:
        widens: Whether 16-bit inputs become fp32, as weights are: autocast made them 16-bit, without which proofs run.
    """
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[int, Tensor] = {}
    floats = [leaf for leaf in _tensors(example) if _is_continuous(leaf)]
    is_known = any(leaf.requires_grad for leaf in floats)  # else all are differentiable: a mask need not be

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            random = _random_input(leaf, generator, device, num_ids)
            made[id(leaf)] = widened(random) if widens else random
            if _is_continuous(leaf):
                made[id(leaf)].requires_grad_(leaf.requires_grad or not is_known)
        return made[id(leaf)]

    return tree_map(make, example)


def _random_input(example: Tensor, generator: torch.Generator, device: torch.device, num_ids: int) -> Tensor:
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator).to(device, example.dtype)
    if example.is_complex():  # rotary embeddings
        return torch.randn(example.shape, generator=generator, dtype=example.dtype).to(device)
    has_values = not example.is_meta and type(example) is Tensor
    if example.dtype == torch.bool and not has_values:
        return torch.rand(example.shape, generator=generator).lt(0.5).to(device)
    if not has_values:
        return torch.randint(num_ids, example.shape, generator=generator, dtype=example.dtype).to(device)
    return example.detach().to(device)


def _sharded_copy(
    block: nn.Module,
    plan: BlockTensorPlan,
    mesh: DeviceMesh,
    excluded: Collection[nn.Parameter],
) -> nn.Module:
    shared = {id(parameter): parameter for parameter in excluded}  # the copy shares what is excluded
    left = [tensor for module in block.modules() for tensor in _tensors(vars(module)) if tensor.grad_fn is not None]
    results = {id(tensor): tensor.detach().clone() for tensor in left}  # earlier forwards left them in attributes
    duplicate = copy.deepcopy(block, memo=shared | results)
    apply_block(duplicate, plan, mesh, excluded=excluded)
    return duplicate


_Values = Sequence[Tensor | None]


def _run(block: nn.Module, inputs: Any) -> tuple[_Values, _Values, _Values]:
    """Forward and backward of a random linear function of the outputs, without leaving gradients behind.

    Returns:
        Outputs, gradients of inputs, and gradients of parameters.
    """
    args, kwargs = as_called(inputs)
    differentiable = [leaf for leaf in _tensors(inputs) if leaf.requires_grad]
    trained = {fqn: parameter for fqn, parameter in block.named_parameters() if parameter.requires_grad}
    with torch.enable_grad():
        outputs = [as_reals(leaf) for leaf in _tensors(block.forward(*args, **kwargs)) if _is_continuous(leaf)]
        generator = torch.Generator().manual_seed(_SEED + 1)
        loss = sum(
            (output * torch.randn(output.shape, generator=generator).to(output)).sum()
            for output in outputs
            if output.requires_grad
        )
        gradients: list[Tensor | None] = [None] * (len(differentiable) + len(trained))
        if isinstance(loss, Tensor):
            gradients = list(torch.autograd.grad(loss, [*differentiable, *trained.values()], allow_unused=True))
    full = [_full(gradient) for gradient in gradients]
    named = dict(zip(trained, full[len(differentiable) :], strict=True))
    for fqn, parts in marked(block).items():
        if (gradient := named.get(fqn)) is not None:
            named[fqn] = parts.ungrouped(gradient)
    return [output.detach() for output in outputs], full[: len(differentiable)], list(named.values())


def _tensors(tree: Any) -> list[Tensor]:
    distinct = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return list(distinct.values())


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _full(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _difference(expected: _Values, actual: _Values, tolerance: float) -> float:
    """The greatest relative difference of the tensors of one kind.

    A tensor is compared relative to its own greatest element, but at least to `tolerance` times the greatest of its
    kind: a gradient that is zero but for rounding (the bias of a key projection) does not count as wrong.
    """
    if len(expected) != len(actual):
        return float("inf")
    largest = max((_largest(tensor) for tensor in expected), default=0.0)
    return max(_relative(expected, actual, tolerance * largest), default=0.0)


def _relative(expected: _Values, actual: _Values, floor: float) -> Iterator[float]:
    for left, right in zip(expected, actual, strict=True):
        if left is None or right is None or left.shape != right.shape:
            yield 0.0 if left is right else float("inf")
        else:
            yield _distance(left, right) / max(_largest(left), floor, torch.finfo(torch.float64).tiny)


def _distance(left: Tensor, right: Tensor) -> float:
    """The greatest difference of finite values; infinite if others are not at the same places."""
    distance = 0.0
    for a, b in zip(_chunks(left), _chunks(right), strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        distance = max(distance, _largest_finite(a - b))
    return distance


def _largest(tensor: Tensor | None) -> float:
    """The greatest finite absolute value; what is not finite is compared by place."""
    return 0.0 if tensor is None else max(map(_largest_finite, _chunks(tensor)), default=0.0)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel():
        yield from (chunk.double() for chunk in as_reals(tensor.detach()).flatten().split(_CHUNK))


def _largest_finite(chunk: Tensor) -> float:
    return float(torch.where(chunk.isfinite(), chunk, 0.0).abs().max())
