"""Ranks by the thousand, without processes: what each asks of the board does not grow with their number, and whoever
stops or ends is still named in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_3d.errors import RankError
from lightning_3d.ranks import restarts
from lightning_3d.ranks.ending import settle
from lightning_3d.ranks.epochs import Epochs
from lightning_3d.ranks.failure import Failure
from lightning_3d.ranks.processes import this_process
from lightning_3d.ranks.standstill import Standstill
from lightning_3d.ranks.status_store import StatusStore
from lightning_3d.ranks.stops import Stops
from lightning_3d.ranks.watchdog import PERIOD, RankStatus, Watchdog

TIMEOUT = 10.0
IN_A_LOOK = 12
"""Requests of a rank, at most."""


class CountedStore:
    """A store in this process that counts requests."""

    def __init__(self, store: Any, num_requests: Counter[str], prefix: str = "") -> None:
        self.store, self.num_requests, self.prefix = store, num_requests, prefix

    def __getattr__(self, name: str) -> Any:
        self.num_requests[name] += 1
        return getattr(self.store, name)


class Ranks:
    """All ranks of a run, whose clocks a test moves."""

    def __init__(self, number: int) -> None:
        self.num_requests = Counter[str]()
        self.store = StatusStore(CountedStore(HashStore(), self.num_requests))  # type: ignore[arg-type]
        names, self.step = [f"rank {rank}" for rank in range(number)], 0
        self.statuses = [
            RankStatus(store=self.store, rank=rank, names=names, step=lambda: f"train step {self.step}")
            for rank in range(number)
        ]
        self.epochs = [Epochs(status, timeout=0.0) for status in self.statuses]
        self.watchdogs = [self._watchdog(status) for status in self.statuses]
        for watchdog in self.watchdogs:
            watchdog._beat()

    def _watchdog(self, status: RankStatus) -> Watchdog:
        stops = Stops(status, may_wait=lambda: True)
        polls = [self.epochs[status.rank].look, Standstill(status).look, stops.look]
        return Watchdog(status, timeout=TIMEOUT, polls=polls, before_exit=lambda: None)

    def look(self, stopped: Collection[int] = ()) -> None:
        """A beat of all but stopped ranks."""
        for rank, watchdog in enumerate(self.watchdogs):
            if rank not in stopped:
                watchdog._age += PERIOD
                watchdog._look()

    def until_named(self, stopped: Collection[int]) -> tuple[float, Failure]:
        """Seconds until a failure is on the board while these ranks do not beat, and the failure."""
        for number in range(1, 100):
            self.look(stopped)
            if (text := self.store.get("failure")) is not None:
                return number * PERIOD, Failure.from_text(text)
        raise AssertionError(f"{stopped}: nobody was named")


@pytest.mark.parametrize("number", [2, 1024, 8192])
def test_what_a_look_asks_for_does_not_grow(number: int) -> None:
    ranks = Ranks(number)
    ranks.look()
    for epoch in ranks.epochs:  # each waits in a batch for longer than its timeout
        epoch.begin_batch(0, 3, is_last=True)
    for _ in range(3):
        before = ranks.num_requests.total()
        ranks.look()
        assert ranks.num_requests.total() - before <= IN_A_LOOK * number
    assert ranks.store.get("failure") is None


@pytest.mark.parametrize("stopped", [[0], [5], [99], [40, 41, 42], [98, 99, 0, 1]], ids=str)
def test_ranks_that_stop_are_named_within_the_timeout_and_two_beats(stopped: list[int]) -> None:
    ranks = Ranks(100)
    ranks.look()
    ranks.look()
    seconds, failure = ranks.until_named(stopped)
    assert TIMEOUT < seconds <= TIMEOUT + 2 * PERIOD
    assert failure.rank == stopped[0]
    assert "has given no sign of life for 10 s" in failure.error


def test_ranks_that_end_are_named_soon_once_another_has_lost_a_connection() -> None:
    ranks = Ranks(100)
    ranks.look()
    ranks.store.put("lost", "")
    seconds, failure = ranks.until_named([7, 8])
    assert seconds <= 6 * PERIOD
    assert failure.rank == 7
    assert "ended without raising an exception" in failure.error


def test_quiet_ranks_are_alive_while_others_of_their_machine_see_their_processes_run() -> None:
    ranks = Ranks(10)
    ranks.look()
    for rank in (4, 5, 6):
        ranks.store.put(f"process/{rank}", this_process())
    for _ in range(100):
        ranks.look([4, 5, 6])
    assert ranks.store.get("failure") is None
    _, failure = ranks.until_named([4, 5, 6, 8])
    assert failure.rank == 8


def test_ranks_that_have_left_are_watched_no_longer_and_those_behind_them_are() -> None:
    ranks = Ranks(6)
    ranks.look()
    for rank in (2, 3):
        ranks.store.put(f"left/{rank}", "")
    for _ in range(100):
        ranks.look([2, 3])
    assert ranks.store.get("failure") is None
    _, failure = ranks.until_named([2, 3, 4])
    assert failure.rank == 4


def test_a_rank_that_has_fewer_batches_is_named_by_all_that_wait() -> None:
    ranks = Ranks(5)
    for rank, epochs in enumerate(ranks.epochs):
        length = 4 if rank == 3 else 6
        for number in range(1, length + 1):
            epochs.begin_batch(0, number, is_last=number == length)
    for epochs in ranks.epochs:
        epochs.tell()
    assert {failure and failure.rank for failure in (epochs.shorter() for epochs in ranks.epochs)} == {3, None}
    assert ranks.epochs[3].shorter() is None


@pytest.mark.parametrize("number", [4, 64])
def test_ranks_that_raise_alike_find_out_with_a_few_requests(number: int) -> None:
    ranks, alike = Ranks(number), list[bool]()
    before = ranks.num_requests.total()

    def end(rank: int) -> None:
        alike.append(settle(ranks.statuses[rank], ranks.watchdogs[rank], ValueError("all the same")).is_alike)

    _run([Thread(target=end, args=[rank]) for rank in range(number)])
    assert alike == [True] * number
    assert ranks.num_requests.total() - before < 80 * number  # polls are 20 ms apart, and last 1 s at most


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The store of torchrun's agents; gives the requests."""
    store, num_requests = HashStore(), Counter[str]()
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(restarts, "TCPStore", lambda *args, **kwargs: store)

    def prefixed(prefix: str, inner: Any) -> CountedStore:
        return CountedStore(store, num_requests, prefix)

    monkeypatch.setattr(restarts, "PrefixStore", prefixed)
    store.set_timeout(timedelta(seconds=3))
    return num_requests


