"""Which operators a step and its plan see on fake ``cuda`` devices and on fake CPUs. A process with ``choices.cpp``
preloaded runs it: ``python -m tests.fake_cuda.dispatched RESULT``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_3d.activations.selective import KeptResults, is_costly
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.model.blocks import kind_of
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.planner import ExampleStep, Observation, Observer
from lightning_3d.planning.tensor_blocks import example_inputs
from lightning_3d.tensor import plan_block
from lightning_3d.tensor.plan import fakes
from lightning_3d.torch_internals.dispatch import OperatorMode, OpOverload, draws_random_numbers
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.fake_blocks import RandomnessSeen, with_state
from tests import architectures as a
from tests.fake_cuda.models import Blocks, Decoder, Encoder, Experts, Flex
from tests.hugging_face import small_job
from tests.law.models import MODELS
from tests.parity import Job

NAMES = ("bert", "clip", "wav2vec2", "segformer", "swin", "resnet", "convnext", "mamba", "lstm")
JOBS: dict[str, Job] = {name: MODELS[name].job for name in NAMES}
JOBS |= {
    "decoder": small_job(partial(Blocks, Decoder), a.sequences),
    "decoder-dropout": small_job(partial(Blocks, Decoder, dropout=0.1), a.sequences),
    "encoder-layers": small_job(partial(Blocks, Encoder), a.sequences),
    "experts": small_job(partial(Blocks, Experts), a.sequences),
    "flex": small_job(partial(Blocks, Flex), a.sequences),
}

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@dataclass(kw_only=True)
class Seen:
    """Of one architecture in one precision on one device."""

    operators: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    """Name -> whether selective recomputation keeps its results, and whether a call of it draws random numbers."""
    roles: dict[str, str] = field(default_factory=dict)
    """FQN of a weight -> its role on two tensor-parallel ranks."""
    is_random: bool = False
    """Whether planning takes the step for one that draws random numbers."""


class _Operators(OperatorMode):
    """Notes what is dispatched."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload) or func.namespace not in ("prim", "profiler"):
            kept, draws = is_costly(func), draws_random_numbers(func, args, kwargs or {})
            before = self._seen.operators.get(str(func), (False, False))
            self._seen.operators[str(func)] = kept, draws or before[1]
        return func(*args, **(kwargs or {}))


def _step(module: nn.Module, batch: Any, device: torch.device, modes: Callable[[], Any], seen: Seen) -> None:
    """Run a training step, and its backward, on fake tensors; its forward as blocks that are recomputed run it.

    The backward of cuDNN's RNNs runs on real tensors alone.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
        fake = partial(torch.empty_like, device=device)
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        made = {id(tensor): fake(tensor).requires_grad_(tensor.requires_grad) for _, tensor in named}
        inputs = tree_map_only(Tensor, fake, batch)

        def call(_: Any) -> Tensor:
            with modes(), RandomnessSeen() as randomness, KeptResults().keeping(), _Operators(seen):
                loss: Tensor = module.training_step(inputs, 0)
            seen.is_random = randomness.seen
            return loss

        loss = with_state(module, {fqn: made[id(tensor)] for fqn, tensor in named}, call)
        if device == CPU or not any(isinstance(inner, nn.RNNBase) for inner in module.modules()):
            with _Operators(seen):
                loss.backward()


def _plan(observed: Observation, device: torch.device, modes: Callable[[], Any], seen: Seen) -> None:
    assert observed.trace is not None
    with patch.object(fakes, "_device_of", lambda leaves: device), modes():
        kinds = {(kind_of(observed.blocks[fqn]), str(i)): (fqn, i) for fqn, i in observed.trace.block_inputs.items()}
        for fqn, inputs in kinds.values():
            for weight in plan_block(observed.blocks[fqn], *example_inputs(inputs), size=2).weights:
                seen.roles[f"{fqn}.{weight.fqn}"] = weight.role


def _modes(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "32" else torch.autocast(device.type, torch.bfloat16)


def look(job: Job, *, plans: bool = True) -> dict[tuple[str, str], Seen]:
    """By precision and kind of device."""
    torch.manual_seed(0)
    module = job.model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
    data = job.data(2)
    batch = (job.collate or default_collate)([data[0], data[1]])
    config = ThreeDConfig.from_mapping({"tensor_parallel_size": 2})
    example = ExampleStep(name="training_step", microbatch=batch, modes=nullcontext)
    shape = MeshShape(pp=1, dp=1, cp=1, tp=2)
    observed = Observer(module, example, CPU, StepEffects).observe(config, shape) if plans else None
    found = {}
    for precision in ("32", "16"):
        for device in (CPU, CUDA) if plans else (CUDA,):
            seen, modes = Seen(), partial(_modes, device, precision)
            if observed is not None and precision == "32":  # autocast knows other functions by device
                _plan(observed, device, modes, seen)
            _step(module, batch, device, modes, seen)
            found[precision, device.type] = seen
    return found


@contextmanager
def _cuda() -> Iterator[None]:
    """What torch's Python asks of a build for CUDA."""
    with (
        patch.multiple(
            torch.cuda,
            _initialized=True,
            _lazy_init=lambda: None,
            current_device=lambda: 0,
            default_generators=(torch.Generator(),),
            is_available=lambda: True,
            is_bf16_supported=lambda *_, **__: True,
        ),
        patch.object(torch._C, "_cuda_getDevice", lambda: 0, create=True),
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        warnings.catch_warnings(action="ignore"),  # of torch, on cuDNN; of ours, on dropout that a GPU draws otherwise
    ):
        yield


def main(result: str) -> None:
    """Look at all architectures.

    Args:
        result: Path of the file for what is seen, by architecture.
    """
    with _cuda():
        found = {name: look(job, plans=name != "flex") for name, job in JOBS.items()}
    Path(result).write_bytes(pickle.dumps(found))
