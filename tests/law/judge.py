"""The one judge: whether a rank's run is that of one process, and holds and sends what the plan says.

Differences are measured against how far things moved: a parameter's against the way from its initial value, that of a
gradient against that parameter's own gradient. So a parameter that hardly moves is judged as sharply as the others,
down to a floor at which floating-point order alone decides: some rounding errors of the model's largest gradient, times
the steps and the rate for weights. What stays below it in one process (biases of keys, which softmax ignores) has to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.planning.plan import Plan
from tests.collectives import planned
from tests.law.cover import Case
from tests.law.habits import HABITS
from tests.law.run import Run, Tensors
from tests.parity import Layout

FLOOR = 64
"""Rounding errors of the model's largest gradient that any other gradient may have."""

EPS = {"64-true": 2**-33, "32-true": 2**-23, "16-mixed": 2**-17, "bf16-mixed": 2**-14}
"""Rounding errors by precision. Those of 16 bits are as of a mean over many numbers; those of float64 are larger than
its own, as models of transformers compute some things in float32."""

LISTED = 20
"""Problems that a failed case shows."""

EXPECTED = ("FSDP2-wrapped module", "Checkpoint directory ", "Using `DistributedSampler` with the dataloaders. During ")
"""Beginnings of warnings that one process does not give: torch's on outputs that are views, and Lightning's on a folder
that a resumed run finds and on replicas that share out what is evaluated."""


