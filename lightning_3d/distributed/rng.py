"""Random numbers that repeat for a seed and a layout.

Glue runs on every stage of a replica and must draw the same numbers there (noise and masks made in ``training_step``);
a block runs on one. So each microbatch gets a glue seed that the stages share, and each call of a block one of its own,
which follows from its place in the step: wherever stages end, as ``partition="time"`` may cut anew when a run resumes,
it draws the same. Both differ between data-parallel ranks and are equal within a tensor-parallel group. Glue's seed is
that of torch, Python and NumPy; a block's is torch's alone, for speed.
The process's own random state is left as it was, so that samplers stay in step on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed.mesh import Mesh

_MASK = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """Saved generator states."""

    cpu: Tensor
    device: Tensor | None
    """State of an accelerator's generator."""
    python: tuple[object, ...]
    numpy: Any


class Generators:
    """The default generators of torch on the CPU and on one device, of Python and of NumPy.

    Args:
        device: The device that steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def states(self) -> RandomStates:
        """Snapshot every generator."""
        return RandomStates(
            cpu=torch.get_rng_state(),
            device=None if self._module is None else self._module.get_rng_state(self._device),
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def are_at(self, states: RandomStates) -> bool:
        """Whether no generator has drawn anything since a snapshot."""
        now = self.states()
        return (
            torch.equal(now.cpu, states.cpu)
            and (now.device is None or states.device is None or torch.equal(now.device, states.device))
            and now.python == states.python
            and now.numpy[2:] == states.numpy[2:]
            and np.array_equal(now.numpy[1], states.numpy[1])
        )

    def restore(self, states: RandomStates) -> None:
        """Set every generator to a snapshot."""
        torch.set_rng_state(states.cpu)
        if self._module is not None:
            self._module.set_rng_state(states.device, self._device)
        random.setstate(states.python)
        np.random.set_state(states.numpy)

    def seed_torch(self, seed: int) -> None:
        """Seed torch's own, without ``torch.manual_seed``, which takes a millisecond for devices of all kinds."""
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)

    @contextmanager
    def torch_seeded(self, seed: int) -> Iterator[None]:
        """Seed torch's generators inside and restore them afterwards; a tenth of the time that all of them take."""
        devices = [] if self._module is None else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            self.seed_torch(seed)
            yield

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore every generator afterwards."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)


def random_states_kept() -> AbstractContextManager[None]:
    """Let all default generators go on afterwards from where they are, also after an exception."""
    return Generators(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).preserved()


def seed_host(seed: int) -> None:
    """Seed the generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def host_position() -> int:
    """A number for how far the generators of Python and NumPy are, to compare in this process."""
    _, keys, *rest = np.random.get_state()
    return hash((random.getstate(), np.asarray(keys).tobytes(), *rest))


def join_replica(mesh: Mesh, device: torch.device) -> None:
    """Continue on every rank of a model replica from the random state of its first; every rank calls it.

    Ranks of one replica shuffle alike from then on, also in runs without a seed.
    """
    generators = Generators(device)
    states = [generators.states()]
    source = mesh.shape.replica_ranks(mesh.dp_rank)[0]
    dist.broadcast_object_list(states, src=source, group=mesh.group("replica"), device=device)
    generators.restore(states[0])


class StepRandomness:
    """Seeds of a run.

    Args:
        seed: Equal on all ranks.
        replica: Index of the replica; 0 on all, where numbers of steps differ between replicas.
        is_alone: Whether it is a single replica that draws what one process would, where it has no pipeline.
        device: Whose generator is set besides the CPU's.
    """

    def __init__(self, *, seed: int, replica: int, is_alone: bool, device: torch.device) -> None:
        self.seed = seed
        """Equal on all ranks; a resumed run goes on with the one of its checkpoint."""
        self._replica, self._is_alone = replica, is_alone
        self._generators = Generators(device)

    @contextmanager
    def replica(self, step: int) -> Iterator[None]:
        """Run a step without a pipeline."""
        if self._is_alone:
            yield
            return
        with self.step():
            self.seed_glue(step, 0)
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep what happens inside from the process's random state."""
        with self._generators.preserved():
            yield

    def seed_glue(self, step: int, microbatch: int, *, host_alike: bool = False) -> None:
        """Start a microbatch: the same numbers on every stage of the replica.

        Args:
            host_alike: Whether Python and NumPy draw the same in all microbatches.
        """
        self._generators.seed_torch(self._mix(step, microbatch, self._replica, 0))
        seed_host(self._mix(step, 0 if host_alike else microbatch, self._replica, 0))

    @contextmanager
    def block(self, step: int, microbatch: int, call: int) -> Iterator[None]:
        """Run the call of this number in the step with torch's numbers of its own, and let glue go on where it was."""
        with self._generators.torch_seeded(self._mix(step, microbatch, self._replica, 1, call)):
            yield

    def _mix(self, *parts: int) -> int:
        mixed = 0
        for part in (self.seed, *parts):  # splitmix64, Steele et al. 2014, https://doi.org/10.1145/2660193.2660195
            mixed = (mixed + part + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
            mixed ^= mixed >> 31
        return mixed & _MASK
