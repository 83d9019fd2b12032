"""Save under one layout, load under another: model and optimizer state must be the same bit for bit, in both formats.

The layouts are made by hand from a synthetic model (blocks of other stages on the meta device, DTensors over dp and tp,
a tied parameter held by two stages, glue held by all), so these tests need no strategy. Every value follows from its
name, so what is expected does not go through the code under test.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from lightning_3d.checkpoint import (
    full_model_state,
    full_optimizer_state,
    is_sharded_checkpoint,
    load_full,
    load_optimizers,
    load_sharded,
    model_state,
    optimizer_state,
    read_full,
    read_sharded,
    saved_optimizers,
    write_full,
)
from lightning_3d.checkpoint.box import full_value
from lightning_3d.errors import CheckpointError
from tests.checkpoints import restore_folder, restore_full, save_sharded
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

# -------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Column- and row-parallel weights, one that no size divides, a buffer of each kind, and extra state."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.odd = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        self.calls = {"forward": index, "by_kind": [index, -index]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


class Model(nn.Module):
    """Four blocks between an embedding and a head that is tied to it; the scale belongs to glue."""

    def __init__(self, num_blocks: int = 4, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3))
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(index) for index in range(num_blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight


@dataclass(frozen=True, kw_only=True)
class Layout:
    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp


LAYOUTS = {
    "one": Layout(),
    "pp2": Layout(pp=2),
    "dp2": Layout(shard=2),
    "tp2": Layout(tp=2),
    "pp2 x dp2": Layout(pp=2, shard=2),
    "pp2 x tp2": Layout(pp=2, tp=2),
    "dp2 x tp2": Layout(shard=2, tp=2),
    "replicate2 x tp2": Layout(replicate=2, tp=2),
}

TENSOR_PLAN = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "odd.weight": Shard(0)}


def value_of(name: str, like: Tensor) -> Tensor:
    """The full value that everything called `name` has in a saved checkpoint."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if like.dtype.is_floating_point:
        return 1 + torch.rand(like.shape, generator=generator, dtype=like.dtype)  # also fit for a step count
    return torch.randint(100, like.shape, generator=generator, dtype=like.dtype)


