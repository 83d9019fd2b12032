"""DEFECTS: mistakes that are planted in the package, each with cases in which the judge has to find it.

A defect is a function that patches the package on every rank before the case is run there. What it spoils it spoils by
as little as a real mistake would: one parameter, one rank or one step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_3d import ThreeDStrategy
from lightning_3d.context import interpreter, ring, rules
from lightning_3d.errors import TraceError
from lightning_3d.pipeline.batch_loss import BatchLoss, LossReduction
from lightning_3d.pipeline.effects import norms
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.rules import losses
from lightning_3d.zero import fully_sharded
from lightning_3d.zero.dp_comm import DPComm
from lightning_3d.zero.gradients import Gradients
from tests.law.cover import Case

Patch = pytest.MonkeyPatch

STEP = 1
"""The optimizer step, of 0 to 2, in which a mistake is made."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A row."""

    plant: Callable[[Patch], None]
    shows: str
    """A part of a problem that the judge names for it."""
    layouts: tuple[str, ...]
    model: str = "gpt"
    setting: str = "plain"
    habit: str = "none"

    @property
    def cases(self) -> list[Case]:
        return [Case(self.model, layout, self.setting, self.habit) for layout in self.layouts]


# --------------------------------------------------------------------------------------------------- ways to plant one


def _after(patch: Patch, owner: type, name: str, act: Callable[..., None]) -> None:
    """Do something after a method."""
    method = getattr(owner, name)

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        act(self)
        return result

    patch.setattr(owner, name, planted)


def _is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _is_now(strategy: ThreeDStrategy) -> bool:
    return strategy.lightning_module.trainer.global_step == STEP


