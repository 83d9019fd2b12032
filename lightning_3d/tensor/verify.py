"""The proof that a planned block computes what the dense block computes, made on random input before training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.model.block_runner import Compiled, running
from lightning_3d.model.pytrees import as_called
from lightning_3d.model.reals import as_reals
from lightning_3d.model.snapshot import preserved
from lightning_3d.sharding.difference import Values, difference
from lightning_3d.sharding.placement import interleaved_parameters
from lightning_3d.sharding.proof_axis import ProofAxis, ProofFailed
from lightning_3d.tensor.apply import apply_block
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.proof_inputs import SEED, distinct_tensors, in_fp32, is_continuous, proof_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """How far a planned block is from its dense self; the same on all ranks of the tp group."""

    output: float
    """Greatest relative difference of any output; infinite if the block failed or its outputs do not correspond."""

    input_gradient: float

    parameter_gradient: float

    tolerance: float

    dense_runs: bool = True
    """Whether the dense block takes such inputs."""

    error: str | None = None
    """The error that the block raised, on the first rank that it did."""

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
    args: Sequence[object],
    kwargs: Mapping[str, object],
    mesh: DeviceMesh,
    *,
    tolerance: float | None = None,
    excluded: Collection[nn.Parameter] = frozenset(),
    compiled: Callable[[nn.Module], Compiled | None] = lambda block: None,
) -> Verification:
    """Compare a copy of the block, sharded as planned, with the dense block: outputs and all gradients.

    Every rank of the tp group must call it; what one of them runs into fails the proof on all. Both run in evaluation
    mode (no dropout) on the same random floating-point inputs; other inputs keep the values that the first rank has;
    without values booleans and the ids of an embedding table are random, other integers zero. 16-bit weights and inputs
    are widened to fp32, unless the dense block takes no such. An output head over the vocabulary is compared on few
    rows. Random state and block are left as they were, and no gradient stays behind. Memory: one more copy of this
    block, one in fp32 if its weights have 16 bits, and its activations.

    Args:
        block: Dense, with full parameters that are equal on all ranks of the tp group and on the mesh's device.
        plan: The plan to prove.
        args: Example arguments of its forward; tensors may be fake or on the meta device.
        kwargs: Example keyword arguments.
        mesh: The tp axis.
        tolerance: Greatest relative difference; None means the square root of the parameters' machine epsilon
            (3e-4 in fp32).
        excluded: As for `apply_block`.
        compiled: Gives what runs the forward of a sharded block compiled, if there is such a thing.
    """
    device = next((parameter.device for parameter in block.parameters()), torch.device(mesh.device_type))
    example, axis = (tuple(args), dict(kwargs)), ProofAxis(mesh)
    proof = partial(_proof, block, plan, example, device, axis, tolerance, excluded, compiled)
    try:
        with axis.inside(_evaluated(block, device)):
            with axis.inside(in_fp32(block)) as is_widened:
                proved = proof()
            return proof() if is_widened and not proved.dense_runs else proved
    except ProofFailed as failure:
        return _not_proved(failure, _limit(block, tolerance), dense_runs=False)


@contextmanager
def _evaluated(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a block in evaluation mode inside; random state and block are left as they were."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), preserved(block):
        block.eval()
        yield


def _proof(
    block: nn.Module,
    plan: BlockTensorPlan,
    example: object,
    device: torch.device,
    axis: ProofAxis,
    tolerance: float | None,
    excluded: Collection[nn.Parameter],
    compiled: Callable[[nn.Module], Compiled | None],
) -> Verification:
    limit, dense_runs = _limit(block, tolerance), False
    try:
        with axis.failing_together():
            inputs = proof_inputs(block, plan, example, device, axis.of_first_rank)
            sharded_block = _copy(block, excluded)  # before a forward, which may change what the block keeps
            expected = _run(block, inputs)
        dense_runs = True
        with axis.failing_together():
            apply_block(sharded_block, plan, axis.mesh, excluded=excluded, axis=axis)
            running(sharded_block).compiled = compiled(sharded_block)
            actual = _run(sharded_block, inputs, lambda: axis.sync_check("outputs"))
            differences = [difference(*pair, limit) for pair in zip(expected, actual, strict=True)]
    except ProofFailed as failure:
        return _not_proved(failure, limit, dense_runs=dense_runs)
    agreed = torch.tensor(differences, dtype=torch.float32, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=axis.mesh.get_group())
    output, input_gradient, parameter_gradient = agreed.tolist()
    return Verification(
        output=output, input_gradient=input_gradient, parameter_gradient=parameter_gradient, tolerance=limit
    )


def _limit(block: nn.Module, tolerance: float | None) -> float:
    epsilons = [torch.finfo(p.dtype).eps for p in block.parameters() if p.is_floating_point()]
    return max(epsilons, default=torch.finfo(torch.float32).eps) ** 0.5 if tolerance is None else tolerance


def _not_proved(failure: ProofFailed, limit: float, *, dense_runs: bool) -> Verification:
    """The same on all ranks, as the failure is."""
    far = float("inf")
    return Verification(
        output=far,
        input_gradient=far,
        parameter_gradient=far,
        tolerance=limit,
        dense_runs=dense_runs,
        error=str(failure),
    )


def _copy(block: nn.Module, shared: Collection[nn.Parameter]) -> nn.Module:
    """A copy of a block, with the same parameters where they are ``shared``."""
    left = [
        tensor for module in block.modules() for tensor in distinct_tensors(vars(module)) if tensor.grad_fn is not None
    ]
    results = {id(tensor): tensor.detach().clone() for tensor in left}  # earlier forwards left them in attributes
    return copy.deepcopy(block, memo={id(parameter): parameter for parameter in shared} | results)


def _run(
    block: nn.Module, inputs: object, after_forward: Callable[[], None] = lambda: None
) -> tuple[Values, Values, Values]:
    """Forward and backward of a random linear function of the outputs, without leaving gradients behind.

    Args:
        after_forward: Called before the outputs are read.

    Returns:
        Outputs, gradients of inputs, and gradients of parameters.
    """
    args, kwargs = as_called(inputs)
    differentiable = [leaf for leaf in distinct_tensors(inputs) if leaf.requires_grad]
    trained = {fqn: parameter for fqn, parameter in block.named_parameters() if parameter.requires_grad}
    with torch.enable_grad():
        returned = distinct_tensors(block.forward(*args, **kwargs))
        after_forward()
        outputs = [as_reals(leaf) for leaf in returned if is_continuous(leaf)]
        generator = torch.Generator().manual_seed(SEED + 1)
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
    for fqn, parts in interleaved_parameters(block).items():
        if (gradient := named.get(fqn)) is not None:
            named[fqn] = parts.deinterleaved(gradient)
    return [output.detach() for output in outputs], full[: len(differentiable)], list(named.values())


def _full(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
