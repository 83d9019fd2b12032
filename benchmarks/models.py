"""Models for measurements, as plain LightningModules."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (projection(h).view(split).transpose(1, 2) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        return self.out(y)  # type: ignore[no-any-return]

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))  # type: ignore[no-any-return]


class GPT(L.LightningModule):
    """Next-token prediction; a batch is (tokens, targets), both (B, T) int64."""

    def __init__(self, vocabulary: int = 512, width: int = 256, num_layers: int = 8, num_heads: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Linears(L.LightningModule):
    """Square layers in a row, all but free to run and large to save; a batch is (inputs,), (B, D)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def random_tokens(
    num_batches: int, batch_size: int, length: int, vocabulary: int = 512
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of random tokens, the same in every process."""
    tokens = torch.randint(
        vocabulary, (num_batches * batch_size, length + 1), generator=torch.Generator().manual_seed(0)
    )
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size)
