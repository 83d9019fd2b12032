"""Mixtures of experts: weights picked by index, products per expert, routing that reads data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_EXPERTS, WIDTH, HIDDEN = 3, 32, 64


Run = Callable[["Stacked", Tensor, Tensor], Tensor]
"""What picks and multiplies: the module, tokens [n, width], scores [n, experts] -> [n, width]."""


class Stacked(nn.Module):
    """Experts held as stacked weights, [experts, out, in]; how they are picked is up to `run`."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 6)
        self.up_bias = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 8)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return x + self.run(self, flat, self.gate(flat).softmax(-1)).view_as(x)


def _expert(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


def by_number(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """Every expert for every token, picked by an int."""
    return sum(  # type: ignore[return-value]
        _expert(x, m.up[e], m.up_bias[e], m.down[e]) * scores[:, e, None] for e in range(NUM_EXPERTS)
    )


def by_mask(m: Stacked, x: Tensor, scores: Tensor) -> Tensor:
    """Routing that reads data: `nonzero`, `where`, boolean masks, comparisons and numbers."""
    best, y = scores.argmax(-1), torch.zeros_like(x)
    hit = F.one_hot(best, NUM_EXPERTS + 1).sum(0).gt(0).nonzero()
    for row in hit:
        expert = row[0]
        if expert == NUM_EXPERTS:
            continue
        (chosen,) = torch.where(best == expert)
        current = _expert(x[chosen], m.up[expert], m.up_bias[expert.item()], m.down[expert])
        y.index_add_(0, chosen, current * scores[chosen, expert, None])
        y[best == expert] *= 2
    return y


class TopTwo(nn.Module):
    """Two narrow experts per token, whose rows are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(NUM_EXPERTS, 32, WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, chosen = self.gate(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        rows = flat.repeat_interleave(2, 0)[order].unsqueeze(-1)
        gate, up = torch.bmm(self.gate_up[chosen.flatten()[order]], rows).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[chosen.flatten()[order]], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        y = (2 * y * scores.flatten()[order].unsqueeze(-1))[order.argsort()]
        return x + y.view(len(flat), 2, WIDTH).sum(1).to(x.dtype).reshape(x.shape)


class Modules(nn.Module):
    """Experts as modules, each with the tokens that are routed to it; `starved`: the last is never chosen, but run."""

    def __init__(self, starved: bool = False) -> None:
        super().__init__()
        self.starved = starved
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, best = self.gate(flat)[:, : NUM_EXPERTS - self.starved].softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            chosen = (best == e).nonzero(as_tuple=True)[0]
            if chosen.numel() == 0 and not self.starved:
                continue
            y[chosen] = expert(flat[chosen]) * scores[chosen, None]
        return x + y.view_as(x)


class Branching(nn.Module):
    """Its control flow depends on sharded values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        factor = 2.0 if hidden.sum() > 0 else -1.0
        rows = hidden.square().sum(-1)
        scale = rows.masked_select(rows > 1).mean() / 100 + len(rows.gt(1).unique()) + hidden[0, 0].tolist()[0]
        return self.down(hidden * factor) * scale / 10


class Scattered(nn.Module):
    """A router whose choice is written into a tensor made like its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, 4 * HIDDEN), nn.Linear(4 * HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).topk(2)
        weights = torch.zeros_like(self.gate(x)).scatter_(-1, chosen, scores.sigmoid())
        return x + self.down(self.up(x).unflatten(-1, (4, -1)).mul(weights.unsqueeze(-1)).flatten(-2).relu())
