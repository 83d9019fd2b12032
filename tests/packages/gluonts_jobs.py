"""Forecasters of GluonTS, on random series."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule
from gluonts.torch.model.patch_tst.lightning_module import PatchTSTLightningModule
from gluonts.torch.model.simple_feedforward.lightning_module import SimpleFeedForwardLightningModule
from torch.utils.data import Dataset

from tests.packages.parity import PackageJob, dict_samples

CONTEXT, HORIZON, WIDTH = 12, 4, 16


def series(num_samples: int, *, past: int = CONTEXT, with_features: bool = False) -> Dataset[Any]:
    """Series of `past` + HORIZON values, cut where the forecast begins, every value observed."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for values in torch.rand(num_samples, past + HORIZON, generator=generator) + 1:
        sample = {
            "past_target": values[:past],
            "past_observed_values": torch.ones(past),
            "future_target": values[past:],
            "future_observed_values": torch.ones(HORIZON),
        }
        if with_features:
            sample |= {
                "feat_static_cat": torch.randint(0, 3, (1,), generator=generator),
                "feat_static_real": torch.randn(1, generator=generator),
                "past_time_feat": torch.randn(past, 2, generator=generator),
                "future_time_feat": torch.randn(HORIZON, 2, generator=generator),
            }
        samples.append(sample)
    return dict_samples(samples)


def feedforward() -> L.LightningModule:
    return SimpleFeedForwardLightningModule(
        {"prediction_length": HORIZON, "context_length": CONTEXT, "hidden_dimensions": [WIDTH, WIDTH]}
    )


def patch_tst() -> L.LightningModule:
    return PatchTSTLightningModule(
        {
            "prediction_length": HORIZON,
            "context_length": CONTEXT,
            "patch_len": 4,
            "stride": 4,
            "padding_patch": "end",
            "d_model": WIDTH,
            "nhead": 4,
            "dim_feedforward": 2 * WIDTH,
            "num_feat_dynamic_real": 0,
            "dropout": 0.0,
            "activation": "relu",
            "norm_first": False,
            "num_encoder_layers": 2,
            "scaling": "mean",
        }
    )


def deepar_settings() -> dict[str, Any]:
    return {
        "freq": "D",
        "context_length": CONTEXT,
        "prediction_length": HORIZON,
        "num_feat_dynamic_real": 2,
        "num_feat_static_real": 1,
        "num_feat_static_cat": 1,
        "cardinality": [3],
        "embedding_dimension": [4],
        "num_layers": 2,
        "hidden_size": WIDTH,
        "dropout_rate": 0.0,
        "lags_seq": [1, 2, 3],
    }


def deepar() -> L.LightningModule:
    return DeepARLightningModule(deepar_settings())


JOBS = {
    "SimpleFeedForward": PackageJob(module=feedforward, data=series),
    "PatchTST": PackageJob(module=patch_tst, data=series),
    "DeepAR": PackageJob(module=deepar, data=partial(series, past=CONTEXT + 3, with_features=True)),
}
