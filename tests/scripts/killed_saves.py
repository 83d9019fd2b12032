"""Saves a checkpoint over another on two ranks, one of which is killed at each of its calls of the file system in turn.

`python -m tests.scripts.killed_saves LAYOUT KIND VICTIM WAY FOLDER` prints, for each call, what checkpoint was left: 1
is the one before, 2 the new one, 0 none. Of the writes to a file, most of which go to its buffer, every 50th counts.
WAY is "exchanged", "in two steps" where the system can't exchange names, or "first" if there is none before. The
processes are forked from this one, which has imported everything.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint import atomic, full_model_state, model_state, write_full
from lightning_3d.checkpoint.atomic import completed
from lightning_3d.checkpoint.damage import damage
from lightning_3d.checkpoint.folder import MODEL, Folder, read_rest
from lightning_3d.checkpoint.manifest import ChecksummedFile
from tests.checkpoints import save_sharded
from tests.test_checkpoint_state import LAYOUTS, build

_EVENTS = ("open", "os.", "shutil.", "ctypes.call_function")
_SECONDS = 25


def save(model: nn.Module, pp: Any, path: Path, kind: str, content: int) -> None:
    """Save the model with all its values equal."""
    state = model_state(model)
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.fill_(content)
    if kind == "folder":
        save_sharded(path, {MODEL: state, "epoch": content}, pp)
        return
    full = full_model_state(model, pp)
    if dist.get_rank() == 0:
        write_full({MODEL: full, "epoch": content}, path)
    dist.barrier()


def content_of(path: Path) -> int:
    """The content of a checkpoint, 0 if there is none; raises where it is damaged, or a mixture."""
    path = completed(path)
    if not path.exists():
        return 0
    assert not damage(path)
    if path.is_dir():
        folder = Folder.open(path)
        values = folder.read_alone([entry for entry in folder.entries if entry[0] == MODEL])
        epoch = read_rest(path, weights_only=True)["epoch"]
    else:
        checkpoint = torch.load(path, weights_only=True)
        values, epoch = list(checkpoint[MODEL].values()), checkpoint["epoch"]
    found = {float(x) for v in values if isinstance(v, Tensor) and v.is_floating_point() for x in v.unique()}
    assert found == {float(epoch)}, f"epoch {epoch} with values {found}"
    return int(epoch)


def die_at(number: int) -> None:
    """Have this process killed at a call of the file system from now on."""
    calls = 0

    def count(event: str = "", *_: Any) -> None:
        nonlocal calls
        if event.startswith(_EVENTS):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def counting(function: Any, every: int) -> Any:
        turns = itertools.count()

        def counted(*arguments: Any) -> Any:
            if next(turns) % every == 0:
                count("os.")
            return function(*arguments)

        return counted

    sys.addaudithook(count)
    os.fsync = counting(os.fsync, 1)
    ChecksummedFile.write = counting(ChecksummedFile.write, 50)  # type: ignore[method-assign]


def run_rank(rank: int, folder: Path, layout: str, kind: str, victim: int, way: str, number: int) -> None:
    """One rank, in a process of its own."""
    if way == "in two steps":
        atomic._exchanged = lambda first, second: False
    signal.alarm(_SECONDS)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    model, pp = build(LAYOUTS[layout])
    path = folder / "saved" / "last.ckpt"
    if way != "first":
        save(model, pp, path, kind, 1)
    dist.barrier()
    if rank == victim:
        die_at(number)
    save(model, pp, path, kind, 2)


def run(folder: Path, layout: str, kind: str, victim: int, way: str, number: int) -> tuple[bool, int]:
    """Whether the victim was killed, and the content of what is there then."""
    folder.mkdir()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                run_rank(rank, folder, layout, kind, victim, way, number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    was_killed = os.WIFSIGNALED(ends[victim]) and os.WTERMSIG(ends[victim]) == signal.SIGKILL
    assert was_killed or ends == [0, 0], ends
    return was_killed, content_of(folder / "saved" / "last.ckpt")


def main(layout: str, kind: str, victim: str, way: str, folder: str) -> None:
    """Print the contents that were found, by call."""
    found, was_killed = list[int](), True
    while was_killed:
        number = len(found) + 1
        was_killed, content = run(Path(folder) / str(number), layout, kind, int(victim), way, number)
        found.append(content)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
