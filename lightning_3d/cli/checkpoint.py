"""``lightning-3d checkpoint COMMAND ...``, whose arguments are those of functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_3d.checkpoint.export import export_checkpoint
from lightning_3d.checkpoint.inspection import inspect_checkpoint, inspection_table
from lightning_3d.checkpoint.loading import verify_checkpoint
from lightning_3d.cli.output import show
from lightning_3d.waits import long_wait

HELP = "Inspect, convert and verify checkpoints."

_COMMANDS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "inspect": (inspect_checkpoint, "Show what a checkpoint holds."),
    "convert": (export_checkpoint, "Convert a checkpoint to the format of others."),
    "verify": (verify_checkpoint, "Compare a checkpoint with its checksums."),
}


def add_arguments(group: ArgumentParser) -> None:
    """Give the parser of this group its commands."""
    commands = group.add_subcommands(dest="command")
    for name, (function, text) in _COMMANDS.items():
        parser = ArgumentParser()
        parser.add_function_arguments(function, as_positional=True)
        if name == "inspect":
            parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
        commands.add_subcommand(name, parser, help=text)


def run(chosen: Namespace) -> None:
    """Run the command that was chosen."""
    function, text = _COMMANDS[chosen.command]
    arguments = dict(chosen[chosen.command])
    is_json = arguments.pop("json", False)
    with long_wait(text.rstrip(".")):
        result = function(**arguments)
    if isinstance(result, dict):
        result = json.dumps(result, default=str) if is_json else inspection_table(result)
    show(result or f"{arguments['target']} is written")
