"""Losses that weigh samples, or couple them, on one small model."""

from __future__ import annotations

from functools import partial

from tests.law.models.row import COUPLED, Model
from tests.losses import LossNet, labelled
from tests.parity import Job

LOSSES = ("mean", "summed", "ignoring", "class_weighted", "selected", "divided", "smoothed", "contrastive", "ctc")
"""Of tests/losses.py; all but the mean weigh samples, or couple them."""

MODELS = {
    f"loss-{name}": Model(job=Job(model=partial(LossNet, name), data=labelled, num_val_batches=1), traits=COUPLED)
    for name in LOSSES
}
