"""Keeping and putting back the state of modules: everything that changed, and nothing else."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.model.snapshot import Snapshot, preserved


class Stateful(nn.Module):
    """Has an attribute of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("mask", None)
        self.number, self.text, self.nothing = 1, "a", None
        self.running = torch.ones(2)
        self.entries: list[Any] = [1, [2], {"three": 3}]
        self.nested: dict[str, Any] = {"list": [1], "tensor": torch.zeros(2), "deque": deque([1, 2], maxlen=2)}
        self.default: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.ordered = OrderedDict(a=1, b=2)
        self.members = {1, 2}
        self.pair = ([1], "x")
        self.itself: list[Any] = [1]
        self.itself.append(self.itself)


def _set(module: Any) -> None:
    module.number, module.text, module.new = 2, "b", 3
    del module.nothing
    module.linear.bias = None
    module.eval()
    module.mask = torch.ones(2)
    module.linear.register_forward_hook(lambda *args: None)


def _fill(module: Any) -> None:
    module.entries[1].append(5)
    module.entries[2]["four"] = 4
    module.entries.append(6)
    module.nested["list"].clear()
    module.nested["deque"].append(3)
    module.default["b"].append(1)
    module.default["a"].append(2)
    module.ordered.move_to_end("a")
    module.members.add(3)
    module.pair[0].append(2)
    module.itself.insert(0, 0)


def _change_data(module: Any) -> None:
    module.average += 1
    module.running.mul_(2)
    module.nested["tensor"].fill_(7)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(key, _described(entry)) for key, entry in value.items()]
    if isinstance(value, (list, deque, tuple)):
        return type(value).__name__, [_described(entry) if entry is not value else "itself" for entry in value]
    return value


def _state(module: nn.Module) -> Any:
    own = {fqn: {name: _described(value) for name, value in vars(m).items()} for fqn, m in module.named_modules()}
    return {fqn: dict(sorted(attributes.items())) for fqn, attributes in own.items()}


@pytest.mark.parametrize("change", [_set, _fill, _change_data])
def test_what_changed_is_put_back_in_the_same_objects(change: Callable[[Any], None]) -> None:
    module = Stateful()
    before, objects = _state(module), {name: id(value) for name, value in vars(module).items()}
    with pytest.raises(ValueError, match="the step failed"), preserved(module):  # noqa: PT012
        change(module)
        assert _state(module) != before
        raise ValueError("the step failed")
    assert _state(module) == before
    assert {name: id(value) for name, value in vars(module).items()} == objects


class World:
    """An object of this package, with all that a module may have, and a library's inside."""

    def __init__(self) -> None:
        self.age, self.replays, self.self = 0, deque([[1], [2]], maxlen=2), self
        self.foreign = torch.Generator()
        self.table = torch.zeros(2)


class Plays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.world, self.data = World(), Rows()


class Rows(torch.utils.data.Dataset[int]):
    """An object that derives from torch's class."""

    num_read = 0


def test_attributes_of_own_objects_are_put_back() -> None:
    module = Plays()
    world, first = module.world, module.world.replays[0]
    with preserved(module):
        world.age += 1
        first.append(3)
        world.replays.append([4])
        world.late = world.foreign = None  # type: ignore[attr-defined, assignment]
        world.table = torch.ones(2)
        module.data.num_read += 1
    assert module.world is world
    assert world.age == 0
    assert world.self is world
    assert world.replays[0] is first
    assert [*map(list, world.replays)] == [[1], [2]]
    assert not hasattr(world, "late")
    assert isinstance(world.foreign, torch.Generator)
    assert world.table.tolist() == [0, 0]
    assert module.data.num_read == 1
    snapshot = Snapshot([module])
    module.world.age += 1
    snapshot.restore()
    assert module.world.age == 1, "between microbatches they are not put back"
