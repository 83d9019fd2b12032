"""Folders and files of a model in two stages: the same bit for bit, or refused with names and nothing changed.

That any layout loads what any other saved is in the law, whose settings resume runs in other layouts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop, Rprop

from lightning_3d.checkpoint.folder import is_sharded_checkpoint
from lightning_3d.checkpoint.loading import read_checkpoint
from lightning_3d.checkpoint.optimizer_states import load_optimizers, optimizer_state
from lightning_3d.checkpoint.own_state import load_model, state_for_hooks
from lightning_3d.errors import CheckpointError
from lightning_3d.zero.loading import loading_states
from tests.checkpoints import Staged, restore, save_file, save_folder, staged
from tests.workers import WorkerPools


def build_optimizers(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [
        AdamW([{"params": parameters[:5], "weight_decay": 0.5}, {"params": parameters[5:], "lr": 0.25}], foreach=True),
        AdamW(parameters, amsgrad=True, fused=True),
        SGD(parameters),
        Adagrad(parameters),
        RMSprop(parameters, momentum=0.5, centered=True),
    ]


def trained(seed: int = 1) -> tuple[Staged, list[Optimizer], Any]:
    """A model after a step, with extra state that tells the seed."""
    model, pp = staged()
    optimizers = build_optimizers(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if parameter.is_meta else gradient
    for optimizer in optimizers:
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.125 * seed
    for block in model.own:
        block.norm.running_mean.add_(seed)  # type: ignore[union-attr]
    for block in model.blocks:
        block.calls = {"by": seed if block in model.own else "another rank"}  # type: ignore[assignment]
    return model, optimizers, pp


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        fqn: value for fqn, value in state_for_hooks(model).items() if isinstance(value, Tensor) and not value.is_meta
    }


def everything(model: Staged, optimizers: list[Optimizer]) -> list[Any]:
    """What this rank holds, and the groups."""
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    states = [{name: value for p in held for name, value in opt.state.get(p, {}).items()} for opt in optimizers]
    groups = [{k: v for k, v in group.items() if k != "params"} for opt in optimizers for group in opt.param_groups]
    return [tensors(model), states, groups, [block.calls for block in model.own]]


def save(folder: Path) -> None:
    model, optimizers, pp = trained()
    states = [optimizer_state(model, optimizer) for optimizer in optimizers]
    checkpoint = {"state_dict": state_for_hooks(model), "optimizer_states": states, "epoch": 3}
    save_folder(folder / "folder", checkpoint, pp)
    save_file(folder / "file.ckpt", checkpoint)


def save_and_load(folder: Path) -> None:
    save(folder)
    model, optimizers, _ = trained()
    expected = everything(model, optimizers)
    for name in ("folder", "file.ckpt"):
        other, others, _ = trained(seed=2)
        assert restore(folder / name, other, others) == {"epoch": 3}
        torch.testing.assert_close(everything(other, others), expected, rtol=0, atol=0)
        assert other.embed.weight is other.head.weight
        assert len(other.own) == 2


def test_all_is_loaded_to_the_bit(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save_and_load, tmp_path)


def overwrite(folder: Path) -> None:
    save(folder)
    before = sorted(file.name for file in (folder / "folder").iterdir())
    if dist.get_rank() == 0:
        (folder / "folder" / "notes.txt").write_text("the user's")
    model, optimizers, pp = trained()
    dist.barrier()
    save_folder(folder / "folder", {"state_dict": state_for_hooks(model)}, pp)
    assert {*before, "notes.txt"} <= {file.name for file in (folder / "folder").iterdir()}
    restore(folder / "folder", model)
    with pytest.raises(CheckpointError, match="save_weights_only"):
        restore(folder / "folder", model, optimizers)


def test_replaces_a_checkpoint_and_nothing_else(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(overwrite, tmp_path)


# -------------------------------------------------------------------------------------------------------------- misuse


def load_what_does_not_fit(folder: Path) -> None:
    save(folder)
    saved = [read_checkpoint(folder / name, staged()[0], weights_only=True) for name in ("folder", "file.ckpt")]

    def raises(model: nn.Module, optimizers: list[Optimizer], match: str, strict: bool = True) -> None:
        before = {fqn: value.clone() for fqn, value in tensors(model).items()}
        loads: list[Callable[[], None]] = [
            partial(load_model, checkpoint["state_dict"], model, strict=strict)
            if not optimizers
            else partial(load_optimizers, checkpoint["optimizer_states"], model, optimizers, strict=strict)
            for checkpoint in saved
        ]
        for load_it in loads:
            with pytest.raises(CheckpointError, match=match):
                load_it()
        torch.testing.assert_close(tensors(model), before, rtol=0, atol=0)

    raises(
        staged(num_blocks=2)[0],
        [],
        r"unexpected in the checkpoint: blocks\.2\.\S+, .* more.*strict_loading=False",
    )
    raises(staged(num_blocks=8)[0], [], r"missing in the checkpoint: blocks\.4\.\S+, .* more")
    wide = "embed.weight has shape \\(11, 6\\) in the checkpoint and \\(11, 8\\) in the model"
    raises(staged(width=8)[0], [], wide, strict=False)
    model, _ = staged()
    raises(model, [AdamW(model.parameters())], "states of 5 optimizers, but 1 are to be restored")
    optimizers = build_optimizers(model)
    raises(model, [AdamW(model.parameters()), *optimizers[1:]], "optimizer 0: it", strict=False)
    others = [*optimizers[:2], Adagrad(model.parameters()), *optimizers[3:]]
    raises(
        model, others, "optimizer 2: it was saved of another kind, which keeps no states, .*Adagrad, which needs step"
    )
    for number, other, states, needed in (
        (0, Adamax, "step, exp_avg, exp_avg_sq", "exp_inf"),
        (0, NAdam, "step, exp_avg, exp_avg_sq", "mu_product"),
        (3, Rprop, "step, sum", "etas"),
        (4, SGD, "step, square_avg, momentum_buffer, grad_avg", "dampening"),
    ):
        groups = [{"params": group["params"], "lr": 0.1} for group in optimizers[number].param_groups]
        changed = [*optimizers[:number], other(groups), *optimizers[number + 1 :]]
        raises(model, changed, f"optimizer {number}: it was saved of another kind, which keeps {states}, .* {needed}")
    likewise = [Adam(optimizers[0].param_groups), *optimizers[1:]]
    load_optimizers(saved[0]["optimizer_states"], model, likewise, strict=True)
    names = [type(optimizer).__name__ for optimizer in optimizers]
    with pytest.raises(CheckpointError, match=r"optimizer 2: it was saved of SGD, and this one is Adagrad, which"):
        load_optimizers(saved[0]["optimizer_states"], model, others, strict=True, saved_as=names)
    optimizers[1] = AdamW(list(model.parameters())[1:])
    raises(model, optimizers, "optimizer 1: i")
    with pytest.raises(CheckpointError, match="parameters \\[0\\] of SGD are not parameters of Staged"):
        optimizer_state(model, SGD([nn.Parameter(torch.ones(1))]))
    of_module = SGD(model.parameters())
    of_module.state[model] = {"factor": torch.ones(1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert optimizer_state(model, of_module)["state"] == {}
    said = [str(w.message) for w in caught if "SGD keeps state of 1 things that are no parameters" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    of_stage = tensors(trained()[0])
    for checkpoint in saved:
        long, _ = staged(num_blocks=8)
        first = {fqn: value.clone() for fqn, value in tensors(long).items()}
        load_model(checkpoint["state_dict"], long, strict=False)
        for fqn, value in tensors(long).items():
            known = of_stage.get(fqn, saved[1]["state_dict"].get(fqn, first[fqn]))
            assert torch.equal(value, known), fqn


def test_checkpoint_that_does_not_fit(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(load_what_does_not_fit, tmp_path)


class Refusing(AdamW):
    """Can't take states at first."""

    refuses = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.refuses:
            raise ValueError("these states")


