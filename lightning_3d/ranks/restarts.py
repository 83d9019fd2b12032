"""Processes that torchrun has started again meet apart from those that they follow.

The agent of torchrun keeps one store for all starts, and torch's names in it are the same in each: a process that was
started again would connect to those that have ended. So each start has names of its own.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__


def store_of_start(world_size: int, timeout: timedelta) -> Store | None:
    """The store in which the processes of this start meet; None where torch's own choice is apart from earlier ones.

    Args:
        world_size: It may differ between starts.
        timeout: The time that the agent may take to answer.
    """
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    return PrefixStore(f"lightning_3d/starts/{number}/{world_size}", store)
