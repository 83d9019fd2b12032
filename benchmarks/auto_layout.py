"""The layout that a fit chooses by itself against the best of all layouts, by the time of a sample.

    python -m benchmarks.auto_layout [--ranks 2] [--model GPT ...] [--rounds 3]

Processes of one thread, AdamW, fp32. In the first round every layout trains for some steps, in turn; the fastest of
them go on for further rounds, and with them a fit of which nothing is set. A replica's batch is the same in all, so
that layouts are compared by the time of a step over the number of replicas. The bar: within 10 % of the best. The
layout that was chosen goes on, too, where it is given: how far it is from the fit that chose it is noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.data_parallel_step import Clock
from benchmarks.launch import run_ranks
from benchmarks.models import GPT, Block, Linears
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.planning.layouts import Layout, candidates

BATCH, WARM_UP, STEPS, GO_ON, BAR = 8, 2, 6, 3, 1.1


class ViT(L.LightningModule):
    """Classifies images of 64 x 64 pixels by patches of 8 x 8; a batch is (images, classes)."""

    def __init__(self, width: int = 256, num_layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(num_layers))
        self.head = nn.Linear(width, 100)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.patches(batch[0]).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Convolutions(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class UNet(L.LightningModule):
    """Gives an image of the size of its input; a batch is (images, images)."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = _Convolutions(3, channels), _Convolutions(channels, 2 * channels)
        self.middle = _Convolutions(2 * channels, 4 * channels)
        self.up2, self.up1 = _Convolutions(6 * channels, 2 * channels), _Convolutions(3 * channels, channels)
        self.last = nn.Conv2d(channels, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        high = self.down1(batch[0])
        low = self.down2(F.avg_pool2d(high, 2))
        x = F.interpolate(self.middle(F.avg_pool2d(low, 2)), scale_factor=2.0)
        x = F.interpolate(self.up2(torch.cat([x, low], 1)), scale_factor=2.0)
        return F.mse_loss(self.last(self.up1(torch.cat([x, high], 1))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _tokens(vocabulary: int, num: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(vocabulary, (num, 65))
    return tokens[:, :-1], tokens[:, 1:]


MODELS: Mapping[str, tuple[Callable[[], L.LightningModule], Callable[[int], tuple[Tensor, ...]]]] = {
    "GPT": (GPT, partial(_tokens, 512)),
    "GPT, wide head": (partial(GPT, 16384, 128, 2), partial(_tokens, 16384)),
    "ViT": (ViT, lambda num: (torch.randn(num, 3, 64, 64), torch.randint(100, (num,)))),
    "MLP": (partial(Linears, 1024, 8), lambda num: (torch.randn(num, 1024),)),
    "U-Net": (UNet, lambda num: (torch.randn(num, 3, 32, 32), torch.randn(num, 3, 32, 32))),
}


class _FastestStep(Clock):
    """Noise makes steps longer, never shorter."""

    def fastest(self) -> float:
        """Seconds."""
        return min(end - start for start, end in pairwise(self._starts[self._num_warm_up :]))


def _trained(name: str, strategy: ThreeDStrategy, num_ranks: int) -> tuple[float, Layout, dict[str, float]]:
    """Seconds of a step over the number of replicas, the layout, and what was predicted of all by their names."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    module, clock = make(), _FastestStep(WARM_UP)
    loader = DataLoader(TensorDataset(*data(num_ranks * BATCH * (WARM_UP + STEPS + 1))), BATCH)
    quiet_trainer(strategy, num_ranks, WARM_UP + STEPS, clock).fit(module, loader)
    plan = strategy.plan
    layout = Layout(shape=plan.shape, zero_stage=strategy.run.config.zero.stage, num_microbatches=plan.num_microbatches)
    seconds = [clock.fastest() / layout.replicas]
    dist.broadcast_object_list(seconds)
    seen = {} if strategy.choice is None else strategy.choice.predicted
    return seconds[0], layout, {str(each): found.seconds / each.replicas for each, found in seen.items()}


def _measured(name: str, num_ranks: int, num_rounds: int) -> tuple[list[dict[str, float]], str, dict[str, float]]:
    """Contender -> seconds, by round; the layout that was chosen, and what was predicted."""
    layouts = candidates(ThreeDConfig(), num_ranks, num_ranks, BATCH)
    layouts = [each for each in layouts if each.replicas > 1 or each.zero_stage == 1]
    first = {str(each): _trained(name, ThreeDStrategy(**_settings(each)), num_ranks)[0] for each in layouts}
    seconds, chosen, predicted = _trained(name, ThreeDStrategy(), num_ranks)
    rounds = [{**first, "auto": seconds}]
    fastest = sorted(layouts, key=lambda each: (each != chosen, first[str(each)]))[:GO_ON]
    for _ in range(num_rounds - 1):
        row = {str(each): _trained(name, ThreeDStrategy(**_settings(each)), num_ranks)[0] for each in fastest}
        seconds, chosen, predicted = _trained(name, ThreeDStrategy(), num_ranks)
        rounds.append({**row, "auto": seconds})
    return rounds, str(chosen), predicted


def _settings(layout: Layout) -> dict[str, Any]:
    config = layout.of(ThreeDConfig())
    sizes = ("layout", "pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size", "zero", "pipeline")
    return {name: getattr(config, name) for name in sizes}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for name in given.model:
        rounds, chosen, predicted = run_ranks(_measured, given.ranks, name, given.ranks, given.rounds)
        table = Table(
            "layout", "predicted", "fastest step, in ms over replicas, by round", title=f"{name}, {given.ranks} ranks"
        )
        for contender in rounds[0]:
            times = [seconds[contender] for seconds in rounds if contender in seconds]
            ahead = f"{1e3 * predicted[contender]:.1f}" if contender in predicted else ""
            table.add_row(contender, ahead, " ".join(f"{1e3 * each:.1f}" for each in times))
        Console(width=120).print(table)
        later = rounds[1:] or rounds
        medians = {key: statistics.median(seconds[key] for seconds in later) for key in later[0]}
        best = min((key for key in medians if key != "auto"), key=medians.__getitem__)
        ratios = [seconds["auto"] / seconds[best] for seconds in later]
        if chosen in medians:
            same = statistics.median(seconds[chosen] / seconds[best] for seconds in later)
            print(f"{name}, {given.ranks} ranks: the chosen layout, where it is given, / best = {same:.3f}")
        print(
            f"{name}, {given.ranks} ranks: auto ({chosen}) / best ({best}) = {statistics.median(ratios):.3f}"
            f" (bar {BAR}; by round {' '.join(f'{ratio:.2f}' for ratio in ratios)})",
            flush=True,
        )


if __name__ == "__main__":
    main()
