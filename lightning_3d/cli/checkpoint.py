"""``lightning-3d checkpoint COMMAND ...``, whose arguments are those of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_3d.checkpoint.export import export_checkpoint
from lightning_3d.checkpoint.loading import verify_checkpoint
from lightning_3d.waits import Waits

HELP = "Convert and verify checkpoints."

_COMMANDS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "export": (export_checkpoint, "Convert a checkpoint to the format of others."),
    "verify": (verify_checkpoint, "Compare a checkpoint with its checksums."),
}


def add_arguments(group: ArgumentParser) -> None:
    """Give the parser of this group its commands."""
    commands = group.add_subcommands(dest="command")
    for name, (function, text) in _COMMANDS.items():
        parser = ArgumentParser()
        parser.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(name, parser, help=text)


def run(chosen: Namespace) -> None:
    """Run the command that was chosen."""
    function, text = _COMMANDS[chosen.command]
    with Waits()(text.rstrip(".")):
        result = function(**chosen[chosen.command])
    print(result or "done")
