"""``lightning-3d GROUP COMMAND ...``, and the Trainer's own commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from jsonargparse import ArgumentParser, Namespace

from lightning_3d.cli import checkpoint, doctor, plan, timeline, training
from lightning_3d.errors import ThreeDError

_GROUPS = {"checkpoint": checkpoint, "plan": plan, "timeline": timeline, "doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with 1 and one line where it fails.

    Args:
        arguments: Those of the command line by default.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in training.COMMANDS:
        training.run(arguments)  # which has a parser of its own
        return
    parser = ArgumentParser(
        prog="lightning-3d", description="Trains and converts with lightning_3d.", version=version("lightning-3d")
    )
    groups = parser.add_subcommands(dest="group")
    for name in training.COMMANDS:
        groups.add_subcommand(name, ArgumentParser(), help=training.HELP.format(name=name))
    for name, group in _GROUPS.items():
        of_group = ArgumentParser(description=group.HELP)
        groups.add_subcommand(name, of_group, help=group.HELP)  # before its own commands
        group.add_arguments(of_group)
    chosen: Namespace = parser.parse_args(arguments)
    try:
        _GROUPS[chosen.group].run(chosen[chosen.group])
    except (ThreeDError, OSError) as error:
        print(f"lightning-3d: {error}", file=sys.stderr)
        raise SystemExit(1) from None
