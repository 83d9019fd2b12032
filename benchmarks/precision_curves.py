"""Loss curves of the example GPT in every precision against 32-true, in one process and in 2 x 2 x 2.

    python -m benchmarks.precision_curves [STEPS] [PRECISION ...]

300 steps by default, of the example's data in the same global batches. The final loss is the mean over the last tenth
of the steps; its difference from 32-true in the same layout may be 2 %. In fp16 both layouts have to skip the same
steps. The scale begins at 2**24, so that some overflow.
"""

from __future__ import annotations

import logging
import statistics
import sys
from typing import Any, get_args

import lightning as L
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.launch import run_ranks
from benchmarks.quiet_trainer import quiet_trainer
from examples.gpt import GPT, StdlibText
from lightning_3d import ThreeDPrecision, ThreeDStrategy
from lightning_3d.config.precision import PrecisionName

STEPS, GLOBAL_BATCH, BAR = 300, 32, 0.02
FIRST_SCALE = {"initial_scale_power": 24}


class _Curve(L.Callback):
    """Notes losses, and the steps after which the loss scale was smaller.

    Args:
        scale: The first one.
    """

    def __init__(self, scale: float) -> None:
        self.losses: list[float] = []
        self.skipped: list[int] = []
        self._scale = scale

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(trainer.callback_metrics["loss"].item())
        if (scale := trainer.precision_plugin.loss_scale) < self._scale:
            self.skipped.append(len(self.losses))
        self._scale = scale


def curve(precision: Any, num_steps: int, sizes: dict[str, int]) -> tuple[list[float], list[int]]:
    """Losses of the steps, and the steps that were skipped."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    num_ranks = 8 if sizes else 1
    dp = 2 if sizes else 1
    seen, data = _Curve(2.0 ** FIRST_SCALE["initial_scale_power"]), StdlibText()
    scale = FIRST_SCALE if precision.startswith("16-") else {}
    L.seed_everything(1, verbose=False)
    trainer = quiet_trainer(
        ThreeDStrategy(**sizes, precision=scale, zero={"show_gradients": False}),
        num_ranks,
        num_steps,
        seen,
        plugins=[ThreeDPrecision(precision)],
        gradient_clip_val=1.0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    data.setup("fit")
    rank = trainer.global_rank // 2 % 2 if sizes else 0
    sampler: Any = DistributedSampler(data.train_set, num_replicas=dp, rank=rank, seed=1, drop_last=True)
    trainer.fit(GPT(), DataLoader(data.train_set, batch_size=GLOBAL_BATCH // dp, sampler=sampler, drop_last=True))
    return seen.losses, seen.skipped


def main() -> None:
    """Print the table."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    names = sys.argv[2:] or [name for name in get_args(PrecisionName) if name != "32-true"]
    console = Console(width=130)
    layouts = {"one process": {}, "2 x 2 x 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}}
    table = Table("precision", "layout", "final loss", "to 32-true", "bar", "skipped steps", title=f"{num_steps} steps")
    for layout, sizes in layouts.items():
        exact = 0.0
        for name in ("32-true", *names):
            losses, skipped = run_ranks(curve, 8 if sizes else 1, name, num_steps, sizes)
            final = statistics.mean(losses[-max(1, num_steps // 10) :])
            exact = final if name == "32-true" else exact
            console.print(f"{layout}, {name}: {final:.4f}, skipped {skipped}")
            table.add_row(name, layout, f"{final:.4f}", f"{final / exact - 1:+.2%}", f"{BAR:.0%}", str(skipped or ""))
    console.print(table)


if __name__ == "__main__":
    main()
