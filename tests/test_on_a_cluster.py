"""The page "On a cluster": its program, under its SLURM script and its torchrun command, as they stand there; and the
doctor of its nodes.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_3d.cli import nodes
from tests.scripts import ROOT, Ended, start
from tests.workers import free_port

PAGE = (ROOT / "docs/features/cluster.md").read_text()
PROGRAM, SLURM, TORCHRUN = re.findall(r"^```(?:{.python .notest}|sh)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STEPS = 80

SRUN = """#!/usr/bin/env bash
# As srun: a task on each of SLURM_NNODES nodes; when the job is requeued, SLURM ends all tasks.
while [[ $1 == --* ]]; do shift; done
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NODEID=$rank "$@" &
    tasks+=($!)
    echo $! > "task$rank"
done
for task in "${tasks[@]}"; do wait "$task" || failed=$?; done
exit "${failed:-0}"
"""

SCONTROL = """#!/usr/bin/env bash
# As scontrol: notes its arguments and the checkpoints that are there, and has SLURM end the tasks.
echo "$@" *.ckpt >> scontrol.txt
kill -TERM $(cat task*)
"""

SIGNALLED = """
import os, signal, threading, time
from lightning.pytorch import Callback
class Signalled(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 30 and os.environ.get("SIGNALLED") == os.environ["SLURM_PROCID"]:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.02)
"""
"""What SLURM sends before the time is over, to one rank at a batch of the tests' choice."""


def _run(folder: Path, script: str, **environment: str) -> Ended:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "job.sh": script}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment |= {"PATH": path, "MASTER_PORT": str(free_port())}
    return start(["job.sh"], timeout=200, environment=environment, program="bash", directory=folder)


@pytest.mark.cluster
def test_a_job_of_slurm_saves_before_it_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    program = PROGRAM.replace("callbacks=[saves]", "callbacks=[saves, Signalled()]")
    program = program.replace("samples_per_step=24", 'samples_per_step=24, checkpoint={"async_save": True}')
    (tmp_path / "train.py").write_text(SIGNALLED + program)
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "4242"}
    slurm |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost", "SLURM_JOB_NAME": "train"}
    first = _run(tmp_path, SLURM, **slurm, SIGNALLED="1")
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4242 hpc_ckpt_1.ckpt\n", first.output
    at = torch.load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"]
    assert 30 <= at < STEPS, first.output
    assert "max_epochs=2` reached" not in first.output
    again = _run(tmp_path, SLURM, **slurm, SLURM_RESTART_COUNT="1")
    assert again.returncode == 0, again.output
    assert "hpc_ckpt_1.ckpt" in again.output
    assert "max_epochs=2` reached" in again.output
    assert torch.load(tmp_path / "checkpoints/last.ckpt")["global_step"] == STEPS


@pytest.mark.cluster
def test_torchrun_starts_a_program_again_that_was_killed(tmp_path: Path) -> None:
    dies = """
import os, signal
from lightning.pytorch import Callback
class Dies(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 50 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "train.py").write_text(dies + PROGRAM.replace("callbacks=[saves]", "callbacks=[saves, Dies()]"))
    ended = _run(tmp_path, TORCHRUN, GPUS_PER_NODE="2", MASTER="localhost:0", RUN_ID="a")
    assert ended.returncode == 0, ended.output
    assert f"exitcode: -{signal.SIGKILL.value}" in ended.output
    assert 'ckpt_path="last" is implied' in ended.output
    assert torch.load(tmp_path / "checkpoints/last.ckpt")["global_step"] == STEPS


def _node(folder: str, disk: Path, port: int) -> Ended:
    disk.mkdir()
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=doctor"]
    rendezvous.append(f"--rdzv-conf=is_host={int(disk.name == 'disk0')}")
    doctor = ["--no-python", str(Path(sys.executable).with_name("lightning-3d")), "doctor", "--nodes", folder]
    launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *rendezvous, *doctor]
    return start(launch, timeout=110, directory=disk)


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_doctor_looks_at_all_nodes(tmp_path: Path, is_shared: bool) -> None:
    folder = f"--folder={tmp_path / 'all' if is_shared else 'own'}"
    disks, port = [tmp_path / "disk0", tmp_path / "disk1"], free_port()
    with ThreadPoolExecutor(2) as threads:
        outputs = [ended.output for ended in threads.map(lambda disk: _node(folder, disk, port), disks)]
    found = " ".join("".join(outputs).split())
    assert len(re.findall(rf"│ {re.escape(torch.__version__)} │ [+-]0.\d\d s", found)) == 2
    assert "between nodes │ all-reduce" in found
    assert ("does not see what" in found) is not is_shared
    assert not list(tmp_path.rglob(".doctor-*"))


def test_the_doctor_names_nodes_that_differ() -> None:
    one = nodes.Node(name="a", versions={"torch": "2.13.0"}, clock=100.0, num_files=65536, room=2**40, sees_folder=True)
    other = {
        "b": {"versions": {"torch": "2.14.0"}},
        "c": {"clock": 103.0},
        "d": {"num_files": 1024},
        "e": {"room": 2**30},
    }
    assert not list(nodes.problems_of([one, replace(one, name="b")], Path("ck")))
    (versions, clock, files, room) = nodes.problems_of(
        [one, *(replace(one, name=name, **values) for name, values in other.items())], Path("ck")
    )
    assert versions.startswith("torch is not the same on all nodes (2.13.0 on a, 2.14.0 on b, 2.13.0 on c")
    assert clock.startswith("the clock of c is +3.0 s from the others'")
    assert files.startswith("a process of d may open 1024 files")
    assert room == "e has 1.00 GiB left in ck: a checkpoint may not fit"
