"""Operators that torch takes on CUDA alone are known: what selective recomputation keeps, what costs, what draws.

The law runs on a GPU by ``make test-gpu``; this shows on any machine that the names are torch's.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from lightning_3d.activations.selective import is_costly
from lightning_3d.memory.flop_counter import FORMULAS
from lightning_3d.torch_internals.dispatch import draws_random_numbers

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
)
COMPUTED_AGAIN = (
    aten._cudnn_rnn.default,  # its results are all that its backward needs
    aten._fused_rms_norm.default,
    aten.cudnn_batch_norm.default,
    aten.native_dropout.default,
)


@pytest.mark.parametrize("operator", ATTENTION, ids=str)
def test_attention_is_kept_and_counted_and_draws_for_dropout(operator: torch._ops.OpOverload) -> None:
    assert is_costly(operator)
    assert operator.overloadpacket in {*flop_registry, *FORMULAS}
    assert draws_random_numbers(operator, (), {"dropout_p": 0.1})
    assert not draws_random_numbers(operator, (), {"dropout_p": 0.0})


def test_other_operators_are_computed_again_and_draw_where_they_drop() -> None:
    assert not any(map(is_costly, COMPUTED_AGAIN))
    rnn, *norms, dropout = COMPUTED_AGAIN
    assert draws_random_numbers(dropout, (), {})
    assert draws_random_numbers(rnn, (), {"dropout": 0.1})
    assert not draws_random_numbers(rnn, (), {"dropout": 0.0})
    assert not any(draws_random_numbers(norm, (), {}) for norm in norms)
