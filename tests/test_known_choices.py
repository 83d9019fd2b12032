"""Plans across runs: what a search chose is kept, and trusted as far as the block's code bears it out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.tensor import BlockTensorPlan, plan_block
from lightning_3d.tensor.plan.known_choices import FOLDER
from lightning_3d.tensor.plan.record import record_block


class Gated(nn.Module):
    """Its gate and its values come from one projection; `mix` is code that no key tells."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> None:
        super().__init__()
        self.both, self.down, self.mix = nn.Linear(16, 64), nn.Linear(32, 16), [mix]

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.both(x).chunk(2, -1)
        mixed: Tensor = self.down(self.mix[0](values, gates.sigmoid()))
        return mixed


def _plan(block: nn.Module | None = None, **options: Any) -> BlockTensorPlan:
    torch.manual_seed(0)
    return plan_block(block or Gated(), (torch.randn(2, 4, 16, requires_grad=True),), {}, **({"size": 2} | options))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for every block that is searched."""
    seen: list[str] = []

    def counted(block: nn.Module, *args: Any) -> Any:
        seen.append(type(block).__name__)
        return record_block(block, *args)

    monkeypatch.setattr("lightning_3d.tensor.plan.search.record_block", counted)
    return seen


def _entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_block_is_searched_once_for_all_runs(folder: Path, searches: list[str]) -> None:
    first = _plan()
    assert _plan() == first
    assert first.weight("both.weight").parts is not None
    assert searches == ["Gated"]
    assert _entry(folder).suffix == ".json"


@pytest.mark.parametrize(
    "options", [{"size": 4}, {"sequence_parallel": True}, {"by_hand": {"down.weight": "replicate"}}], ids=str
)
def test_what_a_plan_depends_on_is_in_its_key(folder: Path, searches: list[str], options: dict[str, Any]) -> None:
    _plan()
    changed = _plan(**options)
    assert len(searches) == len(list(folder.iterdir())) == 2
    assert _plan(**options) == changed
    assert len(searches) == 2


def test_other_attributes_are_another_key(folder: Path, searches: list[str]) -> None:
    _plan()
    _plan(Gated(torch.maximum))
    assert len(searches) == len(list(folder.iterdir())) == 2


def test_code_that_changed_behind_its_key_is_planned_anew(
    folder: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _plan()

    def forward(self: Gated, x: Tensor) -> Tensor:
        other: Tensor = self.down(self.both(x)[..., ::2].tanh())
        return other

    monkeypatch.setattr(Gated, "forward", forward)
    monkeypatch.setenv(FOLDER, "")
    expected = _plan()
    monkeypatch.setenv(FOLDER, str(folder))
    caplog.set_level(logging.INFO, "lightning_3d")
    assert _plan() == expected
    assert "Gated is no longer sharded as" in caplog.text
    assert len(searches) == 3
    assert _plan() == expected
    assert len(searches) == 3  # what was found then is kept in its place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"replicated": 3, "part_sizes": {}}',
        '{"replicated": {}, "part_sizes": {"both.weight": [1]}}',
    ],
)
def test_an_entry_that_holds_anything_else_is_ignored(folder: Path, searches: list[str], text: str) -> None:
    expected = _plan()
    _entry(folder).write_text(text)
    assert _plan() == expected
    assert len(searches) == 2
    assert _plan() == expected
    assert len(searches) == 2


def test_a_folder_that_can_not_be_used_is_ignored(
    folder: Path, searches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file in its place")
    caplog.set_level(logging.DEBUG, "lightning_3d")
    assert _plan() == _plan()
    assert len(searches) == 2
    assert "The plan of Gated is not kept" in caplog.text


def test_nothing_is_kept_where_it_is_switched_off(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _plan(), _plan()
    assert len(searches) == 2
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv(FOLDER)
    _plan(), _plan()
    assert len(searches) == 3
    assert _entry(tmp_path / "lightning_3d").is_file()
