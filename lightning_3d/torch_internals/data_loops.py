"""Where Lightning's fit loop is in its data: when it begins to iterate, and how many batches it has read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader

from lightning_3d.torch_internals.patches import replaced

Fetcher = _DataFetcher
"""Fetches batches from the dataloaders of a loop."""


@contextmanager
def called_before_iteration(trainer: Trainer, call: Callable[[], None]) -> Iterator[None]:
    """Let this be called when a fit has made its dataloaders, before it begins to iterate over them."""
    select = fit_loop._select_data_fetcher  # type: ignore[attr-defined]  # not exported

    def select_data_fetcher(of: Trainer, stage: Any) -> Fetcher:
        if of is trainer:
            call()
        return select(of, stage)

    with replaced("first iteration", fit_loop, {"_select_data_fetcher": select_data_fetcher}):
        yield


@contextmanager
def epochs_begun(trainer: Trainer, begin: Callable[[Fetcher, Callable[[], None]], None]) -> Iterator[None]:
    """Let ``begin(fetcher, go_on)`` be called before the first batch of an epoch, or of what is left of it.

    Args:
        begin: It calls ``go_on``, after which Lightning fetches the first batch. A warning of Lightning's that it can't
            go on in the middle of an epoch is left out.
    """
    loop = trainer.fit_loop.epoch_loop
    on_run_start, reset = loop.on_run_start, loop.reset

    def quiet() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            reset()

    def start(fetcher: Fetcher) -> None:
        begin(fetcher, lambda: on_run_start(fetcher))

    with replaced("epochs", loop, {"on_run_start": start, "reset": quiet}):
        yield


@contextmanager
def epochs_kept(trainer: Trainer) -> Iterator[None]:
    """Let a resumed fit go on with the rest of an epoch that was cut, and after a complete one with the next.

    Lightning counts an epoch that ``max_steps`` or ``should_stop`` has cut as complete, and trains as many batches of
    the next as were left. After a complete one, a fit with ``max_steps`` trains one batch as an epoch of its own.
    """
    loop = trainer.fit_loop
    run = loop.run

    def run_on() -> None:
        epochs: Any = loop.epoch_progress
        batches = loop.epoch_loop.batch_progress
        if loop.is_resuming and batches.current.ready and epochs.current.processed == epochs.current.ready:
            if not batches.is_last_batch:
                for counts in (epochs.total, epochs.current):
                    counts.processed = counts.completed = counts.ready - 1
            _Loop.restarting.fset(loop, not batches.is_last_batch)  # type: ignore[attr-defined]
        run()

    with replaced("rest of an epoch", loop, {"run": run_on}):
        yield


@contextmanager
def around_fetches(trainer: Trainer, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let each fetch of a training batch, which has begun before, run inside of this."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    original = type(fetcher).__next__

    def fetch(of: Fetcher) -> object:
        with around() if of is trainer.fit_loop._data_fetcher else nullcontext():
            return original(of)

    with replaced("measured fetches", type(fetcher), {"__next__": fetch}):
        yield


@contextmanager
def around_data(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let the hooks that set data up and make dataloaders, and all iteration over these, run inside of this."""
    calls = ((call, call._call_setup_hook), (_DataLoaderSource, _DataLoaderSource.dataloader), *_ITERATES)

    def within(original: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            with around():
                return original(*args)

        return run

    with ExitStack() as stack:
        for owner, original in calls:
            stack.enter_context(replaced("data", owner, {original.__name__: within(original)}))
        yield


_ITERATES = ((CombinedLoader, CombinedLoader.__iter__), (CombinedLoader, CombinedLoader.__next__))
"""By which Lightning's loops begin to iterate, which starts workers, and fetch a batch."""


@contextmanager
def called_before_stops(trainer: Trainer, call: Callable[[], None]) -> Iterator[None]:
    """Let this be called where a fit is about to heed ``should_stop``: after a batch, and after its validation."""
    loop = trainer.fit_loop.epoch_loop
    end = loop.on_advance_end

    def on_advance_end(fetcher: Fetcher) -> None:
        if trainer.should_stop:  # before a validation, which it brings about
            call()
        end(fetcher)
        if trainer.should_stop:
            call()

    with replaced("stops", loop, {"on_advance_end": on_advance_end}):
        yield


def logging_step(trainer: Trainer) -> int:
    """The step that Lightning tells loggers with what a module logs."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def iterates_anew(trainer: Trainer) -> bool:
    """Whether Lightning begins to iterate where an epoch begins."""
    loop = trainer.fit_loop
    return trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting


def num_read(trainer: Trainer) -> int:
    """Batches of the epoch that were read before; those that are counted of an epoch that was complete are none."""
    loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    return batches.current.ready if loop.restarted_mid_epoch and not batches.is_last_batch else 0


def recount_batches(trainer: Trainer, batches_per_step: int) -> None:
    """Let a fit that is about to go on count batches as if each step had taken so many as it takes now.

    Args:
        batches_per_step: Those that it took when they were counted; steps that were not finished count for nothing.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.current, progress.total):
        more = counts.ready // batches_per_step * trainer.accumulate_grad_batches - counts.ready
        for name, number in vars(counts).items():
            setattr(counts, name, number + more)


def training_loaders(trainer: Trainer) -> Sequence[Any]:
    """The dataloaders of a fit."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def keeps_place(loader: object) -> bool:
    """Whether Lightning saves and loads the state of this dataloader."""
    return isinstance(loader, _Stateful)


def read_again(fetcher: Fetcher, num: int) -> None:
    """Read batches that were trained on, and leave them; before ``on_run_start``, which counts them as fetched.

    Raises:
        StopIteration: there are not so many.
    """
    source: Iterator[object] | None = fetcher.iterator if isinstance(fetcher, _DataLoaderIterDataFetcher) else fetcher
    assert source is not None
    before = fetcher.fetched
    for _ in range(num):
        next(source)
    fetcher.fetched = before
