"""What is printed of an exception that ends a run: the user's frames, a line, or nothing."""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_3d.errors import PlanError
from lightning_3d.ranks.tracebacks import SETTING, print_frames_of_user, print_line, print_nothing


def _raised(error: Exception | None = None) -> Exception:
    """An exception with frames of torch between those of this file, and at its end without ``error``."""

    def step() -> None:
        if error is not None:
            raise error
        torch.nn.Linear(2, 2)(torch.zeros(3))

    try:
        torch.no_grad()(step)()
    except Exception as raised:
        return raised
    raise AssertionError


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print("before", file=sys.stderr))
    monkeypatch.delenv(SETTING, raising=False)


def _printed(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize("error", [None, ValueError("a reason"), PlanError("a reason")], ids=str)
def test_the_users_frames_are_printed(error: Exception | None, capsys: pytest.CaptureFixture[str]) -> None:
    raised = _raised(error)
    print_frames_of_user(raised, "rank 3 failed first:")
    text = _printed(raised, capsys)
    assert text.startswith("rank 3 failed first:\nTraceback (most recent call last):\n")
    assert text.count(__file__) == 2
    assert "  ... 1 frame inside torch\n" in text
    assert ("... 3 frames inside torch" in text) == (error is None)
    assert "site-packages/torch" not in text
    assert f"{type(raised).__name__}: {raised}\n({SETTING}=full" in text


def test_others_are_printed_as_before(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_nothing(_raised())
    assert _printed(ValueError("of the user's, later"), capsys) == "before\n"
    monkeypatch.setenv(SETTING, "full")
    in_full = _raised()
    print_nothing(in_full)
    assert _printed(in_full, capsys) == "before\n"


def test_a_fault_of_this_package_is_printed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError) as caught:
        print_line(None)  # type: ignore[arg-type]  # fails inside
    print_frames_of_user(caught.value)
    assert _printed(caught.value, capsys) == "before\n"
