"""``RANK`` and ``WORLD_SIZE``, by which datasets share out their samples: those of the replicas while data are at work.

Ranks of one replica need the same samples. ``torch.distributed.get_rank`` tells user code the replica everywhere (see
``distributed/replica_world.py``); the environment does where data are set up, dataloaders are made and batches fetched,
so also in the workers of dataloaders. Elsewhere it stays what the launcher has made it, as others go by it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_3d.torch_internals.patches import replaced


@contextmanager
def replica_environment(trainer: Trainer) -> Iterator[None]:
    """Let both variables be those of the replica. The Trainer's own ranks, which may come from them, stay."""
    cluster: Any = trainer.strategy.cluster_environment  # type: ignore[attr-defined]  # of strategies of several ranks
    own = {"global_rank": partial(int, cluster.global_rank()), "world_size": partial(int, cluster.world_size())}
    replica = trainer.distributed_sampler_kwargs
    assert replica is not None
    new = {"RANK": str(replica["rank"]), "WORLD_SIZE": str(replica["num_replicas"])}
    before = {name: os.environ[name] for name in new if name in os.environ}
    with replaced("cluster", cluster, own):
        os.environ.update(new)
        try:
            yield
        finally:
            for name in new.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
