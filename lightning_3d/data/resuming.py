"""Going on as if a fit had not stopped: its random states, and the place in its data.

    epoch:    iterators are made       first batch      batch k            checkpoint
    drawn:    order of the samples     order            by the steps
    noted:    `iterator`               `first`                             `now`

A resumed fit makes the iterators from `iterator`, reads k batches again from `first`, and goes on from `now`. So the
rest of an epoch has the samples, and numbers of dataset and workers, that it would have had, whatever they depend on.
Dataloaders with `state_dict` and `load_state_dict` are left to Lightning, which restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_3d.data.held_generators import generators_of_loaders, generators_of_modules
from lightning_3d.data.sample_order import order_of
from lightning_3d.data.step_sampler import StepSampler
from lightning_3d.distributed.generator_states import packed, packed_states, unpack, unpacked_states
from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import BatchError
from lightning_3d.torch_internals import data_loops


class Resuming:
    """Notes where a fit is, and takes another there.

    Args:
        device: Whose generator is noted besides the CPU's.
        reads_again: Whether the batches of an epoch that were trained on are read again, to go on after them.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, device: torch.device, *, reads_again: bool) -> None:
        self._trainer, self._module, self._reads_again = trainer, module, reads_again
        self._generators = Generators(device)
        self._of_loaders: list[object] = []
        self._iterator: dict[str, object] | None = None
        self._loaders_then: list[dict[str, object]] = []
        self._first: dict[str, object] | None = None
        self._saved: Mapping[str, Any] | None = None  # until an epoch begins

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Note where epochs begin, while the Trainer runs."""
        with ExitStack() as stack:
            stack.enter_context(data_loops.called_before_iteration(self._trainer, self._note_iterator))
            stack.enter_context(data_loops.epochs_begun(self._trainer, self._begin))
            if self._reads_again:
                stack.enter_context(data_loops.epochs_kept(self._trainer))
            yield

    def state(self) -> dict[str, object]:
        """Where this rank is, for a checkpoint."""
        epoch = None
        if self._iterator is not None and self._first is not None:
            epoch = {"iterator": self._iterator, "loaders": self._loaders_then, "first": self._first}
        return {
            "now": packed_states(self._generators.states()),
            "modules": {name: packed(held) for name, held in generators_of_modules(self._module).items()},
            "loaders": [packed(held) for held in self._of_loaders],
            "epoch": epoch,
            "replicas": self._num_replicas,
            "orders": self._orders(),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from a state, when all that a resumed fit sets up is there: before its first epoch begins."""
        self._saved = saved
        self._restore(saved["now"])
        modules = generators_of_modules(self._module)
        for name, state in saved["modules"].items():
            if name in modules:
                unpack(state, modules[name])
        self._restore_loaders(saved["loaders"])

    def _begin(self, fetcher: data_loops.Fetcher, go_on: Callable[[], None]) -> None:
        """Where an epoch begins, or what is left of it."""
        saved, self._saved = self._saved, None
        loaders = data_loops.training_loaders(self._trainer)
        if data_loops.iterates_anew(self._trainer):
            self._note_iterator()
        elif self._trainer.fit_loop.is_resuming and not any(map(data_loops.keeps_place, loaders)):
            num_read = data_loops.num_read(self._trainer) if self._reads_again else 0
            if num_read and saved is not None:
                self._check_order(num_read, saved)
            if num_read and not self._is_left_out(num_read, saved):
                self._read_again(fetcher, num_read, None if saved is None else saved["epoch"])
                go_on()
                return
            self._iterate(fetcher)
        go_on()
        self._first = packed_states(self._generators.states())

    @property
    def _num_replicas(self) -> int:
        replicas = self._trainer.distributed_sampler_kwargs
        return 1 if replicas is None else int(replicas["num_replicas"])

    def _orders(self) -> list[str | None]:
        return [order_of(loader, self._num_replicas) for loader in data_loops.training_loaders(self._trainer)]

    def _check_order(self, num: int, saved: Mapping[str, Any]) -> None:
        """Raise where another number of replicas would not go on with the samples that are left of an epoch."""
        then, now = saved.get("replicas", self._num_replicas), self._num_replicas  # older checkpoints do not have it
        if then == now:
            return
        before, after = saved["orders"], self._orders()
        if None in after or before != after:
            told = [", ".join(order or "in an order of its own" for order in orders) for orders in (before, after)]
            raise BatchError(
                f"The checkpoint was saved after {num} batches of an epoch by {then} replicas ({told[0]}), but this run"
                f" has {now} ({told[1]}): the rest of the epoch would have samples twice or never. Go on with {then}"
                " replicas, or from the end of an epoch, or set batch.resume='restart' to begin the epoch anew."
            )

    def _is_left_out(self, num: int, saved: Mapping[str, Any] | None) -> bool:
        """Whether the sampler leaves out so many batches of the epoch, so that none is read again: on another number
        of replicas than they were read on, whose random states are not to be had.
        """
        loaders = data_loops.training_loaders(self._trainer)
        samplers = [loader.sampler for loader in loaders if isinstance(getattr(loader, "sampler", None), StepSampler)]
        if (
            saved is None
            or saved.get("replicas", self._num_replicas) == self._num_replicas
            or len(samplers) < len(loaders)
        ):
            return False
        for loader, sampler in zip(loaders, samplers, strict=True):
            sampler.num_left_out = num * loader.batch_size
        return True

    def _read_again(self, fetcher: data_loops.Fetcher, num: int, epoch: Mapping[str, Any] | None) -> None:
        rank_zero_info(
            f"The run goes on in the middle of an epoch: its first {num} batches are read again, and left. With"
            " batch.resume='restart' they are trained on in place of the rest."
        )
        with self._generators.preserved():
            if epoch is not None:
                self._restore(epoch["iterator"])
                self._restore_loaders(epoch["loaders"])
            self._iterate(fetcher)
            if epoch is not None:
                self._restore(epoch["first"])
            self._first = packed_states(self._generators.states())
            try:
                data_loops.read_again(fetcher, num)
            except StopIteration:
                raise BatchError(
                    f"The run goes on after {num} batches of the epoch, but the dataloaders have fewer now. Give them"
                    " the data that the checkpoint was trained on, or set batch.resume='restart' to begin them anew."
                ) from None

    def _iterate(self, fetcher: data_loops.Fetcher) -> None:
        self._note_iterator()
        if not any(isinstance(loader, Iterator) for loader in data_loops.training_loaders(self._trainer)):  # gives once
            iter(fetcher)

    def _note_iterator(self) -> None:
        self._of_loaders = generators_of_loaders(data_loops.training_loaders(self._trainer))
        self._loaders_then = [packed(held) for held in self._of_loaders]
        self._iterator = packed_states(self._generators.states())

    def _restore(self, states: Mapping[str, Any]) -> None:
        self._generators.restore(unpacked_states(states, self._generators.states()))

    def _restore_loaders(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self._of_loaders) or not all(map(unpack, states, self._of_loaders)):
            rank_zero_warn(
                f"The dataloaders hold {len(self._of_loaders)} generators of random numbers, which are not the"
                f" {len(states)} that the checkpoint has states of: the order of their samples is another one."
            )
