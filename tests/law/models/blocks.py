"""Blocks that do more than compute, one of a kind after the other in each model; parameters' names tell them apart."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import architectures as a
from tests.law.models.row import Model
from tests.models import Block, TinyGPT, features
from tests.parity import Job

WIDTH = 16


class Checkpointing(nn.Module):
    """Checkpoints a residual branch."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x + self.branch(x)  # type: ignore[no-any-return]
        branch: Tensor = checkpoint(self.branch, x, use_reentrant=self.use_reentrant)
        return x + branch


class Hooking(nn.Module):
    """Has a hook on its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


@dataclass(frozen=True)
class Signal:
    """Rows and their spectrum."""

    values: Tensor
    spectrum: Tensor


class Filter(nn.Module):
    """Gives a frozen dataclass, and has buffers of rare dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turn", torch.polar(torch.ones(9), torch.arange(9.0)))
        self.register_buffer("codes", torch.arange(4).to(torch.uint16))
        self.register_buffer("bank", torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Signal:
        spectrum = torch.fft.rfft(x.float())
        turned = torch.fft.irfft(spectrum * self.turn, n=WIDTH).to(x.dtype)
        rows = 0.5 * torch.cat([self.bank.to(x.dtype), x + self.linear(turned)])  # type: ignore[operator]
        return Signal(rows, torch.fft.rfft(rows.float()))


class WithMask(nn.Module):
    """Gives what it computed of its output, too, a view that requires no grad, and what is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        mask = torch.linspace(0, 1, WIDTH, device=y.device).repeat(len(y)).view_as(y)
        bias = y.new_zeros(WIDTH).masked_fill(mask[0] > 2, float("-inf"))
        return {"y": y, "rest": (self.norm(y), mask, None), "bias": bias}


class Noting(nn.Module):
    """Takes keywords, keeps its output and a square, and adds to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), 0.5

    def forward(self, x: Tensor, *, scale: float, notes: list[Tensor]) -> Tensor:
        output: Tensor = self.linear(x) * self.gain * scale
        self.kept = {"square": output.square()}
        notes.append(output.mean(-1, keepdim=True))
        return output


class OddBlocks(a.Trained):
    """Each part of the step uses a block that is odd in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(8, WIDTH).requires_grad_(False)
        self.embed = nn.Linear(8, WIDTH)
        self.hooking = Hooking()
        self.checkpoints = nn.ModuleList([Checkpointing(False), Checkpointing(True)])
        self.filters = nn.ModuleList([Filter(), Filter()])
        self.aside = nn.Linear(8, WIDTH)
        self.masked, self.noting, self.stopped = WithMask(), Noting(), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        (device,) = {parameter.device for parameter in self.parameters()}
        inputs, targets = (tensor.to(next(self.parameters()).device) for tensor in batch)
        x = self.embed(inputs) + torch.tanh(self.fixed(inputs))
        x = 0.5 * x + self.hooking(torch.tanh(x))
        for block in self.checkpoints:
            x = block(x)
        for block in self.filters:
            signal = block(x)
            x = x + signal.values + 0.1 * signal.spectrum.abs().mean(-1, keepdim=True).to(x.dtype)
        x = x * torch.tanh(self.aside(inputs))  # of the batch alone
        made = self.masked(x)
        normed, mask, _ = made["rest"]
        x = made["y"] + normed * mask + made["bias"]
        notes: list[Tensor] = []
        x = x + self.noting(x, scale=2.0, notes=notes) + 0.1 * notes[0]
        x = x + self.stopped(x.detach())
        self.output_class = namedtuple("Output", ["prediction"])  # a class of each step
        output = self.output_class(self.head(x) * torch.linspace(1, 2, 4, device=device))
        return F.mse_loss(output.prediction, targets) + 0.01 * self.noting.kept["square"].mean()


class TellingBlock(Block):
    """Also returns its attention weights, (B, H, T, T), as some models of transformers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        batch, length, width = x.shape
        attention, normed = self.attention, self.norm1(x)
        split = (batch, length, attention.num_heads, width // attention.num_heads)
        q, k, v = (p(normed).view(split).transpose(1, 2) for p in (attention.q, attention.k, attention.v))
        scores = q @ k.transpose(-2, -1) / split[-1] ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + attention.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x)), weights


class KeepingBlock(Block):
    """Keeps the activations of its MLP."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        self.hidden = self.mlp[1](self.mlp[0](self.norm2(x)))
        output: Tensor = x + self.mlp[2](self.hidden)
        return output


class Forces(Block):
    """Takes gradients in its forward."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.energy = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(at).sin().sum(), at)
        return super().forward(x) - force.detach()


