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
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from tests.law.models.row import Model
from tests.optimizers import Derived, Lars, Sam, ScheduleFree, Shampoo
from tests.parity import Layout


def descent(module: LightningModule, lr: float) -> Any:
    """See [Note: the law's optimizer]."""
    return SGD(_trained(module), lr=lr, momentum=0.9)


def _trained(module: LightningModule) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def adamw(module: LightningModule, lr: float) -> Any:
    """Of a class of a user's, whose step and that of whose base both have torch's hooks."""
    return Derived(_trained(module), lr=0.1 * lr, eps=1e-4, weight_decay=0.1)


def amsgrad(module: LightningModule, lr: float) -> Any:
    """Has three states of each parameter, and a rate that rises in every step."""
    optimizer = AdamW(_trained(module), lr=0.1 * lr, eps=1e-4, weight_decay=0.1, amsgrad=True)
    return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: (step + 1) / 4), "interval": "step"}]


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


def plateau(module: LightningModule, lr: float) -> Any:
    """The rate falls where the loss of the validation does not, by its own measure."""
    optimizer = descent(module, lr)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def schedule_free(module: LightningModule, lr: float) -> Any:
    """Counts in its groups."""
    return ScheduleFree(_trained(module), lr=lr)


def nadam(module: LightningModule, lr: float) -> Any:
    """Has a state of one number that is no count."""
    return NAdam(_trained(module), lr=0.1 * lr, eps=1e-4)


def lars(module: LightningModule, lr: float) -> Any:
    """Takes norms of whole parameters."""
    return Lars(_trained(module), lr=lr)


def shampoo(module: LightningModule, lr: float) -> Any:
    """Has states of other shapes than its parameters."""
    return Shampoo(_trained(module), lr=lr)


def sam(module: LightningModule, lr: float) -> Any:
    """Runs the step a second time."""
    return Sam(_trained(module), lr=lr)


for kind in (NAdam, AdamW):
    kind([torch.nn.Parameter(torch.zeros(1))])  # torch patches a class of optimizers when it makes the first


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


def _by_replicas(layout: Layout) -> bool:
    return layout.dp > 1


def _on_parts(layout: Layout) -> bool:
    """Where no rank holds the whole model."""
    return layout.pp > 1 or layout.zero == 3


def _at_stage_3(layout: Layout) -> bool:
    return layout.dp > 1 and layout.zero == 3


def _stepped_in_parts(layout: Layout) -> bool:
    return layout.tp > 1 or (layout.dp * layout.cp > 1 and layout.zero > 0)


def _by_replicas_alone(layout: Layout) -> bool:
    return layout.dp == layout.world_size and layout.zero < 3


def _on_slices(layout: Layout) -> bool:
    return layout.cp > 1


def _in_groups(layout: Layout) -> bool:
    return layout.dp == 4


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
    half: Literal["16-mixed"] | None = None
    """The layout's precision, where one process can't compute in it on a CPU and stays at that of the job."""
    is_deferred: bool = False
    """Whether the model is built where the Trainer says (``init_module``)."""
    is_resumed: bool = False
    """Whether each epoch after the first is trained by a new run, of which the first had another layout."""
    tolerance: float = 1e-3
    """Greatest difference, as a share of how far a parameter moved."""
    fits: Callable[[Layout], bool] = _any_layout
    needs_pieces: bool = False
    """Whether it takes several microbatches, as batch statistics do not."""
    models: frozenset[str] | None = None
    """Names of those that it is for; None: any."""
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

_UNMASKED = frozenset({"dit", "gpt", "gpt-untied", "llama", "llama-one-kv-head", "llama-tied", "odd-gpt", "vit"})
"""Models whose attention has a causal mask or none."""

