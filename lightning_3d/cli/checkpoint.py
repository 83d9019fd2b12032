"""``lightning-3d checkpoint COMMAND ...``."""

from __future__ import annotations

from collections.abc import Callable

from jsonargparse import ArgumentParser, Namespace

from lightning_3d.checkpoint.export import FORMATS, export_checkpoint
from lightning_3d.checkpoint.loading import verify_checkpoint

HELP = "Convert and verify checkpoints."


def add_arguments(parser: ArgumentParser) -> None:
    """Give the parser of this group its commands."""
    commands = parser.add_subcommands(dest="command")
    commands.add_subcommand("export", _export_parser(), help="Convert a checkpoint to the format of others.")
    commands.add_subcommand("verify", _verify_parser(), help="Compare a checkpoint with its checksums.")


def run(chosen: Namespace) -> None:
    """Run the command that was chosen."""
    _RUNS[chosen.command](chosen[chosen.command])


def _export_parser() -> ArgumentParser:
    export = ArgumentParser(
        description="Convert a checkpoint in this process, with one tensor or file of safetensors in memory at a time."
    )
    export.add_argument("source", type=str, help="a checkpoint folder of any layout, or a plain Lightning file")
    export.add_argument("target", type=str, help="the folder or file to write")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="safetensors: weights for transformers; file: one plain Lightning file; folder, fsdp: a folder for"
        " Lightning's ModelParallelStrategy, FSDPStrategy",
    )
    export.add_argument("--prefix", type=str, default="", help='taken off the names of weights, as in "model."')
    export.add_argument(
        "--leave-out", nargs="+", type=str, default=[], metavar="PATTERN", help="names of weights to leave out"
    )
    export.add_argument("--max-shard-size", type=str, default="5GB", help="of a file of safetensors")
    export.add_argument(
        "--optimizer-states",
        choices=("auto", "require", "omit"),
        default="auto",
        help="in a file: those that there are, fail if there are none, or weights alone",
    )
    export.add_argument("--overwrite", action="store_true", help="replace a checkpoint or an export at the target")
    export.add_argument(
        "--trusted", action="store_true", help="unpickle all that the checkpoint holds, which may run code"
    )
    return export


def _export(chosen: Namespace) -> None:
    export_checkpoint(
        chosen.source,
        chosen.target,
        format=chosen.format,
        prefix=chosen.prefix,
        leave_out=chosen.leave_out,
        max_shard_size=chosen.max_shard_size,
        optimizer_states={"auto": None, "require": True, "omit": False}[chosen.optimizer_states],
        overwrite=chosen.overwrite,
        weights_only=not chosen.trusted,
    )
    print(f"wrote {chosen.target}")


def _verify_parser() -> ArgumentParser:
    verify = ArgumentParser(
        description="Compare a checkpoint with the checksums that were written with it; exits with 1 and the names of"
        " the files that differ."
    )
    verify.add_argument("path", type=str, help="a checkpoint folder, or a plain Lightning file")
    return verify


def _verify(chosen: Namespace) -> None:
    print(f"{chosen.path} is whole: {verify_checkpoint(chosen.path)}")


_RUNS: dict[str, Callable[[Namespace], None]] = {"export": _export, "verify": _verify}
