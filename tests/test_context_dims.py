"""``context.dims``: sequences that lie along another dim than 1 of ``(batch, sequence, features)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config.context import ContextConfig
from lightning_3d.context.dims import SequenceDims
from lightning_3d.context.steps import ContextSteps
from lightning_3d.errors import ConfigError, PlanError
from tests.architectures import LENGTH, NUM_CLASSES, WIDTH, Trained, sequences
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


class _Lies(Trained):
    """Blocks get their sequences in some order of dims."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def laid(self, x: Tensor) -> Tensor:
        """As blocks get it, of (batch, sequence, features), and back."""
        return x.transpose(0, 1)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.laid(batch[0])
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(self.laid(x)), batch[1])


class TimeFirst(_Lies):
    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0))


class FeaturesFirst(_Lies):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1))

    def laid(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Rows(_Lies):
    """All tokens of the batch are rows of a matrix."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def laid(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if x.dim() == 3 else x.unflatten(0, (-1, LENGTH))


def _trained(model: type[_Lies], layout: Layout) -> tuple[set[Any], dict[str, Tensor]]:
    """Which dims were cut of how many, and the weights."""
    cut, original = set(), ContextSteps._note_sequence

    def noting(self: ContextSteps, shape: torch.Size, dim: int) -> None:
        cut.add((dim, len(shape)))
        original(self, shape, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextSteps, "_note_sequence", noting)
        trainer, _ = fitted(layout, model, data=sequences, batches=2, epochs=1)
    return cut, whole_state(trainer)


@pytest.mark.parametrize(("model", "dim", "num_dims"), [(TimeFirst, 0, 3), (FeaturesFirst, 2, 3), (Rows, 0, 2)])
@pytest.mark.parametrize("layout", [{}, {"pp": 2, "num_microbatches": 2}], ids=str)
def test_sequences_are_cut_where_the_settings_say(
    workers: WorkerPools, model: type[_Lies], dim: int, num_dims: int, layout: dict[str, int]
) -> None:
    trainer, _ = fitted(None, model, data=sequences, batches=2, epochs=1)
    cut = Layout(cp=2, context={"dims": [["layers.*", dim]]}, **layout)  # type: ignore[arg-type]
    for dims, state in workers(cut.world_size).run(_trained, model, cut):
        assert dims == {(dim, num_dims)}
        assert_same_state([state], whole_state(trainer))


def test_the_last_rule_that_names_a_block_holds() -> None:
    dims = SequenceDims(ContextConfig(dims=(("*", 0), ("b.*", 2))), ["a", "b.0"])
    assert [dims.of(fqn, 3) for fqn in ("a", "b.0")] == [0, 2]
    assert dims.of("b.0", 2) is None
    usual = SequenceDims(ContextConfig(), ["a"])
    assert [usual.of("a", num_dims) for num_dims in (2, 3, 4)] == [None, 1, None]


@pytest.mark.parametrize("rule", [["a"], ["a", "0"], [0, "a"], ["a", -1], ["a", True]])
def test_rules_that_are_no_pattern_and_dim_are_refused(rule: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"context\.dims"):
        ContextConfig(dims=(tuple(rule),))


def test_a_rule_that_names_no_block_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'layer\.\*', which matches no block\. The nearest block is 'layers\.0'"):
        SequenceDims(ContextConfig(dims=(("layer.*", 0),)), ["layers.0", "head"])
