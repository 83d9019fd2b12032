"""``lightning-3d GROUP COMMAND ...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from lightning_3d.cli import checkpoint
from lightning_3d.errors import ThreeDError

_GROUPS = {"checkpoint": checkpoint}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with 1 and one line where it fails.

    Args:
        arguments: Those of the command line by default.
    """
    parser = ArgumentParser(prog="lightning-3d", description="Tools for lightning_3d.")
    groups = parser.add_subcommands(dest="group")
    for name, group in _GROUPS.items():
        of_group = ArgumentParser(description=group.HELP)
        groups.add_subcommand(name, of_group, help=group.HELP)  # before its own commands
        group.add_commands(of_group)
    chosen: Namespace = parser.parse_args(arguments)
    try:
        _GROUPS[chosen.group].run(chosen[chosen.group])
    except (ThreeDError, OSError) as error:
        print(f"lightning-3d: {error}", file=sys.stderr)
        raise SystemExit(1) from None