class Judge:
    """Compares the ranks of a case with its reference."""

    def __init__(self, case: Case, reference: Run) -> None:
        self.case, self.reference = case, reference
        setting = case.setting_row
        self.tolerance = setting.tolerance
        self.eps = EPS[setting.half or case.job.precision]
        self.floors = [FLOOR * self.eps * _largest(gradients) for gradients in reference.gradients]
        clipped = reference.clipped or [1.0] * len(self.floors)
        self.used_floors = [floor * factor for floor, factor in zip(self.floors, clipped, strict=True)]

    def problems(self, ranks: Sequence[Run]) -> list[str]:
        """Everything that is not as it should be, by rank."""
        found = [f"reference: {problem}" for problem in self._of_reference()]
        for rank, run in enumerate(ranks):
            found += [f"rank {rank}: {problem}" for problem in self._of_rank(run)]
        found += self._of_all(ranks)
        return found

    # ---- one rank against one process

    def _of_rank(self, run: Run) -> Iterator[str]:
        yield from self._initial(run)
        yield from self._gradients(run)
        yield from self._weights("weights", run.weights, self.reference.weights)
        yield from self._numbers(run)
        yield from self._warnings(run)
        yield from run.left
        if run.plan is not None:
            yield from _sent(run, run.plan)

    def _of_reference(self) -> Iterator[str]:
        """The reference has to show something."""
        if not self.reference.logged or not self.reference.weights:
            yield "nothing was trained"
        if not any(math.isfinite(value) for logged in self.reference.logged for value in logged.values()):
            yield "no number is finite"
        moved = [name for name in self.trained if self._movement(name).norm() > self._weight_floor(name)]
        is_coarse = self.eps >= EPS["16-mixed"]  # few gradients are above its floor
        if len(moved) < (1 if is_coarse else len(self.trained) / 4):
            yield f"of {len(self.trained)} parameters only {moved} moved, too few to judge by"

    @property
    def trained(self) -> list[str]:
        """The parameters that were to be trained."""
        return [name for name in self.reference.weights if name in self.reference.trained]

    def _initial(self, run: Run) -> Iterator[str]:
        if self.case.setting_row.is_resumed:
            return
        for name, value in run.initial.items():
            if not torch.equal(value, self.reference.initial[name]):
                yield f"initial value of {name} is another one"

    def _gradients(self, run: Run) -> Iterator[str]:
        if not self.case.setting_row.looks_at_gradients:
            return
        expected = self._tail(self.reference.gradients)
        if len(expected) != len(run.gradients):
            yield f"{len(run.gradients)} optimizer steps, expected {len(expected)}"
        floors = self.floors[-len(expected) :]
        for step, (all_wanted, gradients, floor) in enumerate(zip(expected, run.gradients, floors, strict=False)):
            for name in [name for name in run.initial if name in all_wanted]:
                wanted = all_wanted[name]
                size = wanted.numel() ** 0.5
                if name not in gradients:
                    if wanted.norm() > floor * size:
                        yield f"step {step}: {name} has no gradient"
                    continue
                apart = (gradients[name] - wanted).norm()
                if not apart <= self.tolerance * wanted.norm() + floor * size:
                    yield f"step {step}: gradient of {name} is {_share(apart, wanted.norm())} apart"
            for name in gradients.keys() - all_wanted.keys():
                if gradients[name].norm() > floor:
                    yield f"step {step}: {name} has a gradient"

    def _movement(self, name: str) -> Tensor:
        return _wide(self.reference.weights[name]) - _wide(self.reference.initial[name])

    def _weight_floor(self, name: str) -> float:
        """What rounding may move a parameter by: its own, and that of gradients below the floor."""
        steps = len(self.reference.gradients)
        rates = max([*self.reference.rates, self.case.model_row.lr])
        momentum = sum((1 - 0.9 ** (step + 1)) / 0.1 for step in range(steps))  # a gradient counts again later
        gradients = momentum * rates * max(self.used_floors)
        value = _wide(self.reference.initial[name])
        eps = min(self.eps, 2**-23)  # weights are float32 in bf16-mixed, too
        return float(steps * eps * value.norm() + gradients * value.numel() ** 0.5)

    def _weights(self, what: str, found: Tensors, expected: Tensors) -> Iterator[str]:
        for name in found.keys() - expected.keys():
            yield f"{what}: {name} is unexpected"
        for name in found.keys() & expected.keys():
            if found[name].shape != expected[name].shape or found[name].dtype != expected[name].dtype:
                yield f"{what}: {name} is {found[name].shape}, {found[name].dtype}"
                continue
            yield from self._weight(what, name, found[name], expected[name])

    def _weight(self, what: str, name: str, found: Tensor, expected: Tensor) -> Iterator[str]:
        if name not in self.reference.initial:  # another name of a tied tensor
            return
        movement = self._movement(name).norm()
        apart = (_wide(found) - _wide(expected)).norm()
        floor = self._weight_floor(name)
        if not apart <= self.tolerance * movement + floor:
            yield f"{what}: {name} is {_share(apart, movement)} of its way apart"
        is_to_move = name in self.reference.trained and movement > 10 * floor
        if is_to_move and torch.equal(found, self.reference.initial[name]):
            yield f"{what}: {name} did not move"

    # ---- numbers

    def _numbers(self, run: Run) -> Iterator[str]:
        expected = self._tail(self.reference.logged)
        if len(expected) != len(run.logged):
            yield f"{len(run.logged)} batches, expected {len(expected)}"
        for batch, (wanted, logged) in enumerate(zip(expected, run.logged, strict=False)):
            yield from self._named(f"logged in batch {batch}", logged, wanted)
        yield from self._named("metrics", run.metrics, self.reference.metrics)
        yield from self._noted(run.notes, self.reference.notes)
        if run.rates != self.reference.rates:
            yield f"rates are {run.rates}, expected {self.reference.rates}"

    def _named(self, what: str, found: dict[str, float], expected: dict[str, float]) -> Iterator[str]:
        if self.case.setting_row.is_resumed:  # the Trainer of one process still has the numbers of the first epoch
            expected = {name: value for name, value in expected.items() if name in found}
        if found.keys() != expected.keys():
            yield f"{what}: {sorted(found)}, expected {sorted(expected)}"
            return
        for name, value in expected.items():
            if not self._close(found[name], value):
                yield f"{what}: {name} is {found[name]:.8g}, expected {value:.8g}"

    def _noted(self, found: list[tuple[str, float]], expected: list[tuple[str, float]]) -> Iterator[str]:
        if self.case.setting_row.is_resumed:
            names = {name for name, _ in found}
            expected = [note for note in expected if note[0] in names][-len(found) :]
        if [name for name, _ in found] != [name for name, _ in expected]:
            yield f"noted {[name for name, _ in found]}, expected {[name for name, _ in expected]}"
            return
        for (name, value), (_, wanted) in zip(found, expected, strict=True):
            if not self._close(value, wanted):
                yield f"noted {name}: {value:.8g}, expected {wanted:.8g}"

    def _close(self, found: float, expected: float) -> bool:
        """A tenth of the tolerance, as numbers do not grow small as movements do, or some rounding errors, also of
        float32, in which Lightning logs.
        """
        apart = abs(found - expected)
        return apart <= max(0.1 * self.tolerance, 16 * self.eps, 2**-22) * max(abs(expected), 1e-3)

    def _tail(self, expected: list[Any]) -> list[Any]:
        """A resumed run has seen the last epoch alone."""
        return expected[len(expected) // 2 :] if self.case.setting_row.is_resumed else expected

    def _warnings(self, run: Run) -> Iterator[str]:
        known = {_kind(text) for text in self.reference.warned}
        expected = (*EXPECTED, *self.case.setting_row.warns, *self.case.model_row.warns, *HABITS[self.case.habit].warns)
        for text in dict.fromkeys(run.warned):
            if _kind(text) not in known and not _kind(text).startswith(tuple(map(_kind, expected))):
                yield f"warned: {text[:300]}"

    # ---- all ranks

    def _of_all(self, ranks: Sequence[Run]) -> Iterator[str]:
        missing = self.reference.weights.keys() - {name for run in ranks for name in run.weights}
        if missing:
            yield f"no rank holds {sorted(missing)}"
        yield from self._checkpoint(ranks[0].checkpoint)
        plan = ranks[0].plan
        yield from self._mode(ranks[0].inline)
        if plan is not None:
            yield from _held(self.case, self.case.layout_row, plan, ranks, self.reference)

    def _mode(self, said: Sequence[str]) -> Iterator[str]:
        """A pipeline whose steps fail in microbatches is right, and hides why they fail."""
        layout = self.case.layout_row
        expected = self.case.model_row.runs_inline or HABITS[self.case.habit].runs_inline
        if layout.pp > 1 and layout.mode != "inline" and expected != bool(said):
            yield said[0] if said else "nothing was said of steps that run inline"

    def _checkpoint(self, found: dict[str, Any]) -> Iterator[str]:
        expected = self.reference.checkpoint
        for name in ("epoch", "global_step", "lr_schedulers"):
            if _without_loss(found.get(name)) != _without_loss(expected.get(name)):
                yield f"checkpoint: {name} is {found.get(name)}, expected {expected.get(name)}"
        if missing := expected.keys() - found.keys():
            yield f"checkpoint: {sorted(missing)} are missing"
            return
        state = expected["state_dict"]
        if found["state_dict"].keys() != state.keys():
            yield f"checkpoint: other tensors: {sorted(found['state_dict'].keys() ^ state.keys())}"
        yield from self._weights("checkpoint", found["state_dict"], state)
        for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
            yield from self._optimizer(mine, theirs)

    def _optimizer(self, found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
        if missing := expected["state"].keys() - found["state"].keys():
            yield f"checkpoint: no optimizer states of parameters {sorted(missing)}"
            return
        for index in (
            found["state"].keys() - expected["state"].keys()
        ):  # a gradient of zeros, where one process has none
            if any(isinstance(value, Tensor) and value.any() for value in found["state"][index].values()):
                yield f"checkpoint: optimizer state of parameter {index}, expected none"
        if found["param_groups"] != expected["param_groups"]:
            yield f"checkpoint: groups {found['param_groups']}, expected {expected['param_groups']}"
        floor = 10 * max(self.used_floors)
        for index, state in expected["state"].items():
            for name, value in state.items():
                mine = found["state"][index].get(name)
                if not isinstance(value, Tensor):
                    if mine != value:
                        yield f"checkpoint: {name} of parameter {index} is {mine}, expected {value}"
                elif not isinstance(mine, Tensor) or mine.shape != value.shape:
                    yield f"checkpoint: {name} of parameter {index} is {mine}"
                else:
                    apart, size = (mine - value).norm(), value.norm()
                    if not apart <= 3 * self.tolerance * size + floor * value.numel() ** 0.5:
                        yield f"checkpoint: {name} of parameter {index} is {_share(apart, size)} apart"


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128) if value.is_complex() else value.double()


def _without_loss(value: Any) -> Any:
    """States of schedulers without the smallest loss, which is a metric and compared as such."""
    if not isinstance(value, list):
        return value
    return [{name: part for name, part in state.items() if name != "best"} for state in value]


def _largest(gradients: Tensors) -> float:
    """The largest root mean square of a parameter's gradient."""
    return max((float(value.norm()) / value.numel() ** 0.5 for value in gradients.values()), default=1.0)


def _share(apart: Tensor, whole: Tensor) -> str:
    return f"{float(apart) / max(float(whole), 1e-30):.2g} x {float(whole):.2g}"


def _kind(text: str) -> str:
    """A warning without its numbers."""
    return "".join(character for character in text if not character.isdigit())[:80]


# ------------------------------------------------------------------------------------------- as the plan has it


def _held(case: Case, layout: Layout, plan: Plan, ranks: Sequence[Run], reference: Run) -> Iterator[str]:
    """The numbers of elements of parameters that ranks hold, and of optimizer states: replicas have those together from
    ZeRO 1 on, and each has all of them at stage 0.
    """
    sharded = _sharded(plan)
    per_stage = layout.num_state * layout.tp
    for name, full in reference.initial.items():
        if name not in reference.weights or not isinstance(full, Tensor) or name not in _parameters(ranks):
            continue
        for rank, run in enumerate(ranks):
            stage, replica = rank // per_stage, rank % per_stage // layout.tp
            expected = 0
            if plan.holds(stage, name):
                expected = _share_of(full, sharded.get(name), layout, rank % layout.tp, replica)
            if (held := run.held.parameters.get(name, 0)) != expected:
                yield f"rank {rank} holds {held} of {name}, planned {expected}"
    stages = [ranks[stage * per_stage].held.parameters.keys() for stage in range(layout.pp)]
    if not all(stages) or (layout.pp > 1 and not any(held < reference.held.parameters.keys() for held in stages)):
        yield f"the model is not cut: stages hold {[len(held) for held in stages]} parameters"
    is_whole = layout.zero == 0 or any(o.kind == "all" and o.found == "tried on small tensors" for o in plan.optimizers)
    for name, number in reference.held.optimizer_state.items():
        full = reference.initial[name]
        for stage in range(layout.pp):
            if plan.holds(stage, name):
                first = stage * per_stage
                count, dim = number / full.numel(), sharded.get(name)
                of_stage = ranks[first : first + per_stage]
                if dim is not None and any(optimizer.kind == "parameters" for optimizer in plan.optimizers):
                    yield from _owned(name, number, layout, of_stage)
                else:
                    yield from _states(name, full, count, dim, layout, is_whole, of_stage)


def _states(
    name: str, full: Tensor, count: float, dim: int | None, layout: Layout, is_whole: bool, ranks: Sequence[Run]
) -> Iterator[str]:
    """Compare the states of a parameter, `count` elements for each of its own, on the first ranks, those of a stage.

    Its replicas have all of them if `is_whole`.
    """
    for shard in range(layout.tp):
        of_replicas = [
            run.held.optimizer_state.get(name, 0) for run in ranks[shard : layout.num_state * layout.tp : layout.tp]
        ]
        expected = round(count * (full if dim is None else _chunk(full, layout.tp, dim, shard)).numel())
        total = expected * (layout.num_state if is_whole else layout.num_state // _sharing(layout))
        if sum(of_replicas) != total or (is_whole and max(of_replicas) != expected):
            yield f"replicas hold {of_replicas} elements of optimizer states of {name}, planned {total} in all"


def _owned(name: str, number: int, layout: Layout, ranks: Sequence[Run]) -> Iterator[str]:
    """One of the ranks of a stage that share a parameter which tensor parallel cuts has all of its states."""
    held = [run.held.optimizer_state.get(name, 0) for run in ranks]
    num_owners = layout.num_state if layout.zero == 0 else layout.num_state // _sharing(layout)
    if sorted(held, reverse=True) != [number] * num_owners + [0] * (len(held) - num_owners):
        yield f"ranks hold {held} elements of optimizer states of {name}, planned {number} on {num_owners} of them"


def _parameters(ranks: Sequence[Run]) -> set[str]:
    return {name for run in ranks for name in run.held.parameters}


def _sharded(plan: Plan) -> dict[str, int]:
    """FQN of a parameter -> the dim that tensor parallel cuts."""
    found = {}
    for block in plan.blocks:
        for weight in block.tensor.weights if block.tensor is not None else ():
            if weight.shard_dim is not None:
                found[f"{block.fqn}.{weight.fqn}"] = weight.shard_dim
    return found


def _share_of(full: Tensor, dim: int | None, layout: Layout, shard: int, replica: int) -> int:
    """Elements of a tensor on one rank: a chunk over tp, of which at stage 3 a chunk of dim 0 over dp."""
    if dim is not None:
        full = _chunk(full, layout.tp, dim, shard)
    shards = _sharing(layout)
    if layout.zero == 3 and shards > 1 and full.dim():
        full = _chunk(full, shards, 0, replica % shards)
    return full.numel()


def _sharing(layout: Layout) -> int:
    """How many replicas share one of the training states."""
    size: int = layout.zero_settings.get("shard_size", layout.num_state)
    return size


def _chunk(full: Tensor, count: float, dim: int, index: int) -> Tensor:
    chunks = full.chunk(count, dim)
    return chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)


def _sent(run: Run, plan: Plan) -> Iterator[str]:
    """Every block with tensor parallel sends what is planned, in number, kind and bytes."""
    if not run.sent:
        return
    sharded = {block.fqn: block.tensor for block in plan.blocks if block.tensor and block.tensor.is_sharded}
    for fqn, block in sharded.items():
        if fqn not in run.sent:
            if block.collectives:
                yield f"{fqn} was not run"
            continue
        expected = tuple(planned(block, is_backward=is_backward) for is_backward in (False, True))
        if run.sent[fqn] != expected and not block.data_dependent_routing:
            yield f"{fqn} sent {run.sent[fqn]}, planned {expected}"