def test_an_optimizer_whose_load_failed_steps_the_module_s_parameters() -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))]
    optimizer = Refusing(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    refused = pytest.raises(ValueError, match="these states")
    with loading_states(optimizer, lambda parameter: (parameter.device, torch.float32)), refused:
        optimizer.load_state_dict(saved)
    assert _steps(optimizer, parameters)
    with loading_states(optimizer, lambda parameter: (parameter.device, torch.float32)):
        with pytest.raises(ValueError, match="these states"):
            optimizer.load_state_dict(saved)
        optimizer.refuses = False
        optimizer.load_state_dict(saved)
        assert _steps(optimizer, parameters)
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def _steps(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    held = [*optimizer.param_groups[0]["params"], *optimizer.state]
    return all(one is other for one, other in zip(held, [*parameters, *parameters], strict=True))


def read_what_is_not_there(folder: Path) -> None:
    model, pp = staged()
    with pytest.raises(CheckpointError, match="not a complete checkpoint folder"):
        restore(folder, model)
    with pytest.raises(FileNotFoundError, match=r"Could not read .*nothing.ckpt .*No such file") as found:
        restore(folder / "nothing.ckpt", model)
    assert isinstance(found.value, CheckpointError)
    (folder / f"file{dist.get_rank()}").write_text("")
    with pytest.raises(CheckpointError, match=r"Could not write the checkpoint .*NotADirectoryError|FileExistsError"):
        save_folder(folder / "file0" / "checkpoint", {"state_dict": state_for_hooks(model)}, pp)
    with pytest.raises(CheckpointError, match=r"meta.pt, .*pickle"):
        save_folder(folder / "bad", {"state_dict": state_for_hooks(model), "callback": lambda: None}, pp)
    assert not is_sharded_checkpoint(folder / "bad")


def test_files_that_can_not_be_read_or_written(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(read_what_is_not_there, tmp_path)
