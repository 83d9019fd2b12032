"""SETTINGS: how a job is trained, by the Trainer's arguments (the one process has them, too) and the strategy's.

[Note: the law's optimizer]
Gradient descent with momentum. Its steps are linear in the gradients, so that a gradient that is doubled, or not
divided by the number of replicas, moves its parameter twice as far, and one that is small moves it as little as it
should, which the judge compares with that little. Adam divides gradients by their size: it would hide the former, and
with an eps above them the latter, too. Momentum is a state of the optimizer to shard and to save; `adamw` is there for
optimizers with several states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from tests.law.models.row import Model
from tests.parity import Layout


def descent(module: LightningModule, lr: float) -> Any:
    """See [Note: the law's optimizer]."""
    return SGD(_trained(module), lr=lr, momentum=0.9)


def _trained(module: LightningModule) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def adamw(module: LightningModule, lr: float) -> Any:
    return AdamW(_trained(module), lr=0.1 * lr, eps=1e-4, weight_decay=0.1)


def groups(module: LightningModule, lr: float) -> Any:
    """Matrices decay, the others have half the rate, as is the custom."""
    parameters = _trained(module)
    matrices, others = ([p for p in parameters if (p.dim() > 1) == wanted] for wanted in (True, False))
    given = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": lr / 2}]
    return SGD([group for group in given if group["params"]], lr=lr, momentum=0.9, nesterov=True)


def warmed_up(module: LightningModule, lr: float) -> Any:
    """The rate rises in every step."""
    optimizer = descent(module, lr)
    scheduler = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def stepped(module: LightningModule, lr: float) -> Any:
    """The rate falls after an epoch, and stays in the checkpoint."""
    optimizer = descent(module, lr)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.1)]


def _any_layout(layout: Layout) -> bool:
    return True


def _in_pipelines(layout: Layout) -> bool:
    return layout.pp > 1


def _with_two_stages_per_rank(layout: Layout) -> bool:
    return layout.pp == 2


def _on_shards(layout: Layout) -> bool:
    return layout.tp > 1


def _in_buckets(layout: Layout) -> bool:
    return layout.dp > 1 and layout.zero < 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row."""

    job: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the `Job`; the one process has them, too."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the `Layout`."""
    optimizer: Callable[[LightningModule, float], Any] = descent
    """Gives what `configure_optimizers` returns, from the model and its learning rate."""
    epochs: int = 1
    is_resumed: bool = False
    """Whether each epoch after the first is trained by a new run, of which the first had another layout."""
    tolerance: float = 1e-3
    """Greatest difference, as a share of how far a parameter moved."""
    fits: Callable[[Layout], bool] = _any_layout
    needs_pieces: bool = False
    """Whether it takes several microbatches, as batch statistics do not."""
    looks_at_gradients: bool = True
    """Whether the layout's gradients are recorded; stages 1 and 2 of ZeRO leave them in parts if nobody looks."""
    warns: tuple[str, ...] = ()
    """Beginnings of warnings that it may give."""

    def suits(self, model: Model, layout: Layout) -> bool:
        """Whether the setting means anything, and is not refused, for a model in a layout."""
        is_in_one_piece = "batch statistics" in model.traits and layout.pp > 1
        return self.fits(layout) and not (self.needs_pieces and is_in_one_piece)

    def in_layout(self, layout: Layout) -> Layout:
        zero_settings = {**layout.zero_settings, **self.layout.get("zero_settings", {})}
        return replace(layout, **{**self.layout, "zero_settings": zero_settings})


def _schedule(name: str) -> Setting:
    return Setting(
        layout={"schedule": name, "num_microbatches": 4},
        fits=_with_two_stages_per_rank,
        needs_pieces=True,
    )


_OFFLOADED = {"offload_optimizer": "cpu", "offload_window": 0.005}

SETTINGS = {
    "plain": Setting(),
    "gpipe": Setting(layout={"schedule": "gpipe"}, fits=_in_pipelines),
    "interleaved": _schedule("interleaved"),
    "zero-bubble": _schedule("interleaved_zero_bubble"),
    "zbv": _schedule("zbv"),
    "uniform": Setting(layout={"partition": "uniform"}, fits=_in_pipelines),
    "whole-loss": Setting(layout={"loss": "whole"}, fits=_in_pipelines, needs_pieces=True),
    "accumulated": Setting(job={"accumulate_grad_batches": 2}),
    "clipped": Setting(job={"gradient_clip_val": 0.1}),
    "clipped-values": Setting(job={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "unseen": Setting(
        job={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "sees_gradients": False},
        looks_at_gradients=False,
    ),
    "bf16": Setting(job={"precision": "bf16-mixed"}, tolerance=0.25),
    "double": Setting(job={"precision": "64-true"}, tolerance=1e-6),
    "adamw": Setting(optimizer=adamw, tolerance=1e-2),
    "groups": Setting(optimizer=groups),
    "warmed-up": Setting(optimizer=warmed_up, job={"accumulate_grad_batches": 2}),
    "stepped": Setting(optimizer=stepped, epochs=2),
    "resumed": Setting(optimizer=warmed_up, epochs=2, is_resumed=True),
    "resumed-folder": Setting(
        optimizer=warmed_up, epochs=2, is_resumed=True, layout={"save_distributed_checkpoint": True}
    ),
    "folder": Setting(layout={"save_distributed_checkpoint": True}),
    "recomputed": Setting(layout={"activations": {"recompute": "full"}}),
    "selective": Setting(layout={"activations": {"recompute": "selective"}}),
    "unfused": Setting(layout={"activations": {"fused_loss": "never"}}),
    "compiled": Setting(layout={"compile_backend": "aot_eager"}, warns=("compile.enabled: ",)),
    "offloaded": Setting(layout={"zero_settings": _OFFLOADED}),
    "sequence": Setting(layout={"sequence_parallel": True}, fits=_on_shards),
    "small-buckets": Setting(layout={"zero_settings": {"bucket_size": 0.002}}, fits=_in_buckets),
}
