"""The inputs of a block in the proof of its plan: random numbers, and the integers of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.model.block_runner import own_forward
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map, tree_map_only
from lightning_3d.torch_internals.tensors import HALVES, widened

SEED = 20_250_101
"""Seed of the random inputs: any number, the same on all ranks."""
_HEAD_ROWS = 64
"""Rows of an output head that are compared: each is computed alike, and its whole logits are what is largest."""


def proof_inputs(
    block: nn.Module,
    plan: BlockTensorPlan,
    example: object,
    device: torch.device,
    of_first_rank: Callable[[Tensor], Tensor],
) -> Any:
    """Concrete inputs like the example; tensors that appear twice stay one tensor. An output head gets few rows.

    Args:
        of_first_rank: Gives what the first rank has, for integers, which may be those of each rank's batch.
    """
    if _runs_as(nn.Linear, block) and plan.has_vocabulary:
        example = tree_map_only(Tensor, _few_rows, example)
    # Weights of fp32 get no 16-bit inputs: autocast made them so, without which proofs run.
    dtypes = {parameter.dtype for parameter in block.parameters() if parameter.is_floating_point()}
    widens = dtypes == {torch.float32}
    generator = torch.Generator().manual_seed(SEED)
    made: dict[int, Tensor] = {}
    floats = [leaf for leaf in distinct_tensors(example) if is_continuous(leaf)]
    is_known = any(leaf.requires_grad for leaf in floats)  # else all are differentiable: a mask need not be

    def make(leaf: object) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            random = _random_input(leaf, generator, device, _num_ids(block))
            if is_continuous(leaf):
                random = widened(random) if widens else random
                made[id(leaf)] = random.requires_grad_(leaf.requires_grad or not is_known)
            else:
                made[id(leaf)] = of_first_rank(random)
        return made[id(leaf)]

    return tree_map(make, example)


@contextmanager
def in_fp32(block: nn.Module) -> Iterator[bool]:
    """Give a block 32 bits inside where it has 16, whose rounding hides what is wrong; yields whether it had any."""
    state = [tensor for tensor in (*block.parameters(), *block.buffers()) if tensor.dtype in HALVES]
    before, dtype = [tensor.data for tensor in state], torch.get_default_dtype()
    try:
        for tensor in state:
            tensor.data = tensor.data.float()
        if state:
            torch.set_default_dtype(torch.float32)
        yield bool(state)
    finally:
        torch.set_default_dtype(dtype)
        for tensor, data in zip(state, before, strict=True):
            tensor.data = data


def distinct_tensors(tree: object) -> list[Tensor]:
    """Its tensors, each once."""
    distinct = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return list(distinct.values())


def is_continuous(tensor: Tensor) -> bool:
    """Whether it holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _num_ids(block: nn.Module) -> int:
    """Upper bound of integers that the batch does not tell: the rows of a table; elsewhere they may index anything."""
    return block.num_embeddings if isinstance(block, nn.Embedding) and _runs_as(nn.Embedding, block) else 1


def _runs_as(kind: type[nn.Module], block: nn.Module) -> bool:
    return getattr(own_forward(block), "__func__", None) is kind.forward


def _few_rows(example: Tensor) -> Tensor:
    """A part of a linear layer's input (..., features), with as many dims."""
    for dim in range(example.ndim - 1):
        rows = example.shape[:-1].numel()
        if rows > _HEAD_ROWS:
            example = example.narrow(dim, 0, max(1, _HEAD_ROWS * example.shape[dim] // rows))
    return example


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
