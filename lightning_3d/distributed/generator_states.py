"""States of random generators in types that ``torch.load(weights_only=True)`` reads: tensors and numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_3d.distributed.rng import RandomStates

_MAX_TYPES = 4096
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def is_generator(value: object) -> bool:
    """Whether a value is a random generator that has a state, which ``random.SystemRandom`` has not."""
    kind: object = type(value)  # Any: mypy holds no type for hashable
    return _is_kind(kind)


@lru_cache(_MAX_TYPES)
def _is_kind(kind: type) -> bool:  # each step asks it of all attributes of all modules
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def generators_of(modules: Iterable[nn.Module]) -> list[object]:
    """The generators among the attributes of modules, each once."""
    values = (value for module in modules for value in vars(module).values())
    return list({id(value): value for value in values if is_generator(value)}.values())


def state_of(generator: Any) -> object:
    """The state of a generator of any kind."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state of one of its kind."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


@contextmanager
def states_kept(generators: Iterable[object]) -> Iterator[None]:
    """Put generators back afterwards to where they are now."""
    states = [(generator, state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            set_state(generator, state)


def packed(generator: object) -> dict[str, object]:
    """The state of a generator, for a checkpoint."""
    return {"kind": type(generator).__name__, "state": _tensors_in(state_of(generator))}


def unpack(saved: Mapping[str, object], generator: object) -> bool:
    """Set a generator to what `packed` gave; returns whether it is of the same kind, else it stays."""
    if saved["kind"] != type(generator).__name__:
        return False
    state = saved["state"]
    set_state(generator, state if isinstance(generator, torch.Generator) else _like_python(state))
    return True


def packed_states(states: RandomStates) -> dict[str, object]:
    """Snapshots of the default generators, for a checkpoint."""
    return {
        "cpu": states.cpu,
        "device": states.device,
        "python": _tensors_in(states.python),
        "numpy": _tensors_in(states.numpy),
    }


def unpacked_states(saved: Mapping[str, Any], now: RandomStates) -> RandomStates:
    """The inverse of `packed_states`; the state of an accelerator's generator stays where none was saved.

    Args:
        now: Where the generators are.
    """
    device = saved["device"] if isinstance(saved["device"], Tensor) and now.device is not None else now.device
    return RandomStates(
        cpu=saved["cpu"], device=device, python=_like_python(saved["python"]), numpy=_like_python(saved["numpy"])
    )


def _tensors_in(state: object) -> object:
    """A state with tensors in place of arrays and of long tuples of integers."""
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.name, "bytes": torch.frombuffer(bytearray(state.tobytes()), dtype=torch.uint8)}
    if isinstance(state, dict):
        return {key: _tensors_in(value) for key, value in state.items()}
    if isinstance(state, tuple) and len(state) > 100:  # that of Python's generator
        return torch.tensor(state, dtype=torch.int64)
    if isinstance(state, tuple):
        return tuple(_tensors_in(value) for value in state)
    return state


def _like_python(saved: object) -> Any:
    if isinstance(saved, Tensor):
        return tuple(saved.tolist())
    if isinstance(saved, dict) and saved.keys() == {"dtype", "bytes"}:
        return np.frombuffer(saved["bytes"].numpy().tobytes(), dtype=saved["dtype"]).copy()
    if isinstance(saved, dict):
        return {key: _like_python(value) for key, value in saved.items()}
    if isinstance(saved, tuple):
        return tuple(_like_python(value) for value in saved)
    return saved
