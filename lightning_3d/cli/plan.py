"""``lightning-3d plan``: what a training would be on any number of ranks, without them."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from rich.console import Group
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_3d.cli.from_config import Training, read_cli_config, without_weights
from lightning_3d.cli.output import show
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.machine import given_machine
from lightning_3d.distributed.mesh import resolve_mesh_shape
from lightning_3d.errors import ConfigError, ThreeDError
from lightning_3d.memory.rank_memory import GIB
from lightning_3d.pipeline.microbatches import num_samples
from lightning_3d.planning.budget import trade_offs
from lightning_3d.planning.layouts import Choice
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.decide.dry_run import DryRun, DryRunPlan, search_layout
from lightning_3d.waits import long_wait

_HALVINGS = 4

HELP = "Plan a training on any number of ranks, without them: layout, memory, bytes, idle time."


def add_arguments(parser: ArgumentParser) -> None:
    """Give the parser its arguments."""
    parser.add_argument(
        "model", nargs="?", type=str, help="import path of a LightningModule, or a function that makes it"
    )
    parser.add_argument(
        "batch",
        nargs="?",
        type=str,
        help="import path of a function or class that gives a replica's batch, a DataLoader or a LightningDataModule",
    )
    parser.add_argument(
        "--cli_config",
        type=str,
        help="a file of LightningCLI with the rest: data, the Trainer's devices, precision and strategy; and the model,"
        " unless its class and that of the data are named here, as the program does that the file is of",
    )
    parser.add_argument("--world_size", type=int, help="the number of ranks")
    parser.add_argument("--config", type=str, help="a YAML file with the settings of strategy='3d'")
    parser.add_argument(
        "--set", action="append", type=str, default=[], metavar="KEY=VALUE", help="a setting, such as zero.stage=3"
    )
    parser.add_argument("--precision", type=str, help="as of the Trainer")
    parser.add_argument(
        "--memory", type=float, help="GiB of a device, as activations.budget; what does not fit is refused"
    )
    parser.add_argument("--states", type=int, default=2, help="numbers that the optimizer keeps for each parameter")
    parser.add_argument(
        "--optimizer",
        type=str,
        help="a class of torch.optim, such as muon, or an import path; its states are counted, and what its step sends",
    )
    parser.add_argument("--report", type=Path, help="a page that it is written to, with pictures (HTML)")
    parser.add_argument("--pictures", type=Path, help="a folder that the pictures of that page are written to (PNG)")
    parser.add_argument("--ranks_per_node", type=int, default=8, help="for layouts that are searched, and their time")
    parser.add_argument("--tflops", type=float, default=400.0, help="10^12 operations per second that a device reaches")
    parser.add_argument("--inside", type=float, default=300.0, help="GB per second that a rank sends inside of a node")
    parser.add_argument("--between", type=float, default=40.0, help="GB per second that a rank sends to other nodes")
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")


def run(chosen: Namespace) -> None:
    """Run it."""
    sys.path.insert(0, "")  # as `python -m` does
    with long_wait("Making the model and the data"):
        given = _given(chosen)
    if given.world_size < 1 or chosen.states < 0:
        raise ConfigError(f"{given.world_size} ranks, {chosen.states} states of a parameter: use 1 or more, 0 or more")
    with long_wait("Fetching the first batch"):
        batch = _first_batch(given.data)
    optimizer = chosen.states if chosen.optimizer is None else _optimizer(chosen.optimizer)
    machine = given_machine(
        tflops=chosen.tflops, inside=chosen.inside, between=chosen.between, ranks_per_node=chosen.ranks_per_node
    )

    def planned_on(world_size: int) -> tuple[Choice | None, DryRunPlan]:
        config, choice = given.config, None
        if config.is_planned:
            config = replace(config, layout="planned")  # all of them are compared
            memory = None if chosen.memory is None else int(chosen.memory * GIB)
            choice = search_layout(ahead, config, machine, world_size, memory, num_samples=num_samples(batch))
            config = choice.of(config)
        return choice, ahead.plan(config, resolve_mesh_shape(config, world_size), chosen.memory, machine)

    is_drawn = chosen.report is not None or chosen.pictures is not None
    with long_wait("Planning"):
        ahead = DryRun.without_trainer(given.module, batch, given.config, ThreeDPrecision(given.precision), optimizer)
        choice, planned = planned_on(given.world_size)
        scaling = _scaling(planned, planned_on, num_samples(batch)) if is_drawn else {}
    if is_drawn:
        with long_wait("Drawing"):
            _draw(chosen.report, chosen.pictures, planned, type(given.module).__name__, scaling)
    if chosen.json:
        show(json.dumps(planned.as_dict() | ({} if choice is None else {"layout": choice.as_dict()})))
    else:
        show(planned if choice is None else Group(choice, planned))


def _scaling(
    planned: DryRunPlan, planned_on: Callable[[int], tuple[Choice | None, DryRunPlan]], num_samples: int
) -> dict[int, float]:
    """Number of ranks -> predicted samples per second; of halves of the ranks, as far as they can train the model."""
    plans, size = [planned], planned.plan.shape.world_size
    for _ in range(_HALVINGS):
        size, rest = divmod(size, 2)
        if rest:
            break
        with suppress(ThreeDError):  # too few ranks for the sizes that are set, or for the memory
            plans.append(planned_on(size)[1])
    shapes = [(each.plan.shape, each.seconds) for each in plans]
    return {shape.world_size: num_samples * shape.size("samples") / of.total for shape, of in shapes if of is not None}


def _draw(
    page: Path | None, pictures: Path | None, planned: DryRunPlan, name: str, scaling: Mapping[int, float]
) -> None:
    from lightning_3d.callbacks.drawing import Figure, budget_figure, save, scaling_figure  # there may be no matplotlib
    from lightning_3d.callbacks.page import plan_sections, write_page

    plan, sections = planned.plan, list(plan_sections(planned.plan, planned))
    if planned.step is not None:
        points = trade_offs(plan, planned.step)
        sections.append(("Budgets", budget_figure(points)))
    if len(scaling) > 1:
        sections.append(("Scaling", scaling_figure(scaling)))
    if page is not None:
        write_page(page, f"{name} on {plan.shape.world_size} ranks", sections)
    if pictures is not None:
        for heading, content in sections:
            if isinstance(content, Figure):
                save(content, pictures / f"{heading.lower()}.png")


def _given(chosen: Namespace) -> Training:
    """The training that arguments name, or a file of LightningCLI and what changes it."""
    if chosen.cli_config is not None:
        classes = [None if path is None else _imported(path) for path in (chosen.model, chosen.batch)]
        given = read_cli_config(chosen.cli_config, *classes)
    elif chosen.model is None or chosen.batch is None:
        raise ConfigError("name a model and what gives its batch, or a file of LightningCLI by --cli_config")
    else:
        data = _made(chosen.batch)
        module = without_weights(lambda: _made(chosen.model))
        if not isinstance(module, LightningModule):
            raise ConfigError(f"{chosen.model} gives a {type(module).__name__}: name a LightningModule")
        given = Training(module=module, data=data)
    if not (world_size := chosen.world_size or given.world_size):
        raise ConfigError("the number of ranks is not known: set --world_size")
    settings = chosen.config or given.config.as_mapping()
    return replace(
        given,
        config=ThreeDConfig.from_file(settings, chosen.set),
        precision=chosen.precision or given.precision,
        world_size=world_size,
    )


def _optimizer(name: str) -> Optimizer:
    """An optimizer of a small matrix and a vector; of the matrix alone if it takes no vectors."""
    known = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    make = known.get(name.lower()) or _imported(name)
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))]
    try:
        made = make(parameters)
    except ValueError:
        made = make(parameters[:1])
    if not isinstance(made, Optimizer):
        raise ConfigError(f"--optimizer={name} gives a {type(made).__name__}: name a torch.optim.Optimizer")
    return made


def _made(path: str) -> Any:
    make = _imported(path)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(f"{path} takes arguments ({error}): name a function that calls it with them") from error
    return make()


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{path} is no import path: write module.name")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path} can't be imported, from the current folder either: {error}") from error
    return found


def _first_batch(data: Any) -> object:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    return next(iter(data)) if isinstance(data, DataLoader) else data
