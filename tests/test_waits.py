"""Long waits are logged while they last, short ones are not."""

from __future__ import annotations

import time

import pytest

from lightning_3d import waits
from lightning_3d.waits import CountedWait, long_wait


def test_what_takes_long_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(waits, "rank_zero_info", told.append)
    monkeypatch.setattr(waits, "_PATIENCE", 0.01)
    counted = CountedWait()
    with counted("Compiling"), long_wait("Tracing"):
        end = time.monotonic() + 60
        while len(told) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    monkeypatch.setattr(waits, "_PATIENCE", 60.0)
    with counted("Compiling again"):
        pass
    assert sorted(told) == ["Compiling ...", "Tracing ..."]
    num, seconds = counted.take()
    assert (num, seconds > 0) == (2, True)
    assert counted.take() == (0, 0.0)