SETTINGS = {
    "plain": Setting(),
    "inline": Setting(layout={"mode": "inline", "num_microbatches": "auto"}, fits=_in_pipelines),
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
        optimizer=amsgrad, tolerance=1e-2, epochs=2, is_resumed=True, layout={"save_distributed_checkpoint": True}
    ),
    "folder": Setting(layout={"save_distributed_checkpoint": True}),
    "recomputed": Setting(layout={"activations": {"recompute": "full"}}),
    "selective": Setting(layout={"activations": {"recompute": "selective"}}),
    "unfused": Setting(layout={"activations": {"fused_loss": "never"}}),
    "compiled": Setting(
        layout={"compile_backend": "aot_eager"},
        warns=("compile.enabled: ", "Dynamo does not know how to trace", "Dynamo detected a call to a `functools.lru"),
    ),
    "offloaded": Setting(layout={"zero_settings": _OFFLOADED}),
    "sequence": Setting(layout={"sequence_parallel": True}, fits=_on_shards),
    "sequence-recomputed": Setting(
        layout={"sequence_parallel": True, "activations": {"recompute": "full"}}, fits=_on_shards
    ),
    "uneven": Setting(layout={"num_microbatches": 3}, fits=_with_two_stages_per_rank, needs_pieces=True),
    "by-time": Setting(layout={"partition": "auto"}, fits=_in_pipelines),
    "partitioned": Setting(layout={"activations": {"recompute": "full", "partition": True}}, fits=_on_shards),
    "budget": Setting(
        layout={"activations": {"recompute": "auto", "budget": 100.0}},
        fits=_on_parts,
        warns=("training_step holds the activations of all microbatches",),
    ),
    "deferred": Setting(is_deferred=True, fits=_on_parts),
    "fp16": Setting(
        half="16-mixed",
        tolerance=0.05,
        job={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        layout={"precision": {"initial_scale_power": 8}},  # the first losses of 2**16 would overflow
    ),
    "offloaded-files": Setting(
        layout={"zero_settings": {**_OFFLOADED, "offload_optimizer": "states"}}, fits=_by_replicas
    ),
    "offloaded-parameters": Setting(
        layout={"zero_settings": {**_OFFLOADED, "offload_params": "parameters"}}, fits=_at_stage_3
    ),
    "kept-gathered": Setting(layout={"zero_settings": {"reshard_after_forward": False}}, fits=_at_stage_3),
    "whole-steps": Setting(layout={"zero_settings": {"optimizer_steps": "parameters"}}, fits=_stepped_in_parts),
    "whole-steps-offloaded": Setting(
        layout={"zero_settings": {**_OFFLOADED, "optimizer_steps": "parameters"}}, fits=_stepped_in_parts
    ),
    "hybrid": Setting(layout={"zero_settings": {"shard_size": 2}}, fits=_in_groups),
    "plateau": Setting(optimizer=plateau, epochs=2, fits=_in_pipelines),
    "schedule-free": Setting(optimizer=schedule_free, fits=_by_replicas),
    "nadam": Setting(optimizer=nadam, tolerance=1e-2, fits=_at_stage_3),
    "lars": Setting(optimizer=lars, tolerance=1e-2, job={"gradient_clip_val": 0.1}),
    "shampoo-resumed": Setting(
        optimizer=shampoo,
        tolerance=1e-2,
        epochs=2,
        is_resumed=True,
        layout={"save_distributed_checkpoint": True},
    ),
    "sam": Setting(optimizer=sam, tolerance=1e-2, fits=_by_replicas_alone),
    "small-buckets": Setting(layout={"zero_settings": {"bucket_size": 0.001}}, fits=_in_buckets),
    "incomplete-window": Setting(job={"accumulate_grad_batches": 2, "num_missing": 8}, fits=_in_buckets),
    "sent-in-bf16": Setting(
        layout={"zero_settings": {"communication_dtype": "bfloat16"}}, fits=_in_buckets, tolerance=0.05
    ),
    "offloaded-counts": Setting(optimizer=schedule_free, layout={"zero_settings": _OFFLOADED}, fits=_in_buckets),
    "offloaded-resumed": Setting(
        optimizer=warmed_up,
        epochs=2,
        is_resumed=True,
        layout={"zero_settings": _OFFLOADED},
        fits=lambda layout: layout.zero < 3,
    ),
    "ring": Setting(layout={"context": {"attention": "ring"}}, fits=_on_slices, models=_UNMASKED),
    "head-tail": Setting(
        layout={"context": {"attention": "ring", "order": "head_tail"}}, fits=_on_slices, models=_UNMASKED
    ),
    "gathered": Setting(layout={"context": {"attention": "gather"}}, fits=_on_slices),
    "hybrid-resumed": Setting(
        optimizer=warmed_up,
        epochs=2,
        is_resumed=True,
        layout={"zero_settings": {"shard_size": 2}},
        fits=_in_groups,
    ),
}
