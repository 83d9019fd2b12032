"""Tables that code outside of blocks multiplies with as a head does: fused with their cross entropy as heads are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.tensor.vocabulary import chunked_loss
from lightning_3d.tensor.vocabulary.table_heads import Table, TableHead
from tests.test_fused_loss import CLASSES, FLAT, WIDTH

Logits = Callable[[Tensor, nn.Parameter], Tensor]


class Seen:
    """A table, as code finds it while a step runs, and its equal."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (WIDTH, CLASSES) if is_transposed else (CLASSES, WIDTH)
        self.owner = nn.Module()
        self.owner.table = nn.Parameter(torch.rand(shape, generator=generator) - 0.5)
        self.equal = nn.Parameter(self.owner.table.detach().clone())
        self.rows = [torch.randn(2, 4, WIDTH, generator=generator).requires_grad_()]
        self.rows.append(self.rows[0].detach().clone().requires_grad_())
        self.head = TableHead("table", Table(owner=self.owner, name="table"))

    @property
    def table(self) -> nn.Parameter:
        return self.owner.table

    def check(self, logits: Logits, loss: Callable[[Tensor], Tensor]) -> list[int]:
        """Both give the same loss and gradients; returns the sizes of what the graph of the seen one keeps."""
        expected = loss(logits(self.rows[0], self.equal))
        expected.backward()
        sizes: list[int] = []
        with self.head.on():
            made = [logits(self.rows[1], self.table)]
            with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
                result = loss(made.pop())
            self.head.record.end_step()
        result.backward()
        assert type(self.table) is nn.Parameter
        torch.testing.assert_close(result, expected)
        for ours, theirs in ((self.table, self.equal), (self.rows[1], self.rows[0])):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        return sizes


def _with_hook(rows: Tensor, table: nn.Parameter) -> Tensor:
    view = table.T
    view.register_hook(lambda gradient: gradient / 2)
    return rows @ view


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), FLAT.clamp(min=0) % logits.shape[-1])


def _made_without_gradients(rows: Tensor, table: nn.Parameter) -> Tensor:
    with torch.no_grad():
        view = table.T
    return rows @ view


FUSED: list[Logits] = [
    lambda rows, table: F.linear(rows, table),
    lambda rows, table: F.linear(rows, table, torch.linspace(0, 1, CLASSES)),
    lambda rows, table: rows @ table.T,
    lambda rows, table: rows.matmul(table.t()),
    lambda rows, table: torch.mm(rows.flatten(0, 1), table.permute(1, 0)),
    _with_hook,
    lambda rows, table: F.linear(rows, table[:8]),
    lambda rows, table: rows @ table[2:].T,
    lambda rows, table: rows @ table,  # a matrix of columns
]


@pytest.mark.parametrize("number", range(len(FUSED)))
def test_products_with_tables_make_no_logits(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(chunked_loss, "LEAST_LOGITS", 3 * CLASSES)
    seen = Seen(is_transposed=number == len(FUSED) - 1)
    sizes = seen.check(FUSED[number], _loss)
    assert seen.head.text == "table: fused with its cross entropy, without logits"
    assert max(sizes) < 8 * 8  # the least logits


READ: list[tuple[Logits, str | None]] = [
    (lambda rows, table: F.linear(rows, table).sin(), "sin"),
    (lambda rows, table: rows @ table.T + torch.ones(CLASSES), "add"),
    (lambda rows, table: torch.vmap(lambda row: F.linear(row, table))(rows), "a transform of torch.func"),
    (_made_without_gradients, None),
    (lambda rows, table: F.linear(rows, table.detach()), None),
    (lambda rows, table: torch.einsum("btd,vd->btv", rows, table), None),
    (lambda rows, table: F.linear(rows, table) @ table, "matmul"),
]


@pytest.mark.parametrize("changes", ["rows", "table"])
def test_what_changes_before_the_loss_is_refused(changes: str) -> None:
    seen = Seen()
    with seen.head.on():
        logits = F.linear(seen.rows[0], seen.table)
        with torch.no_grad():
            (seen.rows[0] if changes == "rows" else seen.table.data).mul_(2)
        with pytest.raises(StepError, match="changed in place after the head was called"):
            _loss(logits)


def test_losses_in_regions_of_autocast_round_no_gradients_of_heads_outside() -> None:
    def loss(logits: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _loss(logits)

    Seen().check(lambda rows, table: rows @ table.T, loss)