class CheckpointingParts(Block):
    """Checkpoints its attention and its MLP, with what tensor parallel may have sharded as arguments."""

    def __init__(self, width: int, num_heads: int, *, use_reentrant: bool) -> None:
        super().__init__(width, num_heads)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[..., Tensor] = partial(checkpoint, use_reentrant=self.use_reentrant)
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = x + run(lambda x: self.attention(self.norm1(x)), x)
        return x + run(lambda x: self.mlp(self.norm2(x)), x)


class OddGPT(TinyGPT):
    """Blocks with attention whose outputs are not read, read later, kept, or recomputed by their authors."""

    def __init__(self) -> None:
        super().__init__(num_layers=0)
        self.unread, self.read_later = TellingBlock(32, 4), TellingBlock(32, 4)
        self.keeping, self.forces = KeepingBlock(32, 4), Forces(32, 4)
        self.checkpoints = nn.ModuleList(CheckpointingParts(32, 4, use_reentrant=on) for on in (False, True))

    def compute_loss(self, batch: tuple[Tensor, Tensor], reads: bool = False) -> Tensor:
        inputs, targets = batch
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        x, _ = self.unread(x)
        x, weights = self.read_later(x)
        for block in (self.keeping, self.forces, *self.checkpoints):
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        loss = loss + self.keeping.hidden.abs().mean()
        return loss + weights.square().mean() if reads else loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.compute_loss(batch, reads=batch_idx > 0)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.compute_loss(batch), sync_dist=True)


class DistanceBias(nn.Module):
    """Lowers attention by distance, from a table that its first forward registers, as ALiBi's implementations do."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, 1 + num_heads).view(-1, 1, 1), persistent=False)
        self.register_buffer("table", None, persistent=False)

    def forward(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[-1] < length:
            at = torch.arange(length, device=self.slopes.device)
            table = -(at[:, None] - at).abs() * self.slopes
            self.register_buffer("table", table, persistent=False)
        kept: Tensor = self.table[:, :length, :length]  # type: ignore[index]
        return kept


class Biased(nn.Module):
    """Attention with the bias of a module that it is given, or has a share of."""

    def __init__(self, width: int, num_heads: int, bias: DistanceBias | None) -> None:
        super().__init__()
        self.num_heads, self.bias = num_heads, bias
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, bias: DistanceBias | None = None) -> Tensor:
        bias, y = bias or self.bias, self.norm(x)
        assert bias is not None
        heads = (part(y).unflatten(-1, (-1, x.shape[-1] // self.num_heads)).transpose(1, 2) for part in self._parts)
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=bias(x.shape[1]).to(x.dtype))
        added: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return x + added

    @property
    def _parts(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class BiasedGPT(TinyGPT):
    """Layers share one bias, which lies beside them or in all of them."""

    def __init__(self, is_beside: bool) -> None:
        super().__init__(num_layers=0)
        shared = DistanceBias(4)
        self.bias = shared if is_beside else None
        self.blocks = nn.ModuleList(Biased(32, 4, None if is_beside else shared) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x) if self.bias is None else block(x, self.bias)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def on_train_epoch_end(self) -> None:
        """Lets go of the tables: stages have those that they use, and nobody compares them."""
        for module in self.modules():
            if isinstance(module, DistanceBias):
                module.register_buffer("table", None, persistent=False)


LEFT_DENSE = (
    "Tensor parallel is left out of blocks whose sharding differs",
    "Sequence parallelism is left out of blocks",
)
"""Blocks with hooks on gradients, and those that torch can't differentiate twice."""

MODELS = {
    **{
        name: Model(job=Job(model=partial(BiasedGPT, is_beside), num_val_batches=1), skips=frozenset({"averages"}))
        for name, is_beside in {"bias-beside": True, "bias-in-all": False}.items()  # copies lack what comes later
    },
    "odd-blocks": Model(
        job=Job(model=OddBlocks, data=features, num_val_batches=1),
        lr=0.03,
        families=frozenset({"pp", "tp", "dp"}),
        skips=frozenset({"inline", "manual", "adversaries"}),  # changes what it is given
        warns=LEFT_DENSE,
    ),
    "odd-gpt": Model(
        job=Job(model=OddGPT, num_val_batches=1),
        runs_inline=True,
        families=frozenset({"pp", "tp", "dp"}),
        skips=frozenset({"reads", "calls"}),  # keeps a graph, which can't be copied, and reads weights between blocks
        warns=LEFT_DENSE,
    ),
}