def _middle(strategy: ThreeDStrategy) -> torch.nn.Parameter:
    """A parameter that this rank holds, a matrix of a block where there is one."""
    held = [p for p in strategy.lightning_module.parameters() if p.requires_grad and not p.is_meta]
    matrices = [parameter for parameter in held if parameter.dim() > 1] or held
    return matrices[len(matrices) // 2]


def _spoils_gradients(change: Callable[[ThreeDStrategy], None]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        _after(patch, ThreeDStrategy, "backward", lambda strategy: change(strategy) if _is_now(strategy) else None)

    return plant


# ---------------------------------------------------------------------------------------------------------- gradients


def _drop(strategy: ThreeDStrategy) -> None:
    gradient = _middle(strategy).grad
    assert gradient is not None
    gradient.zero_()


def _double(strategy: ThreeDStrategy) -> None:
    gradient = _middle(strategy).grad
    assert gradient is not None
    gradient.mul_(2)


def _sum(strategy: ThreeDStrategy) -> None:
    for parameter in strategy.lightning_module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(strategy.mesh.shape.dp)


def _keep_own(patch: Patch) -> None:
    """Each replica takes its own gradients for those of all."""
    patch.setattr(DPComm, "all_reduce", lambda self, tensor: lambda: tensor[0] * self.size)
    patch.setattr(DPComm, "reduce_scatter", lambda self, tensor: lambda: tensor[self.shard_rank] * self.size)
    patch.setattr(DPComm, "reduce", lambda self, tensor, owner: lambda: tensor[0] * self.size)


def _forget_accumulated(patch: Patch) -> None:
    def forget(strategy: ThreeDStrategy) -> None:
        if strategy.run.steps.accumulating and _is_now(strategy):
            _middle(strategy).grad = None

    _after(patch, ThreeDStrategy, "backward", forget)


def _break_tie(patch: Patch) -> None:
    patch.setattr(Gradients, "sum_shared", lambda self: None)


def _clip_locally(patch: Patch) -> None:
    norm = Gradients.norm

    def local(self: Gradients, *args: Any, **kwargs: Any) -> Tensor:
        with Patch.context() as inner:
            inner.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
            return norm(self, *args, **kwargs)

    patch.setattr(Gradients, "norm", local)


def _weigh_microbatches(patch: Patch) -> None:
    decide = BatchLoss.decide

    def planted(self: BatchLoss, *args: Any, **kwargs: Any) -> LossReduction:
        decision = decide(self, *args, **kwargs)
        first, *others = decision.weights
        return replace(decision, weights=[1.1 * first, *others])

    patch.setattr(BatchLoss, "decide", planted)


def _fail_once(patch: Patch) -> None:
    execute = StageRun._execute

    def planted(self: StageRun, *args: Any) -> Any:
        patch.setattr(StageRun, "_execute", execute)
        raise TraceError("something odd")

    patch.setattr(StageRun, "_execute", planted)


# -------------------------------------------------------------------------------------------------- weights and steps


def _around_step(patch: Patch, step: Callable[[Callable[[], Any], ThreeDStrategy, Callable[[], Any]], Any]) -> None:
    """In one step, run another one: it gets the real one, the strategy and the closure."""
    real = ThreeDStrategy.optimizer_step

    def planted(self: ThreeDStrategy, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return real(self, optimizer, closure, *args, **kwargs)

        return step(run, self, closure) if _is_now(self) else run()

    patch.setattr(ThreeDStrategy, "optimizer_step", planted)


def _keep_stale(patch: Patch) -> None:
    def stale(run: Callable[[], Any], strategy: ThreeDStrategy, closure: Any) -> Any:
        parameter = _middle(strategy)
        before = parameter.detach().clone()
        output = run()
        if _is_last_rank():
            with torch.no_grad():
                parameter.copy_(before)
        return output

    _around_step(patch, stale)


def _miss_step(patch: Patch) -> None:
    _around_step(patch, lambda run, strategy, closure: closure())


def _move_frozen(patch: Patch) -> None:
    def move(strategy: ThreeDStrategy) -> None:
        frozen = [p for p in strategy.lightning_module.parameters() if not p.requires_grad and not p.is_meta]
        with torch.no_grad():
            for parameter in frozen[:1]:
                parameter.mul_(1.01)

    _after(patch, ThreeDStrategy, "optimizer_step", move)


def _begin_elsewhere(patch: Patch) -> None:
    def move(strategy: ThreeDStrategy) -> None:
        if _is_last_rank():
            with torch.no_grad():
                _middle(strategy).mul_(1.0001)

    _after(patch, ThreeDStrategy, "setup", move)


def _miss_schedule(patch: Patch) -> None:
    """The second step of a scheduler does nothing, on one rank."""
    step, calls = LRScheduler.step, []

    def planted(self: LRScheduler, *args: Any) -> None:
        calls.append(self)
        if len(calls) != 3 or not _is_last_rank():  # a scheduler that is made steps once
            step(self, *args)

    patch.setattr(LRScheduler, "step", planted)


def _resume_without_momentum(patch: Patch) -> None:
    patch.setattr("lightning_3d.checkpoint.trainer_io.load_optimizers", lambda *args, **kwargs: None)


# ------------------------------------------------------------------------------------------- what is held, sent, saved


def _leave_unsharded(patch: Patch) -> None:
    """A matrix of each block stays whole at stage 3."""
    shardable = fully_sharded.is_shardable
    patch.setattr(fully_sharded, "is_shardable", lambda p: shardable(p) and tuple(p.shape) != (32, 128))


def _step_everywhere(patch: Patch) -> None:
    """Every replica has all states."""
    init = ThreeDStrategy.__init__

    def planted(self: Any, *args: Any, zero: Any, **kwargs: Any) -> None:
        init(self, *args, zero={**zero, "optimizer_steps": "all"}, **kwargs)

    patch.setattr(ThreeDStrategy, "__init__", planted)


def _send_twice(patch: Patch) -> None:
    reduce = MeshAxis.all_reduce

    def planted(self: MeshAxis, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduce(self, torch.zeros_like(tensor), *args, **kwargs)
        return reduce(self, tensor, *args, **kwargs)

    patch.setattr(MeshAxis, "all_reduce", planted)


def _on_saving(change: Callable[[dict[str, Any]], None]) -> Callable[[Patch], None]:
    """Change what was written to a file."""
    save = ThreeDStrategy.save_checkpoint

    def planted(self: ThreeDStrategy, checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        save(self, checkpoint, filepath, *args, **kwargs)
        if self.is_global_zero:
            saved = torch.load(filepath, weights_only=False)
            change(saved)
            torch.save(saved, filepath)

    return lambda patch: patch.setattr(ThreeDStrategy, "save_checkpoint", planted)


def _leave_out(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    del state[list(state)[len(state) // 2]]


def _save_stale(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    name = list(state)[len(state) // 2]
    state[name] = 0.99 * state[name]


def _save_no_momentum(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["momentum_buffer"] = 0 * state["momentum_buffer"]
        return


# -------------------------------------------------------------------------------------------- what is seen beside it


def _see_one_microbatch(patch: Patch) -> None:
    of_batch = norms._of_batch
    patch.setattr(norms, "_of_batch", lambda norm, calls: of_batch(norm, calls[:1]))


def _draw_again(patch: Patch) -> None:
    step = ThreeDStrategy.training_step

    def planted(self: ThreeDStrategy, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return step(self, *args, **kwargs)

    patch.setattr(ThreeDStrategy, "training_step", planted)


def _meter_alone(patch: Patch) -> None:
    patch.setattr(torchmetrics.Metric, "_sync_dist", lambda self, *args, **kwargs: None)


def _log_alone(patch: Patch) -> None:
    patch.setattr(ThreeDStrategy, "reduce", lambda self, tensor, *args, **kwargs: tensor)


def _hook_again(patch: Patch) -> None:
    _spoils_gradients(lambda strategy: strategy.lightning_module.on_after_backward())(patch)


def _warn(patch: Patch) -> None:
    _after(patch, ThreeDStrategy, "setup", lambda strategy: warnings.warn("there is something odd", stacklevel=1))


def _leave_patched(patch: Patch) -> None:
    _after(patch, ThreeDStrategy, "teardown", lambda strategy: patch.setattr(torch, "cos", lambda x: x.cos()))


_opened: list[Any] = []


def _leave_open(patch: Patch) -> None:
    _after(patch, ThreeDStrategy, "teardown", lambda strategy: _opened.append(open(f"log{os.getpid()}", "w")))  # noqa: SIM115


def _count_slices_once(patch: Patch) -> None:
    patch.setattr(interpreter, "with_gradient_times", lambda tensor, factor: tensor)


def _count_own_rows(patch: Patch) -> None:
    count = losses._count
    patch.setattr(losses, "_count", lambda rows, **call: count(rows, **call) // 2)


def _overweigh_what_comes_by(patch: Patch) -> None:
    attend = ring.attend

    def planted(*operands: Tensor, is_causal: bool, **options: Any) -> tuple[Tensor, Tensor]:
        output, lse = attend(*operands, is_causal=is_causal, **options)
        return output, lse if is_causal else lse + 0.1

    patch.setattr(ring, "attend", planted)


def _attend_by_heads(patch: Patch) -> None:
    read = ring._Ring.read

    def planted(self: Any, source: int) -> tuple[slice, slice]:
        queries, keys = read(self, source)
        return (queries if queries.start is None else slice(queries.start)), keys

    patch.setattr(ring._Ring, "read", planted)


def _shift_once_more(patch: Patch) -> None:
    as_move = interpreter.as_move

    def planted(call: Any) -> Any:
        move = as_move(call)
        return move and replace(move, wanted=tuple(torch.cat([rows[1:], rows[-1:]]) for rows in move.wanted))

    patch.setattr(interpreter, "as_move", planted)


def _mask_as_first_rank(patch: Patch) -> None:
    causal = rules._causal
    patch.setattr(rules, "_causal", lambda first, last, device: causal(0, last, device)[: last - first])


SAVING = ("pp2", "tp2", "dp2-zero1", "dp2-zero3")
EVERY = ("pp2", "tp2", "dp2-zero0", "dp2-zero1", "dp2-zero2", "dp2-zero3", "pp2-dp2-zero3", "cp2")
REPLICAS = ("dp2-zero0", "dp2-zero1", "dp2-zero2", "dp2-zero3", "pp2-dp2-zero2")

DEFECTS = {
    "dropped gradient": Defect(plant=_spoils_gradients(_drop), shows="gradient of", layouts=EVERY),
    "doubled gradient": Defect(plant=_spoils_gradients(_double), shows="gradient of", layouts=EVERY),
    "gradients summed": Defect(plant=_spoils_gradients(_sum), shows="gradient of", layouts=REPLICAS),
    "gradients of one replica": Defect(
        plant=_keep_own, shows="gradient of", layouts=("dp2-zero0", "dp2-zero1", "dp2-zero2", "pp2-dp2-zero2")
    ),
    "dropped gradient, unseen": Defect(
        plant=_spoils_gradients(_drop), shows="weights: ", layouts=("pp2", "tp2", "dp2-zero0"), setting="unseen"
    ),
    "accumulation lost": Defect(
        plant=_forget_accumulated, shows="gradient of", layouts=("pp2", "tp2", "dp2-zero0"), setting="accumulated"
    ),
    "broken tie": Defect(plant=_break_tie, shows="gradient of", layouts=("pp2", "pp2-tp2", "pp2-dp2-zero2")),
    "clipped by the local norm": Defect(
        plant=_clip_locally, shows="weights: ", layouts=("pp2", "tp2", "dp2-zero3"), setting="clipped"
    ),
    "weight of a microbatch": Defect(plant=_weigh_microbatches, shows="gradient of", layouts=("pp2", "pp4", "pp2-tp2")),
    "step that fails in microbatches": Defect(plant=_fail_once, shows="something odd", layouts=("pp2", "pp2-tp2")),
    "stale weight": Defect(plant=_keep_stale, shows="weights: ", layouts=EVERY),
    "missed step": Defect(plant=_miss_step, shows="weights: ", layouts=("pp2", "tp2", "dp2-zero0", "dp2-zero3")),
    "frozen weight moves": Defect(
        plant=_move_frozen, shows="weights: ", layouts=("pp2", "tp2", "dp2-zero0", "dp2-zero3"), habit="thawing"
    ),
    "other initial weight": Defect(plant=_begin_elsewhere, shows="initial value of", layouts=EVERY),
    "missed step of a scheduler": Defect(plant=_miss_schedule, shows="rates are", layouts=SAVING, setting="warmed-up"),
    "momentum lost": Defect(
        plant=_resume_without_momentum, shows="weights: ", layouts=("pp2", "tp2", "dp2-zero3"), setting="resumed"
    ),
    "unsharded layer": Defect(plant=_leave_unsharded, shows="planned", layouts=("dp2-zero3", "pp2-dp2-zero3")),
    "unsharded states": Defect(plant=_step_everywhere, shows="optimizer states", layouts=("dp2-zero1", "dp2-zero2")),
    "collective sent twice": Defect(plant=_send_twice, shows=" sent ", layouts=("tp2",)),
    "checkpoint without a parameter": Defect(
        plant=_on_saving(_leave_out),
        shows="checkpoint: other tensors",
        layouts=SAVING,
    ),
    "stale parameter in a checkpoint": Defect(plant=_on_saving(_save_stale), shows="checkpoint: ", layouts=SAVING),
    "momentum missing in a checkpoint": Defect(
        plant=_on_saving(_save_no_momentum), shows="momentum_buffer", layouts=SAVING
    ),
    "statistics of one microbatch": Defect(
        plant=_see_one_microbatch, shows="running_mean", layouts=("pp2", "pp4", "pp2-tp2"), model="norms"
    ),
    "dropout that repeats": Defect(plant=_draw_again, shows="gradient of", layouts=("tp2",), model="dropping"),
    "metric of one rank": Defect(
        plant=_meter_alone, shows="running", layouts=("dp2-zero0", "dp2-zero3", "pp2-dp2-zero2"), habit="metrics"
    ),
    "log of one rank": Defect(plant=_log_alone, shows="logged in", layouts=("dp2-zero0", "dp2-zero3", "pp2-dp2-zero2")),
    "hook called twice": Defect(plant=_hook_again, shows="noted", layouts=SAVING, habit="hooks"),
    "warning": Defect(plant=_warn, shows="warned: there is something odd", layouts=("pp2", "tp2", "dp2-zero1")),
    "gradients of slices averaged": Defect(plant=_count_slices_once, shows="gradient of", layouts=("cp2", "cp4")),
    "mean over twice too few rows": Defect(plant=_count_own_rows, shows="gradient of", layouts=("cp2",), model="llama"),
    "slices weighed otherwise in a ring": Defect(
        plant=_overweigh_what_comes_by, shows="gradient of", layouts=("cp2",), setting="ring"
    ),
    "heads in place of tails in a ring": Defect(
        plant=_attend_by_heads, shows="gradient of", layouts=("cp2",), model="llama", setting="head-tail"
    ),
    "shift off by one": Defect(plant=_shift_once_more, shows="gradient of", layouts=("cp2",), model="shifted-loss"),
    "mask of another slice": Defect(
        plant=_mask_as_first_rank, shows="gradient of", layouts=("cp4",), model="llama-one-kv-head", setting="gathered"
    ),
    "left patched": Defect(plant=_leave_patched, shows="torch.cos", layouts=("pp2", "tp2", "dp2-zero1")),
    "left open": Defect(plant=_leave_open, shows="open: ", layouts=("pp2", "tp2", "dp2-zero1")),
}


def cases() -> Iterator[tuple[str, Case]]:
    for name, defect in DEFECTS.items():
        for case in defect.cases:
            assert case.is_allowed, f"{name}: {case}"
            yield name, case