def place(full: Tensor, like: Tensor) -> Tensor:
    """`full` in the placement of `like`, by torch's own code."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def to_meta(module: nn.Module) -> None:
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            setattr(submodule, name, nn.Parameter(parameter.to("meta")))
        for name, buffer in submodule.named_buffers(recurse=False):
            submodule._buffers[name] = buffer.to("meta")


def build(layout: Layout, num_blocks: int = 4, width: int = 6) -> tuple[Model, DeviceMesh]:
    """The model as this rank holds it: stage 0 has the first half of the blocks, the last stage the others."""
    mesh = init_device_mesh(
        "cpu",
        (layout.pp, layout.replicate, layout.shard, layout.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
    )
    torch.manual_seed(0)  # initial values, which no load may leave
    model, stage = Model(num_blocks, width), mesh["pp"].get_local_rank()
    own = [block for i, block in enumerate(model.blocks) if i * layout.pp // len(model.blocks) == stage]
    for block in set(model.blocks) - set(own):
        to_meta(block)
    if layout.tp > 1:
        for block in own:
            shard_by_plan(block, mesh["tp"])
    if layout.replicate * layout.shard > 1:
        for module in [*own, model.embed]:
            fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
        model.head.weight = model.embed.weight
    elif stage == 1:  # the other stage holds the tied parameter in another placement
        placed = distribute_tensor(model.embed.weight.detach(), mesh["tp"], [Shard(0)], src_data_rank=None)
        model.embed.weight = model.head.weight = nn.Parameter(placed)
    return model, mesh["pp"]


def shard_by_plan(block: nn.Module, tp: DeviceMesh) -> None:
    for submodule_name, submodule in block.named_modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            placement = TENSOR_PLAN.get(f"{submodule_name}.{name}", Replicate())
            placed = distribute_tensor(parameter.detach(), tp, [placement], src_data_rank=None)
            setattr(submodule, name, nn.Parameter(placed))


def build_optimizers(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [
        AdamW([{"params": parameters[:5], "weight_decay": 0.5}, {"params": parameters[5:], "lr": 0.25}], foreach=True),
        AdamW(parameters, amsgrad=True, fused=True),
        SGD(parameters),
        SGD(parameters, momentum=0.5),
        Adagrad(parameters),
        RMSprop(parameters, momentum=0.5, centered=True),
    ]


def step(model: nn.Module, optimizers: list[Optimizer]) -> None:
    own = [parameter for parameter in model.parameters() if not parameter.is_meta]
    meshes = {parameter: parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in own}
    for mesh in set(meshes.values()):  # torch's foreach code takes one mesh at a time
        for parameter in own:
            parameter.grad = torch.ones_like(parameter) if meshes[parameter] == mesh else None
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.125


def names_and_values(model: nn.Module, optimizers: list[Optimizer]) -> list[tuple[str, Any]]:
    """Everything that this rank holds, under names that do not depend on the layout; independent of the library."""
    fqn_of = {parameter: fqn for fqn, parameter in model.named_parameters()}
    named = [(fqn, value) for fqn, value in model.state_dict().items() if isinstance(value, Tensor)]
    named = [(fqn.replace("head", "embed"), value) for fqn, value in named]
    for i, optimizer in enumerate(optimizers):
        for parameter, states in optimizer.state.items():
            if not parameter.is_meta:
                named += [(f"{i} {fqn_of[parameter]} {name}", value) for name, value in states.items()]
    return [(name, value) for name, value in named if not value.is_meta]


def prepare(layout: Layout) -> tuple[Model, list[Optimizer], DeviceMesh]:
    """A trained model: all values are those that `value_of` gives."""
    model, pp = build(layout)
    optimizers = build_optimizers(model)
    step(model, optimizers)
    with torch.no_grad():
        for name, value in names_and_values(model, optimizers):
            value.copy_(place(value_of(name, value), value))
    for index, block in enumerate(model.blocks):
        is_own = not block.odd.bias.is_meta
        block.calls = {"forward": 10 + index, "by_kind": [index, "b"]} if is_own else {"forward": "absent"}
    return model, optimizers, pp


def check(model: Model, optimizers: list[Optimizer]) -> int:
    """Compare what this rank holds with `value_of`; returns the number of values."""
    named = names_and_values(model, optimizers)
    for name, value in named:
        expected = place(value_of(name, value), value)
        local, expected_local = (t.to_local() if isinstance(t, DTensor) else t for t in (value, expected))
        assert local.dtype == expected_local.dtype, name
        assert torch.equal(local, expected_local), name
    for index, block in enumerate(model.blocks):
        if not block.odd.bias.is_meta:
            assert block.calls == {"forward": 10 + index, "by_kind": [index, "b"]}
    assert model.embed.weight is model.head.weight
    for optimizer, expected_lrs in zip(optimizers, [[0.125, 0.125]] + [[0.125]] * 5, strict=True):
        assert [group["lr"] for group in optimizer.param_groups] == expected_lrs
    assert [group["weight_decay"] for group in optimizers[0].param_groups] == [0.5, 0.01]
    return len(named)


# ------------------------------------------------------------------------------------------------- save A, then load B


def save(layout: Layout, folder: Path) -> None:
    model, optimizers, pp = prepare(layout)
    states = [optimizer_state(model, optimizer) for optimizer in optimizers]
    save_sharded(folder / "sharded", {"state_dict": model_state(model), "optimizer_states": states, "epoch": 3}, pp)
    full = {
        "state_dict": full_model_state(model, pp),
        "optimizer_states": [full_optimizer_state(model, optimizer, pp) for optimizer in optimizers],
        "epoch": 3,
    }
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.ckpt")
    else:
        assert full == {"state_dict": {}, "optimizer_states": [{}] * len(optimizers), "epoch": 3}


def load(layouts: list[Layout], folder: Path) -> list[int]:
    counts = []
    for layout in layouts:
        for is_sharded in (True, False):
            model, _ = build(layout)
            optimizers = build_optimizers(model)
            placements = {fqn: p.placements for fqn, p in model.named_parameters() if isinstance(p, DTensor)}
            if layout.shard * layout.replicate * layout.tp > 1:
                assert placements
            if is_sharded:
                restore_folder(folder / "sharded", model, optimizers)
                _, rest = read_sharded(folder / "sharded")
                assert rest == {"epoch": 3}
            else:
                checkpoint = read_full(folder / "full.ckpt", weights_only=True)
                restore_full(checkpoint, model, optimizers)
            counts.append(check(model, optimizers))
            assert placements == {fqn: p.placements for fqn, p in model.named_parameters() if isinstance(p, DTensor)}
            absent = [all(p.is_meta for p in block.parameters()) for block in model.blocks]
            assert sum(absent) == (2 if layout.pp == 2 else 0)
            step(model, optimizers)  # what was loaded can be trained
    return counts


SAVED = ["one", "pp2", "dp2 x tp2", "pp2 x dp2", "replicate2 x tp2"]
IN_MATRIX = SAVED[3:]


@pytest.mark.parametrize("saved", some_in_matrix(SAVED, lambda saved: saved in IN_MATRIX))
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.matrix)])
def test_any_layout_loads_what_any_other_saved(
    saved: str, world_size: int, workers: WorkerPools, tmp_path: Path
) -> None:
    workers(LAYOUTS[saved].world_size).run(save, LAYOUTS[saved], tmp_path)
    layouts = [layout for layout in LAYOUTS.values() if layout.world_size == world_size]
    counts = workers(world_size).run(load, layouts, tmp_path)
    assert min(min(of_rank) for of_rank in counts) > 100


# ---------------------------------------------------------------------------------------------------------- edge cases


def save_and_load_untrained(layout: Layout, folder: Path) -> None:
    model, pp = build(layout)
    states = [optimizer_state(model, optimizer) for optimizer in build_optimizers(model)]
    save_sharded(folder, {"state_dict": model_state(model), "optimizer_states": states}, pp)
    trained, trained_optimizers, _ = prepare(layout)
    restore_folder(folder, trained, trained_optimizers)
    for expected, value in zip(model.parameters(), trained.parameters(), strict=True):
        assert value.is_meta or torch.equal(full_value(expected), full_value(value))
    assert not trained_optimizers[0].state
    own = {parameter: state for parameter, state in trained_optimizers[4].state.items() if not parameter.is_meta}
    assert own
    assert all(state["step"] == 0 for state in own.values())  # Adagrad's state exists before the first step


def test_checkpoint_before_the_first_step(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save_and_load_untrained, LAYOUTS["pp2"], tmp_path / "untrained")


def overwrite(folder: Path) -> None:
    save(LAYOUTS["dp2"], folder)
    before = sorted(file.name for file in (folder / "sharded").iterdir())
    if dist.get_rank() == 0:
        (folder / "sharded" / "notes.txt").write_text("the user's")
    model, _, pp = prepare(LAYOUTS["dp2"])
    dist.barrier()
    save_sharded(folder / "sharded", {"state_dict": model_state(model)}, pp)
    assert set(before) <= {file.name for file in (folder / "sharded").iterdir()}
    assert (folder / "sharded" / "notes.txt").exists()


def load_overwritten(folder: Path) -> None:
    model, _ = build(Layout())
    restore_folder(folder / "sharded", model)
    optimizers = build_optimizers(model)
    with pytest.raises(CheckpointError, match="save_weights_only"):
        restore_folder(folder / "sharded", model, optimizers)


def test_replaces_a_checkpoint_and_nothing_else(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(overwrite, tmp_path)
    workers(1).run(load_overwritten, tmp_path)


def shard_pieces_again(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(2, 12, bias=False)
    full = torch.arange(24.0).reshape(12, 2)
    module.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [_StridedShard(0, split_factor=3)]))
    fully_shard(module, mesh=mesh["dp"])
    assert not torch.equal(module.weight.full_tensor(), full)  # if torch gets it right one day, drop check_placements
    for action in (
        lambda: save_sharded(folder, {"state_dict": model_state(module)}, None),
        lambda: full_model_state(module, None),
        lambda: load_full({"weight": full}, module, strict=True),
    ):
        with pytest.raises(CheckpointError, match=r"weight has placements .* sharded in pieces and sharded again"):
            action()


def test_refuses_what_torch_can_not_restore(workers: WorkerPools, tmp_path: Path) -> None:
    workers(4).run(shard_pieces_again, tmp_path / "pieces")


# -------------------------------------------------------------------------------------------------------------- misuse


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(full_value(value), before[fqn]) for fqn, value in tensors(model).items())


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: value for fqn, value in model_state(model).items() if isinstance(value, Tensor)}


def load_what_does_not_fit(layout: Layout, folder: Path) -> None:
    full = read_full(folder / "full.ckpt", weights_only=True)

    def raises(model: nn.Module, optimizers: list[Optimizer], match: str, strict: bool = True) -> None:
        before = {fqn: full_value(value).clone() for fqn, value in tensors(model).items()}
        opened, _ = read_sharded(folder / "sharded")
        loads: list[Callable[[], None]] = [
            lambda: load_sharded(opened, model, strict=strict),
            lambda: load_full(full["state_dict"], model, strict=strict),
        ]
        if optimizers:
            states = (saved_optimizers(opened), full["optimizer_states"])
            loads = [partial(load_optimizers, saved, model, optimizers, strict=strict) for saved in states]
        for load_it in loads:
            with pytest.raises(CheckpointError, match=match):
                load_it()
        assert unchanged(model, before)

    short, _ = build(layout, num_blocks=2)
    raises(short, [], r"unexpected in the checkpoint: blocks\.2\.\S+, .* more.*strict_loading=False")
    long, _ = build(layout, num_blocks=8)
    raises(long, [], r"missing in the checkpoint: blocks\.4\.\S+, .* more")
    wide, _ = build(layout, width=8)
    raises(wide, [], r"embed.weight has shape \(11, 6\) in the checkpoint and \(11, 8\) in the model", strict=False)
    model, _ = build(layout)
    raises(model, [AdamW(model.parameters())], "states of 6 optimizers, but 1 are to be restored")
    optimizers = build_optimizers(model)
    optimizers[0] = AdamW(model.parameters())
    raises(model, optimizers, "optimizer 0: it", strict=False)
    optimizers = build_optimizers(model)
    optimizers[1] = AdamW(list(model.parameters())[1:])
    raises(model, optimizers, "optimizer 1: i")
    with pytest.raises(CheckpointError, match="parameters \\[0\\] of SGD are not parameters of Model"):
        optimizer_state(model, SGD([nn.Parameter(torch.ones(1))]))
    of_module = SGD(model.parameters())
    of_module.state[model] = {"factor": torch.ones(1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert optimizer_state(model, of_module)["state"] == {}
    said = [str(w.message) for w in caught if "SGD keeps state of 1 things that are no parameters" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)


def load_what_matches(layout: Layout, folder: Path) -> None:
    for is_sharded in (True, False):
        model, _ = build(layout, num_blocks=8)
        if is_sharded:
            load_sharded(read_sharded(folder / "sharded")[0], model, strict=False)
        else:
            load_full(read_full(folder / "full.ckpt", weights_only=True)["state_dict"], model, strict=False)
        found = {fqn: full_value(value) for fqn, value in tensors(model).items()}
        loaded = {fqn for fqn, value in found.items() if torch.equal(value, value_of(fqn, value))}
        assert {fqn for fqn in found if fqn.startswith(("blocks.0.", "blocks.2."))} <= loaded
        assert not any(fqn.startswith(("blocks.4.", "blocks.7.")) for fqn in loaded)


@pytest.mark.parametrize("name", ["pp2", "dp2"])
def test_checkpoint_that_does_not_fit(name: str, workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save, LAYOUTS[name], tmp_path)
    workers(2).run(load_what_does_not_fit, LAYOUTS[name], tmp_path)
    workers(2).run(load_what_matches, LAYOUTS[name], tmp_path)


def read_what_is_not_there(folder: Path) -> None:
    model, pp = build(Layout(pp=2))
    with pytest.raises(CheckpointError, match="not a complete checkpoint folder"):
        restore_folder(folder, model)
    with pytest.raises(FileNotFoundError, match=r"Could not read .*nothing.ckpt .*No such file") as found:
        read_full(folder / "nothing.ckpt", weights_only=True)
    assert isinstance(found.value, CheckpointError)
    (folder / f"file{dist.get_rank()}").write_text("")
    with pytest.raises(CheckpointError, match=r"Could not write the checkpoint .*NotADirectoryError|FileExistsError"):
        save_sharded(folder / "file0" / "checkpoint", {"state_dict": model_state(model)}, pp)
    save_sharded(folder / "good", {"state_dict": model_state(model)}, pp)
    dist.barrier()
    if dist.get_rank() == 0:
        next(iter((folder / "good").glob("__1_*.distcp"))).unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"good is damaged: __1_0.distcp is missing"):
        restore_folder(folder / "good", model)
    assert is_sharded_checkpoint(folder / "good")
    with pytest.raises(CheckpointError, match=r"meta.pt, .*pickle"):
        save_sharded(folder / "bad", {"state_dict": model_state(model), "callback": lambda: None}, pp)
    assert not is_sharded_checkpoint(folder / "bad")


def test_files_that_can_not_be_read_or_written(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(read_what_is_not_there, tmp_path)


def test_a_file_takes_the_place_of_a_folder_but_not_of_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    for name in ("meta.pt", ".metadata", "__0_0.distcp"):
        (folder / name).touch()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"last.ckpt .* holds 1 files that are no part of the .* \(notes.txt\)"):
        write_full({"epoch": 1}, folder)
    assert len(list(folder.iterdir())) == 4
    (folder / "notes.txt").unlink()
    write_full({"epoch": 1}, folder)
    assert torch.load(folder, weights_only=True) == {"epoch": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
