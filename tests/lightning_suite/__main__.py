"""Runs Lightning's own tests plain, with DDP and with this strategy, and shows where this strategy differs from DDP.

    python -m tests.lightning_suite /path/to/pytorch-lightning/tests [tests_pytorch/trainer/flags/...]

All files run in one process per strategy, and in another one if that does not come to its end. The files are those
of ``files.txt`` that are there, or the given ones. The exit code is 1 if a test passes with DDP, fails with this
strategy and is no known refusal (``refusals.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.lightning_suite.refusals import REFUSALS

HERE = Path(__file__).parent

WAYS: Mapping[str, Sequence[str]] = {
    "plain": (),
    "ddp": ("--give-strategy", "ddp"),
    "3d": ("--give-strategy", "3d"),
}

TEST_TIMEOUT = 60
"""Seconds that one test may take."""

FILE_TIMEOUT = 600
"""Seconds that a file may take with one strategy, on average."""

Outcomes = dict[str, tuple[str, str]]
"""How each test ended: "passed", "failed" or "skipped", and the message."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder `tests` of a checkout of pytorch-lightning")
    parser.add_argument("files", nargs="*", help="paths in it; by default those of files.txt")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    wanted = arguments.files or _listed()
    files = [file for file in wanted if (arguments.tests / file).is_file()]
    if files and (missing := [file for file in wanted if file not in files]):
        console.print(f"Not in {arguments.tests}:", *map(escape, missing), sep="\n  ")
    if not files:
        console.print(f"None of the files is in {arguments.tests}; give the folder `tests` of a checkout.")
        return 2
    outcomes = {way: _run_all(arguments.tests.resolve(), files, way) for way in WAYS}
    return _show(console, outcomes)


def _run_all(tests: Path, files: Sequence[str], way: str) -> Outcomes:
    """Run the files in one process, and those that were not reached when it ended in another."""
    outcomes: Outcomes = {}
    left = list(files)
    while left:
        new = _run(tests, left, way)
        outcomes |= new
        reached = {test.partition("::")[0] for test in new}
        left = [file for file in left if file not in reached]
    return outcomes


def _listed() -> list[str]:
    return [line for line in (HERE / "files.txt").read_text().splitlines() if line and not line.startswith("#")]


def _run(tests: Path, files: Sequence[str], way: str) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "outcomes.json")
        command = [
            *(sys.executable, "-m", "pytest", *files, "-q", "--continue-on-collection-errors"),
            *("-p", "tests.lightning_suite.plugin", "-p", "no:cacheprovider"),
            *("-c", str(HERE / "pytest.ini"), "--rootdir", str(tests)),
            *(f"--timeout={TEST_TIMEOUT}", f"--basetemp={folder}/tmp", f"--outcomes={written}", *WAYS[way]),
        ]
        root = str(HERE.parents[1])
        environment = os.environ | {"PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                cwd=tests,
                env=environment,
                timeout=FILE_TIMEOUT * len(files),
                capture_output=True,
                text=True,
                check=False,
            )
            told = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            told = f"it took more than {FILE_TIMEOUT * len(files)} s"
        read: Outcomes = json.loads(written.read_text()) if written.exists() else {}
        return read or {files[0]: ("failed", told.strip()[-500:])}


def _counted(outcomes: Outcomes) -> str:
    counts = Counter(outcome for outcome, _ in outcomes.values())
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))


def _reason(test: str) -> str | None:
    """Why a test, or all of its parameters, may fail."""
    return REFUSALS.get(test) or REFUSALS.get(test.partition("[")[0])


def _show(console: Console, outcomes: Mapping[str, Outcomes]) -> int:
    table = Table(title="3d against ddp", show_lines=True)
    for column in ("test", "plain", "ddp", "3d", "why"):
        table.add_column(column, overflow="fold")
    num_unknown = 0
    for test, (with_ddp, _) in outcomes["ddp"].items():
        with_3d, message = outcomes["3d"].get(test, ("failed", "it did not run"))
        if with_3d == with_ddp:
            continue
        reason = _reason(test)
        if with_ddp == "passed" and reason is None:
            num_unknown += 1
        why = reason or ("" if with_ddp == "passed" else "[dim]fails with ddp[/dim]")
        with_plain = outcomes["plain"].get(test, ("failed", ""))[0]
        told = why or escape(message.partition("\n\n")[0][:300])
        table.add_row(escape(test), with_plain, with_ddp, with_3d, told)
    console.print(table if table.row_count else "3d and ddp: no difference.")
    healed = [test for test in outcomes["3d"] if _reason(test) and outcomes["3d"][test][0] == "passed"]
    if healed:
        console.print("Listed in refusals.py, but they pass:", *map(escape, sorted(healed)), sep="\n  ")
    for way in WAYS:
        console.print(f"{way}: {_counted(outcomes[way])}")
    console.print(f"{num_unknown} differences that refusals.py does not list.")
    return int(num_unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
