"""Runs Lightning's own tests plain, with DDP and with this strategy, and shows where this strategy differs from DDP.

    python -m tests.lightning_suite /path/to/pytorch-lightning/tests [tests_pytorch/trainer/flags/...] [--devices 2]

All files run in one process per strategy and device, and in others if these do not come to their end. The files are
those of ``files.txt``, or with several devices of ``files_on_several_ranks.txt``, or the given ones. The exit code is 1
if a test passes with DDP, fails with this strategy and is no known refusal (``refusals.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed import TCPStore

from tests.lightning_suite.refusals import ON_SEVERAL_RANKS, REFUSALS

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
    parser.add_argument("files", nargs="*", help="paths in it; by default those of a list here")
    parser.add_argument("--devices", type=int, default=1, help="ranks of every Trainer that names no strategy")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the processes of tests end, too
    console = Console(soft_wrap=True)
    wanted = arguments.files or _listed("files.txt" if arguments.devices == 1 else "files_on_several_ranks.txt")
    files = [file for file in wanted if (arguments.tests / file).is_file()]
    if files and (missing := [file for file in wanted if file not in files]):
        console.print(f"Not in {arguments.tests}:", *map(escape, missing), sep="\n  ")
    if not files:
        console.print(f"None of the files is in {arguments.tests}; give the folder `tests` of a checkout.")
        return 2
    ways = [way for way in WAYS if way != "plain" or arguments.devices == 1]
    outcomes = {way: _run_all(arguments.tests.resolve(), files, way, arguments.devices) for way in ways}
    return _show(console, outcomes, REFUSALS if arguments.devices == 1 else REFUSALS | ON_SEVERAL_RANKS)


def _run_all(tests: Path, files: Sequence[str], way: str, num_ranks: int) -> Outcomes:
    """Run the files in a process per rank, and in others the tests that were not reached when one of these ended."""
    outcomes: Outcomes = {}
    is_done = False
    while not is_done:
        new, is_done, told = _run(tests, files, way, num_ranks, leave_out=outcomes)
        if not is_done and not new.keys() - outcomes.keys():
            return outcomes | {files[0]: ("failed", told)}
        outcomes = new | outcomes
    return outcomes


def _listed(name: str) -> list[str]:
    return [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]


def _run(
    tests: Path, files: Sequence[str], way: str, num_ranks: int, *, leave_out: Collection[str]
) -> tuple[Outcomes, bool, str]:
    """How tests ended, whether all were reached, and the end of what rank 0 printed."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "leave_out.json").write_text(json.dumps(list(leave_out)))
        command = [
            *(sys.executable, "-m", "pytest", *files, "-q", "--continue-on-collection-errors"),
            *("-p", "tests.lightning_suite.plugin", "-p", "no:cacheprovider"),
            *("-c", str(HERE / "pytest.ini"), "--rootdir", str(tests), f"--timeout={TEST_TIMEOUT}"),
            # A signal does not reach a rank that waits for another.
            f"--timeout-method={'signal' if num_ranks == 1 else 'thread'}",
            *(f"--leave-out={folder}/leave_out.json", f"--num-ranks={num_ranks}", f"--store={store.port}", *WAYS[way]),
        ]
        commands = [
            [*command, f"--basetemp={folder}/{rank}", f"--outcomes={folder}/{rank}.json"] for rank in range(num_ranks)
        ]
        is_done = _run_ranks(commands, cwd=tests, printed=folder / "printed", timeout=FILE_TIMEOUT * len(files))
        written = [folder / f"{rank}.json" for rank in range(num_ranks)]
        outcomes = _joined([json.loads(path.read_text()) if path.exists() else {} for path in written])
        return outcomes, is_done, (folder / "printed").read_text(errors="replace").strip()[-500:]


def _run_ranks(commands: Sequence[Sequence[str]], *, cwd: Path, printed: Path, timeout: float) -> bool:
    """Run a process per rank; leaves none behind, nor their children. Returns whether all came to their end."""
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + timeout
    try:
        for rank, command in enumerate(commands):
            of_rank = {"LOCAL_RANK": str(rank), "NODE_RANK": "0"} if len(commands) > 1 else {}
            with printed.open("wb") if rank == 0 else open(os.devnull, "wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=cwd,
                        env=environment | of_rank,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
        return not any(codes) and None not in codes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _joined(of_ranks: Sequence[Outcomes]) -> Outcomes:
    """A test has passed if it has on all ranks."""
    joined: Outcomes = {}
    for test in dict.fromkeys(test for outcomes in of_ranks for test in outcomes):
        ends = [outcomes.get(test, ("failed", "another rank did not run it")) for outcomes in of_ranks]
        joined[test] = next((end for end in ends if end[0] != "passed"), ends[0])
    return joined


def _counted(outcomes: Outcomes) -> str:
    counts = Counter(outcome for outcome, _ in outcomes.values())
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))


def _reason(test: str, refusals: Mapping[str, str]) -> str | None:
    """Why a test, or all of its parameters, may fail."""
    return refusals.get(test) or refusals.get(test.partition("[")[0])


def _show(console: Console, outcomes: Mapping[str, Outcomes], refusals: Mapping[str, str]) -> int:
    table = Table(title="3d against ddp", show_lines=True)
    for column in ("test", *outcomes, "why"):
        table.add_column(column, overflow="fold")
    num_unknown = 0
    for test, (with_ddp, _) in outcomes["ddp"].items():
        with_3d, message = outcomes["3d"].get(test, ("failed", "it did not run"))
        if with_3d == with_ddp:
            continue
        reason = _reason(test, refusals)
        if with_ddp == "passed" and reason is None:
            num_unknown += 1
        why = reason or ("" if with_ddp == "passed" else "[dim]fails with ddp[/dim]")
        told = why or escape(message.partition("\n\n")[0][:300])
        ends = [of_way.get(test, ("failed", ""))[0] for of_way in outcomes.values()]
        table.add_row(escape(test), *ends, told)
    console.print(table if table.row_count else "3d and ddp: no difference.")
    healed = [test for test, (end, _) in outcomes["3d"].items() if end == "passed" and _reason(test, refusals)]
    if healed:
        console.print("Listed in refusals.py, but they pass:", *map(escape, sorted(healed)), sep="\n  ")
    for way, of_way in outcomes.items():
        console.print(f"{way}: {_counted(of_way)}")
    console.print(f"{num_unknown} differences that refusals.py does not list.")
    return int(num_unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
