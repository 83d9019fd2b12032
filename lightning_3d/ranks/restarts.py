"""Processes that torchrun has started again meet apart from those that they follow, and go on where these were.

The agents of torchrun keep one store for all starts, and torch's names in it are the same in each: a process that was
started again would connect to those that have ended. So each start has names of its own. Nothing that agents tell
their processes will do for them: each agent counts restarts for itself, and not those that another node has caused.

Rank 0 names the start. The others ask for the name, each by a question of its own, as questions and answers of earlier
starts are still there; rank 0 goes on answering until each has got the name. An agent ends its processes before it
starts others, so only those of this start get it.

    rank 1      asks/1 = 5ad..    waits for answers/5ad..                            named/7/1
    rank 0                        reads asks/1, answers/5ad.. = 7, until it sees     named/7/1
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from lightning_3d.distributed.agreement import gather_numbers, on_one_rank
from lightning_3d.errors import RankError
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.launchers import RunLauncher
from lightning_3d.waits import long_wait

_POLLS = 0.05  # seconds between looks at the store
_PR_SET_PDEATHSIG = 1  # of Linux


def store_of_start(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """The store in which the processes of this start meet; None where torch's own choice is apart from earlier ones.

    Args:
        world_size: It may differ between starts.
        timeout: The time that the agent may take to answer, and other processes to come.

    Raises:
        RankError: some have not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore("lightning_3d/starts", TCPStore(host, port, is_master=False, timeout=timeout))
    with long_wait("Waiting for the processes of all nodes"):
        return PrefixStore(_name_of_start(store, rank, world_size, timeout.total_seconds()), store)


def resume_after_restart(trainer: Trainer, launcher: RunLauncher) -> AbstractContextManager[None]:
    """Let a fit that torchrun has started again go on from its last checkpoint inside, unless it was given one.

    It would begin anew, and write over its checkpoints. Every rank calls it, once the model's callbacks are known.
    """
    is_given = launcher.ckpt_path is not None or trainer.ckpt_path is not None or trainer.global_step > 0
    if is_given or not dist.is_torchelastic_launched() or not _is_restarted():
        return nullcontext()
    rank_zero_info('torchrun has started this fit again, which was given no ckpt_path: ckpt_path="last" is implied.')
    path = launcher.ckpt_path = on_one_rank(lambda: lightning_helpers.last_checkpoint(trainer))
    return lightning_helpers.restored_from(trainer, path)


def _is_restarted() -> bool:
    """Whether an agent that started a process here has started another that came this far; every rank calls it.

    An agent keeps a folder for as long as it lives, and counts only the restarts that its own processes have caused.
    """
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        first = Path(error_file).parents[2] / f"lightning_3d_first_{os.environ['LOCAL_RANK']}"
        with suppress(FileExistsError), first.open("x") as file:
            file.write(str(os.getpid()))
        is_restarted |= first.read_text() != str(os.getpid())
    return any(gather_numbers(int(is_restarted)))


def end_with_agent() -> None:
    """Have the system kill this process as soon as the agent of torchrun that started it has ended.

    The other nodes go on without it then, from the last checkpoint; it would go on as well, and save its own.
    """
    if dist.is_torchelastic_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _name_of_start(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """Every rank gets the same, and no other process."""
    if rank > 0:
        question = uuid4().hex
        store.set(f"asks/{rank}", question)
        try:
            name = store.get(f"answers/{question}").decode()  # waits for it
        except dist.DistStoreError as error:
            raise _missing("rank 0 has not come", seconds) from error
        store.set(f"named/{name}/{rank}", "")
        return name
    name, others = str(store.add("number", 1)), range(1, world_size)

    def are_all_named() -> bool:
        if store.check(asks := [f"asks/{other}" for other in others]):
            answers = [f"answers/{question.decode()}" for question in store.multi_get(asks)]
            store.multi_set(answers, [name] * len(answers))  # type: ignore[attr-defined]  # not in its stub
        return store.check([f"named/{name}/{other}" for other in others])

    end = time.monotonic() + seconds
    while not are_all_named():
        if time.monotonic() > end:
            raise _missing(f"not all of the {world_size} processes have come", seconds)
        time.sleep(_POLLS)
    return name


def _missing(what: str, seconds: float) -> RankError:
    return RankError(
        f"After {seconds:g} s (`timeout`) {what} to the store that torchrun keeps at"
        f" {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}. Where rank 0 has moved to another node since the"
        " first start, torchrun may send others to the former one: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, so"
        " that each start has a store of its own."
    )
