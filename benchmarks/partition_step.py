"""Step time of the default partition against one by parameters, for a GPT whose head is heavy.

    python -m benchmarks.partition_step

Pipeline 2, AdamW, ZeRO stage 1. The head has the parameters, and takes the time, of five blocks; the embedding has as
many parameters and takes half a block's time. Each rank needs a core of its own: ranks that share one wait for the
work of both stages, however it is divided.
"""

from __future__ import annotations

from functools import partial

from benchmarks.data_parallel_step import train
from benchmarks.models import GPT, random_tokens
from benchmarks.rounds import Contenders, compare
from lightning_3d import ThreeDStrategy

RANKS, BATCH, LENGTH, VOCABULARY, MICROBATCHES, WARM_UP, STEPS, ROUNDS = 2, 8, 128, 16384, 4, 3, 8, 3


def _seconds(partition: str) -> float:
    strategy = ThreeDStrategy(2, zero={"stage": 1}, pipeline={"num_microbatches": MICROBATCHES, "partition": partition})
    return train(strategy, RANKS, GPT(VOCABULARY), random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY), WARM_UP)


CONTENDERS: Contenders = {partition: partial(_seconds, partition) for partition in ("parameters", "auto")}
BARS = (("auto", "parameters", 0.95),)


def main() -> None:
    """Print the table."""
    compare(CONTENDERS, BARS, num_ranks=RANKS, num_rounds=ROUNDS, title="pipeline 2, a heavy head")


if __name__ == "__main__":
    main()
