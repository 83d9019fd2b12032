"""The config: the same keys from every source, and one clear error for every mistake."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_3d import ThreeDStrategy
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.errors import ConfigError


def test_sections_as_mapping_dataclass_or_omegaconf_node() -> None:
    expected = ThreeDConfig(zero=ZeroConfig(stage=3))
    for section in ({"stage": 3}, ZeroConfig(stage=3), OmegaConf.create({"stage": 3})):
        assert ThreeDConfig.from_mapping({"zero": section}) == expected
    assert ThreeDConfig.from_mapping(OmegaConf.create({"zero": {"stage": 3}})) == expected


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"zero": {"stag": 2}}, "unknown config key 'zero.stag': the nearest valid key is 'zero.stage'"),
        ({"stage": 2}, "unknown config key 'stage': the nearest valid key is 'zero.stage'"),
        ({"zero": {"num_microbatches": 2}}, "the nearest valid key is 'pipeline.num_microbatches'"),
        ({"pipline": {}}, "unknown config key 'pipline': the nearest valid key is 'pipeline'"),
        ({"tensor_parallel": 2}, "the nearest valid key is 'tensor_parallel_size'"),
        ({"zero": 3}, "zero=3 is not allowed: use a mapping or a ZeroConfig"),
        ([1], "config=[1] is not allowed"),
    ],
)
def test_wrong_keys_are_refused(mapping: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ThreeDConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0 is not allowed: use an integer of at least 1"),
        ({"data_parallel_size": -3}, "use an integer of at least 1 or 'auto'"),
        ({"zero": {"prefetch": 0, "stage": 3}}, "zero.prefetch=0 is not allowed: use an integer of at least 1 or"),
        ({"zero": {"shard_size": 2, "stage": 0}}, "zero.shard_size=2 does not go with zero.stage=0: stage 0 shards"),
        ({"zero": {"prefetch": 2}}, "zero.prefetch=2 does not go with zero.stage=1"),
        (
            {"zero": {"reshard_after_forward": False, "stage": 2}},
            "zero.reshard_after_forward=False does not go with zero.stage=2",
        ),
        ({"pipeline": {"schedule": "1F1b "}}, "'interleaved_zero_bubble' or 'zbv'"),
        ({"pipeline": {"partition": "paramters"}}, "pipeline.partition='paramters' is not allowed: use 'auto'"),
        ({"pipeline": {"partition": ["a"]}}, "partition=['a'] names 1 blocks, but there are 1 stages: name 0"),
        ({"pipeline": {"partition": ["a", "a"]}}, "partition=['a', 'a'] names a block twice"),
        ({"pipeline": {"partition": "type:"}}, "pipeline.partition='type:' is not allowed"),
        ({"pipeline": {"partition": "type:("}}, "unterminated subpattern at position 0"),
        ({"batch": {"check": "allways"}}, "use 'start', 'always' or 'never'"),
        ({"tensor": {"verify": "false"}}, "tensor.verify='false' is not allowed: use True or False"),
        ({"tensor": {"verify_tolerance": float("nan")}}, "tensor.verify_tolerance=nan is not allowed"),
        ({"zero": {"offload_optimizer": "CPU"}}, "use 'none', 'cpu' or a directory, such as './cpu'"),
        ({"zero": {"offload_params": "cpu"}}, "zero.offload_params='cpu' needs zero.stage=3"),
        ({"zero": {"offload_params": "x", "stage": 3}}, "does not go with zero.offload_optimizer='none'"),
        ({"zero": {"offload_window": 8}}, "zero.offload_window=8 needs zero.offload_optimizer"),
        ({"context_parallel_size": 2}, "context_parallel_size=2: context parallel is not built yet"),
        ({"pipeline": {"num_microbatches": 4}}, "Trainer(accumulate_grad_batches=4)"),
        ({"pipeline_parallel_size": 4, "pipeline": {"num_microbatches": 2}}, "use at least 4 microbatches"),
        ({"zero": {"stage": 3, "bucket_size": 1}}, "leave it out, or use stage 0 or 1 or 2"),
        ({"zero": {"stage": 3, "show_gradients": True}}, "zero.show_gradients=True does not go with zero.stage=3"),
        ({"zero": {"stage": 0, "power_sgd_start": 9}}, "a compression that is not asked for"),
        ({"zero": {"stage": 0, "power_sgd_rank": 1, "power_sgd_start": 1}}, "use an integer of at least 2"),
        (
            {"zero": {"stage": 0, "power_sgd_rank": 1, "communication_dtype": "float16"}},
            "gradients are compressed in one way",
        ),
        (
            {"tensor_parallel_size": 2, "zero": {"stage": 0, "power_sgd_rank": 1}},
            "zero.power_sgd_rank=1 with tensor_parallel_size=2",
        ),
    ],
)
def test_wrong_values_are_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ThreeDConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("pipeline_paralel_size", "pipeline_parallel_size"), ("timout", "timeout"), ("stage", "zero.stage")],
)
def test_a_wrong_keyword_of_the_strategy_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown config key '{key}': the nearest valid key is '{nearest}'"):
        ThreeDStrategy(**{key: 2})


def test_config_is_frozen_and_pickles() -> None:
    config = ThreeDConfig(pipeline_parallel_size=2, zero=ZeroConfig(stage=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tensor_parallel_size = 4  # type: ignore[misc]  # the mistake under test
    assert pickle.loads(pickle.dumps(config)) == config
