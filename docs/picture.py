"""Makes docs/promise.png: the README's example in one process and in four layouts. Takes a minute or two on 8 CPUs.

    python docs/picture.py

Each layout is a run of this script of its own, of which rank 0 writes what it saw; nothing in the picture is drawn by
hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Polygon
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d import ThreeDStrategy
from lightning_3d.callbacks import ScheduleTimeline

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from minimal import Counter  # noqa: E402  # the README's example

STEPS, GLOBAL_BATCH_SIZE = 60, 32
ONE_PROCESS, CUBE, PIPELINE = "one process", "pipeline 2 x data 2 x tensor 2", "pipeline 4"
LAYOUTS: Mapping[str, dict[str, Any]] = {
    ONE_PROCESS: {},
    "data 4, ZeRO stage 3": {"zero": {"stage": 3}},
    PIPELINE: {"pipeline_parallel_size": 4, "pipeline": {"num_microbatches": 8}},
    "tensor 4": {"tensor_parallel_size": 4},
    CUBE: {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "pipeline": {"num_microbatches": 4}},
}
DEVICES = {ONE_PROCESS: 1, CUBE: 8}
INK, GREY = "#263238", "#90a4ae"
STAGES = ("#5e35b1", "#00897b")
COLOURS = (GREY, "#e65100", "#1e88e5", "#43a047", "#5e35b1")


class Seen(L.Callback):
    """What a run shows: the losses of the global batches, the shares of the ranks, the schedule."""

    def __init__(self, path: str, drawn: ScheduleTimeline | None) -> None:
        self.path, self.losses, self.drawn = path, [], drawn

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss, joined over the replicas."""
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write it."""
        ranks = [] if self.drawn is None or self.drawn.timeline is None else self.drawn.timeline.planned
        schedule = [[(s.kind, s.microbatch, s.start, s.end) for s in rank] for rank in ranks]
        seen: dict[str, Any] = {"losses": self.losses, "schedule": schedule}
        if isinstance(trainer.strategy, ThreeDStrategy):
            seen["parameters"] = [report.num_parameters for report in trainer.strategy.report()]
            seen["stages"] = {block.fqn: block.stages[0] for block in trainer.strategy.plan.blocks}
        if trainer.is_global_zero:
            Path(self.path).write_text(json.dumps(seen))


def train(name: str, path: str) -> None:
    """Train the example in a layout, on batches that are the same in all of them, and without dropout."""
    L.seed_everything(0, verbose=False)
    size = (STEPS * GLOBAL_BATCH_SIZE, 1)
    start, step = torch.randint(20, size), torch.randint(1, 6, size)
    sequences: Tensor = start + step * torch.arange(16)
    model = Counter()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    devices, settings = DEVICES.get(name, 4), LAYOUTS[name]
    replicas = devices // settings.get("pipeline_parallel_size", 1) // settings.get("tensor_parallel_size", 1)
    is_drawn = settings.get("pipeline_parallel_size", 1) > 1
    drawn = ScheduleTimeline(Path(path).with_suffix(".png")) if is_drawn else None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ThreeDStrategy(**settings) if devices > 1 else "auto",
        max_epochs=1,
        callbacks=[Seen(path, drawn), *([drawn] if drawn else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    order = DistributedSampler(sequences, 1, 0) if replicas == 1 else None  # of Lightning where there are several
    trainer.fit(model, DataLoader(sequences, batch_size=GLOBAL_BATCH_SIZE // replicas, sampler=order))


def draw(seen: Mapping[str, Any], path: Path) -> None:
    """Draw the cube of ranks, the losses and a schedule."""
    figure = Figure(figsize=(13, 7.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.1, 1), width_ratios=(1.08, 1))
    cube, losses, schedule = (figure.add_subplot(cell) for cell in (grid[0, 0], grid[0, 1], grid[1, :]))
    _draw_cube(cube, seen[CUBE])
    _draw_losses(losses, {name: seen[name]["losses"] for name in LAYOUTS})
    _draw_schedule(schedule, seen[PIPELINE]["schedule"])
    for axes, title in (
        (cube, "One LightningModule, as it is, on 8 ranks"),
        (losses, "Every layout trains as one process does"),
        (schedule, "Pipeline 4: a training step of 8 microbatches under 1F1B, as planned"),
    ):
        axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=10)
    figure.savefig(path, dpi=110)


def _draw_cube(axes: Axes, seen: Mapping[str, Any]) -> None:
    """The blocks of the model beside the ranks that hold them, 2 x 2 x 2."""
    for row, (fqn, stage) in enumerate(seen["stages"].items()):
        y = 4.6 - 0.8 * row
        box = FancyBboxPatch((0.0, y), 2.0, 0.52, boxstyle="round,pad=0.05", facecolor=STAGES[stage], edgecolor="none")
        axes.add_patch(box)
        axes.text(1.0, y + 0.26, fqn, ha="center", va="center", color="white", fontsize=11, family="monospace")
    for rank in sorted(range(8), key=lambda rank: -(rank // 2 % 2)):  # the replica behind comes first
        stage, replica, tensor = rank // 4, rank // 2 % 2, rank % 2
        x, y = 3.9 + 1.75 * tensor + 1.15 * replica, 2.85 - 2.35 * stage + 0.75 * replica
        _box(axes, x, y, STAGES[stage], 0.55 if replica else 1.0)
        if not replica:
            share = f"rank {rank}\n\n{seen['parameters'][rank] / 1e3:.0f}k\nparameters"
            axes.text(x + 0.75, y + 0.75, share, ha="center", va="center", color="white", fontsize=10)
        else:
            axes.text(x + 1.4, y + 1.32, f"rank {rank}", ha="right", va="center", color="white", fontsize=10)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
    for tip, tail, words, place in (
        ((3.45, 0.55), (3.45, 4.5), "pipeline", (3.2, 2.5)),
        ((7.4, 0.05), (3.9, 0.05), "tensor", (5.6, -0.25)),
        ((8.75, 1.15), (7.65, 0.42), "data", (8.45, 0.55)),
    ):
        axes.annotate("", tip, tail, arrowprops=arrow)
        rotation = 90 if words == "pipeline" else 0
        axes.text(*place, words, ha="center", va="center", color=INK, fontsize=12, rotation=rotation)
    axes.set_xlim(-0.2, 9.3)
    axes.set_ylim(-0.6, 5.6)
    axes.set_aspect("equal")
    axes.axis("off")


def _box(axes: Axes, x: float, y: float, colour: str, alpha: float) -> None:
    """A cube with its top and its right side."""
    side, depth = 1.5, (0.42, 0.28)
    left_low, right_low, right_high, left_high = (x, y), (x + side, y), (x + side, y + side), (x, y + side)
    behind = {(a, b): (a + depth[0], b + depth[1]) for a, b in (left_low, right_low, right_high, left_high)}
    faces = (
        ([left_low, right_low, right_high, left_high], 1.0),
        ([left_high, right_high, behind[right_high], behind[left_high]], 0.8),
        ([right_low, behind[right_low], behind[right_high], right_high], 0.65),
    )
    for points, shade in faces:
        axes.add_patch(Polygon(points, facecolor="white", edgecolor="white"))
        axes.add_patch(Polygon(points, facecolor=colour, alpha=alpha * shade, edgecolor="white", linewidth=1.5))


def _draw_losses(axes: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    """All curves on one another: that of one process wide and grey, the others as markers in turn."""
    expected = losses[ONE_PROCESS]
    axes.plot(expected, color=GREY, linewidth=9, alpha=0.55, solid_capstyle="round", label=ONE_PROCESS)
    layouts = [name for name in losses if name != ONE_PROCESS]
    for index, name in enumerate(layouts):
        difference = max(abs(a - b) for a, b in zip(losses[name], expected, strict=True))
        label = f"{name}   (differs by {difference:.0e})"
        steps = range(index, len(expected), len(layouts))
        values = [losses[name][step] for step in steps]
        axes.plot(steps, values, linestyle="none", marker="o", markersize=6, color=COLOURS[index + 1], label=label)
    axes.set_xlabel("step", color=INK, fontsize=11)
    axes.set_ylabel("loss of the batch", color=INK, fontsize=11)
    axes.legend(frameon=False, fontsize=11, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def _draw_schedule(axes: Axes, schedule: Sequence[Sequence[tuple[str, int, float, float]]]) -> None:
    colours = {"forward": "#7e57c2", "backward": "#26a69a"}
    for row, spans in enumerate(schedule):
        for kind, microbatch, start, end in spans:
            axes.barh(row, end - start, left=start, height=0.86, color=colours[kind], edgecolor="white", linewidth=1.5)
            axes.text((start + end) / 2, row, str(microbatch), ha="center", va="center", color="white", fontsize=10)
    axes.set_yticks(range(len(schedule)), [f"stage {row}" for row in range(len(schedule))], fontsize=11, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(span[3] for rank in schedule for span in rank))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    axes.legend(handles=handles, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=11)


def main() -> None:
    """Run the layouts one after the other, and draw."""
    with TemporaryDirectory() as folder:
        seen = {}
        for number, name in enumerate(LAYOUTS):
            path = Path(folder) / f"{number}.json"
            subprocess.run([sys.executable, __file__, name, str(path)], check=True)
            seen[name] = json.loads(path.read_text())
    draw(seen, Path(__file__).parent / "promise.png")


if __name__ == "__main__":
    train(*sys.argv[1:]) if sys.argv[1:] else main()
