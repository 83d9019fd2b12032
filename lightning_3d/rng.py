"""Random numbers that repeat for a seed and a layout.

Glue runs on every stage of a replica and must draw the same numbers there (noise and masks made in ``training_step``);
blocks must draw others on every stage. So each microbatch gets a glue seed that the stages share, and each stage keeps
a stream of its own for its blocks. Both differ between data-parallel ranks and are equal within a tensor-parallel
group.
The process's own random state is left as it was, so that samplers stay in step on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 63) - 1


class StepRandomness:
    """Seeds of a run.

    Args:
        seed: Equal on all ranks.
        num_replicas: Size of the dp axis.
        dp_rank: Index of the replica.
        stage: Pipeline stage of this rank.
        device: Whose generator is set besides the CPU's.
    """

    def __init__(self, *, seed: int, num_replicas: int, dp_rank: int, stage: int, device: torch.device) -> None:
        self._seed, self._num_replicas, self._dp_rank, self._stage = seed, num_replicas, dp_rank, stage
        self._devices = [device] if device.type != "cpu" else []
        self._device_type = device.type

    @contextmanager
    def replica(self, step: int) -> Iterator[None]:
        """Run a step without a pipeline. A single replica draws what one process would."""
        if self._num_replicas == 1:
            yield
            return
        with self.step():
            self.seed_glue(step, 0)
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep what happens inside from the process's random state."""
        with torch.random.fork_rng(self._devices, device_type=self._fork_type):
            yield

    @property
    def _fork_type(self) -> str:
        return self._device_type if self._devices else "cuda"

    def seed_glue(self, step: int, microbatch: int) -> None:
        """Start a microbatch: the same numbers on every stage of the replica."""
        self._seed_generators(self._mix(step, microbatch, self._dp_rank, 0))

    @contextmanager
    def block(self, step: int, microbatch: int, call: int) -> Iterator[None]:
        """Run a call of this stage with numbers of its own, and let glue go on where it was."""
        with torch.random.fork_rng(self._devices, device_type=self._fork_type):
            self._seed_generators(self._mix(step, microbatch, self._dp_rank, 1 + self._stage, call))
            yield

    def _seed_generators(self, seed: int) -> None:
        """Seed the CPU's generator and the device's; ``torch.manual_seed`` costs a millisecond for all other kinds."""
        torch.default_generator.manual_seed(seed)
        if self._devices:
            torch.get_device_module(self._device_type).manual_seed(seed)

    def _mix(self, *parts: int) -> int:
        mixed = self._seed
        for part in parts:  # splitmix64, Steele et al. 2014, https://doi.org/10.1145/2660193.2660195
            mixed = (mixed + part + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
            mixed ^= mixed >> 31
        return mixed & _MASK