def _start(ranks: Collection[int], world_size: int) -> dict[int, str | RankError]:
    """Start these ranks of so many; gives the name of the start, or what each raised."""
    found: dict[int, str | RankError] = {}

    def run(rank: int) -> None:
        try:
            store: Any = restarts.store_of_start(rank, world_size, timedelta(seconds=3))
            found[rank] = store.prefix
        except RankError as error:
            found[rank] = error

    _run([Thread(target=run, args=[rank]) for rank in ranks])
    return found


def _run(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_start_has_a_name_of_its_own_whoever_died_in_earlier_ones(agents: Counter[str]) -> None:
    names = [set(map(str, _start(range(3), 3).values()))]
    for died in (1, 0):
        incomplete = _start([rank for rank in range(3) if rank != died], 3)
        assert isinstance(incomplete[2 if died == 0 else 0], RankError)
        assert "torchrun" in str(incomplete[2 if died == 0 else 0])
        names.append(set(map(str, _start(range(3), 3).values())))
    names.append(set(map(str, _start(range(2), 2).values())))
    names.append(set(map(str, _start(range(5), 5).values())))
    assert all(len(of_start) == 1 for of_start in names)
    assert len(set.union(*names)) == len(names)


@pytest.mark.parametrize("number", [8, 256])
def test_a_start_takes_three_requests_per_rank(agents: Counter[str], number: int) -> None:
    assert len(set(map(str, _start(range(number), number).values()))) == 1
    of_first = agents["check"] + agents["multi_get"] + agents["multi_set"] + agents["add"]
    assert agents.total() - of_first == 3 * (number - 1)
    assert of_first < 4 * 60  # polls of rank 0, 50 ms apart
