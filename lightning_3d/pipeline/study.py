"""Running a step whose blocks return random numbers, to learn what the numbers that it gives mean (``evidence.py``).

It runs on parts of a batch of two sizes. Whatever tensor is computed from the batch or from outputs of blocks gets
random values at the end, so that it is not taken for a constant because it happens to be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.pipeline.effects.norms import Norms
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.microbatches import leaves_of, samples_of
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.pipeline.traces import StepCall, Traces
from lightning_3d.planning.stage_flow import cut
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map, tree_map_only, tree_unflatten
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.trace.trace import Result, Trace, TracedCall
from lightning_3d.trace.tracer import StepTracing

_NUM_DRAWS = 3  # of random outputs, for each part of a batch
_MAX_STUDIES = 8  # of a step


class Study:
    """Lets a joiner learn from steps."""

    def __init__(self, module: LightningModule, router: Router, joiner: Joiner, device: torch.device) -> None:
        self._module, self._router, self._joiner = module, router, joiner
        self._effects = StepEffects(module, router, Norms(module, router), joiner=joiner)
        self._num_studies: Counter[str] = Counter()  # by name of the step
        self._traces = Traces(module, router.blocks.values(), StepTracing(module, router, self._effects, device))

    def learn(self, name: str, batch: Any, rest: Sequence[Any], *, size: int) -> None:
        """Run ``module.<name>(batch, *rest)`` on parts of a batch; if it fails on random numbers, nothing is learned.

        Two parts and both in one: what counts something in the batch can't be the same in all three.

        Args:
            batch: At least two microbatches.
            size: Samples in its smallest microbatch.
        """
        if self._num_studies[name] == _MAX_STUDIES:
            return
        self._num_studies[name] += 1
        parts = [samples_of(batch, *ends) for ends in ((0, size), (size, 2 * size), (0, 2 * size))]
        with suppress(Exception), self._joiner.averaging_by_samples():
            calls = self._traces.calls(name, parts, rest)
            drawn = [(call, self._traces.trace(call)) for call in calls] * _NUM_DRAWS
            with self._effects.isolated(), torch.no_grad():
                outputs = [self._run(*example, index) for index, example in enumerate(drawn)]
            sizes = [call.size for call, _ in drawn]
            self._effects.study(0, sizes)
            with suppress(StepError):
                self._joiner.join(outputs, sizes, f"what {name} returned")

    def _run(self, call: StepCall, trace: Trace, index: int) -> Any:
        from_data = _FromData([leaf for _, leaf in leaves_of(call.batch)])
        run = _BlocksAtRandom(self._router, trace, from_data)
        place = Place(stage=0, microbatch=index, is_last=True)

        def step() -> Any:
            with from_data:
                output = call.run(self._module)
            return output, self._effects.collect(place)

        with self._effects.microbatch(place), attributes_kept(self._router.blocks, trace.sides):
            output, found = tree_map(from_data.made_random, run.run(step))
            self._effects.keep(place, found)
        return tree_map_only(Tensor, Tensor.detach, output)


class _BlocksAtRandom(StageRun):
    """A run of a whole step whose blocks return random numbers; ``from_data`` notes these."""

    has_replicas = False

    def __init__(self, router: Router, trace: Trace, from_data: _FromData) -> None:
        flow = cut(trace, {call.name: (0,) for call in trace.block_calls}, 1)
        super().__init__(router, flow, 0, (), lambda call: nullcontext())
        self._tensors, self._from_data = trace.tensors, from_data

    def _execute(self, call: TracedCall, leaves: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        if not call.is_block:
            return super()._execute(call, leaves, run)
        return super()._execute(call, leaves, lambda values: self._outputs(call, values))

    def _outputs(self, call: TracedCall, values: list[Any]) -> Any:
        def make(position: int, result: Result) -> Any:
            if result.tensor is None:
                return result.constant
            meta = self._tensors[result.tensor]
            return meta.random().requires_grad_(meta.requires_grad)

        outputs = call.answer(values, make)
        self._from_data.note(outputs)
        return tree_unflatten(outputs, call.spec)


class _FromData(TorchFunctionMode):
    """Notes the tensors that are computed from others.

    Args:
        data: These, among other things.
    """

    def __init__(self, data: Sequence[Any]) -> None:
        super().__init__()
        self._noted = WeakTensorKeyDictionary()
        self.note(data)

    def note(self, tree: Any) -> None:
        """Note the tensors in a pytree."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._noted[leaf] = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        if any(leaf in self._noted for leaf in tensors) and not name.startswith("new_"):
            self.note((output, tensors[:1] if name == "__setitem__" else []))
        return output

    def made_random(self, leaf: Any) -> Any:
        """Random values in place of a tensor that was noted."""
        if not isinstance(leaf, Tensor) or leaf not in self._noted or leaf.dtype == torch.bool:
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand_like(leaf.detach())
        return torch.randint_like(leaf, 1, min(torch.iinfo(leaf.dtype).max, 1 << 30))
