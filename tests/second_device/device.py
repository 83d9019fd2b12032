"""The second device as torch and Lightning know devices: its module in torch, its accelerator, its collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.fsdp._fully_shard import _fsdp_init

NAME = "accel"
"""Of devices ("accel:1"), the accelerator and the backend of its collectives."""

NUM_DEVICES = 4


def is_loaded() -> bool:
    """Whether this process has the device."""
    return hasattr(torch, NAME)


def library() -> ModuleType:
    """What was loaded; counts bytes."""
    loaded: ModuleType = getattr(torch, NAME).library
    return loaded


def load(path: Path) -> None:
    """Let this process have the device, for good.

    Args:
        path: The library.
    """
    loader = ExtensionFileLoader("second_device", str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    torch.utils.rename_privateuse1_backend(NAME)
    device = module_from_spec(spec)
    loader.exec_module(device)
    torch._register_device_module(NAME, _torch_module(device))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, lambda *args: device.backend_of(ProcessGroupGloo(*args)), devices=[NAME])
    dist.Backend.default_device_backend_map[NAME] = NAME
    AcceleratorRegistry.register(NAME, SecondAccelerator)
    _fsdp_init._move_states_to_device = _move_states


def _move_states(parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
    """What FSDP2 does by ``tensor.data = tensor.to(device)``, which torch has only for devices that it knows."""
    for tensor in (*parameters, *buffers):
        if not tensor.is_meta and tensor.device != device:
            torch._C._swap_tensor_impl(tensor, nn.Parameter(tensor.detach().to(device), tensor.requires_grad))


def _torch_module(device: ModuleType) -> ModuleType:
    """``torch.accel``, with what ``torch.cuda`` has of the kind."""
    module: Any = ModuleType(f"torch.{NAME}")
    generators = [device.default_generator(index) for index in range(NUM_DEVICES)]

    def index_of(given: torch.device | str | int | None) -> int:
        if isinstance(given, int):
            return given
        index = None if given is None else torch.device(given).index
        return device.current_device() if index is None else index

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
            return super().__new__(cls, device=torch.device(NAME, index_of(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, *_: Any, **__: Any) -> Event:
            return super().__new__(cls, device=NAME)

    class Within:
        """Makes a device the current one inside."""

        def __init__(self, given: Any) -> None:
            self._index = index_of(given)

        def __enter__(self) -> None:
            self._before = device.current_device()
            device.set_device(self._index)

        def __exit__(self, *_: object) -> None:
            device.set_device(self._before)

    def stream(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    module.library = device
    module.Stream, module.Event, module.stream, module.device = Stream, Event, stream, Within
    module.is_available = module.is_initialized = lambda: True
    module.init = module.empty_cache = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = device.device_count, device.current_device
    module.set_device = lambda given: device.set_device(index_of(given))
    module.current_stream = lambda given=None: Stream(index_of(given))
    module.synchronize = lambda _=None: None
    module.default_generators = generators
    module.get_rng_state = lambda given=None: generators[index_of(given)].get_state()
    module.set_rng_state = lambda state, given=None: generators[index_of(given)].set_state(state)
    module.manual_seed = lambda seed: generators[device.current_device()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.initial_seed = lambda: generators[device.current_device()].initial_seed()
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


class SecondAccelerator(Accelerator):
    """``Trainer(accelerator="accel")``."""

    def setup_device(self, device: torch.device) -> None:
        getattr(torch, NAME).set_device(device)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int | str | list[int]:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int | str | list[int]) -> list[torch.device]:
        indices = devices if isinstance(devices, list) else range(int(devices))
        return [torch.device(NAME, index) for index in indices]

    @staticmethod
    def auto_device_count() -> int:
        return NUM_DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
