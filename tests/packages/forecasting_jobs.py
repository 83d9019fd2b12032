"""Forecasters of PyTorch Forecasting, built from a `TimeSeriesDataSet` of random series."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
from pytorch_forecasting import NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from torch.utils.data import Dataset, Subset

from tests.packages.parity import PackageJob

CONTEXT, HORIZON = 12, 4


@cache
def series(*, univariate: bool) -> TimeSeriesDataSet:
    """Two series of 40 values."""
    random = np.random.default_rng(0)
    length = 40
    table = pd.DataFrame(
        {
            "time": np.tile(np.arange(length), 2),
            "series": np.repeat(["a", "b"], length),
            "value": random.random(2 * length) + 1,
            "feature": random.normal(size=2 * length),
        }
    )
    features = {} if univariate else {"static_categoricals": ["series"], "time_varying_known_reals": ["feature"]}
    return TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=CONTEXT,
        max_prediction_length=HORIZON,
        time_varying_unknown_reals=["value"],
        **features,
    )


def windows(num_samples: int, *, univariate: bool) -> Dataset[Any]:
    return Subset(series(univariate=univariate), range(num_samples))


def collate(samples: list[Any]) -> Any:
    return series(univariate=True)._collate_fn(samples)


def temporal_fusion_transformer() -> L.LightningModule:
    return TemporalFusionTransformer.from_dataset(
        series(univariate=False), hidden_size=16, attention_head_size=2, hidden_continuous_size=8, dropout=0.0
    )


def nbeats() -> L.LightningModule:
    return NBeats.from_dataset(series(univariate=True), widths=[32, 64], backcast_loss_ratio=0.1, dropout=0.0)


JOBS = {
    "TemporalFusionTransformer": PackageJob(
        module=temporal_fusion_transformer,
        data=partial(windows, univariate=False),
        collate=collate,
        of_replicas=frozenset({"val_RMSE"}),
    ),
    "NBeats": PackageJob(
        module=nbeats,
        data=partial(windows, univariate=True),
        collate=collate,
        of_replicas=frozenset({"val_RMSE"}),
    ),
}
