"""The config: the same keys from every source, and one clear error for every mistake."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.errors import ConfigError

FILE = """
pipeline_parallel_size: 2
data_parallel_size: auto
tensor_parallel_size: 2
zero: {stage: 1}
pipeline: {num_microbatches: 4, partition: parameters, schedule: 1f1b}
"""
CONFIG = ThreeDConfig(
    layout="given",
    pipeline_parallel_size=2,
    data_parallel_size="auto",
    tensor_parallel_size=2,
    zero=ZeroConfig(stage=1),
    pipeline=PipelineConfig(num_microbatches=4, partition="parameters", schedule="1f1b"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A YAML file of CONFIG."""
    path = tmp_path / "layout.yaml"
    path.write_text(FILE)
    return path


def test_overrides_change_exactly_what_they_name(file: Path) -> None:
    overrides = ["zero.stage=2", "pipeline.num_microbatches=6", "pipeline.num_microbatches=8"]
    config = ThreeDConfig.from_file(file, overrides)
    pipeline = dataclasses.replace(CONFIG.pipeline, num_microbatches=8)
    assert config == dataclasses.replace(CONFIG, zero=ZeroConfig(stage=2), pipeline=pipeline)


def test_sections_as_mapping_dataclass_or_omegaconf_node() -> None:
    expected = ThreeDConfig(layout="given", zero=ZeroConfig(stage=3))
    for section in ({"stage": 3}, ZeroConfig(stage=3), OmegaConf.create({"stage": 3})):
        assert ThreeDConfig.from_mapping({"zero": section}) == expected
    assert ThreeDConfig.from_mapping(OmegaConf.create({"zero": {"stage": 3}})) == expected


def test_interpolations_floats_and_lists_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "pipeline_parallel_size: 2\n"
        "pipeline: {num_microbatches: '${pipeline_parallel_size}', partition: [layers.4]}\n"
        "tensor: {verify_tolerance: 1e-5}\n"
    )
    config = ThreeDConfig.from_file(file)
    assert config.pipeline == PipelineConfig(num_microbatches=2, partition=("layers.4",))
    assert config.tensor == TensorConfig(verify_tolerance=1e-5)


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
    ("override", "message"),
    [
        ("zero.stge=2", "unknown config key 'zero.stge': the nearest valid key is 'zero.stage'"),
        ("zero.stage=9", "zero.stage=9 is not allowed"),
        ("zero.stage", "override 'zero.stage' is no assignment"),
        ("zero.stage=[1", "can't read the config"),
        ("zero=2", "zero=2 is not allowed"),
        ("zero.stage=${nowhere}", "'nowhere' not found"),
    ],
)
def test_wrong_overrides_name_the_file_and_the_overrides(override: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ThreeDConfig.from_file(file, [override])
    assert str(file) in str(caught.value)
    assert override in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"- 1\n", "no mapping at its top level"),
        (b"zero: [1\n", "while parsing a flow sequence"),
        (b"zero: 1\nzero: 2\n", "found duplicate key zero"),
        (b"\xd0\x00", "can't decode"),
        (b"tensor_parallel_size: ???\n", "Missing mandatory value: tensor_parallel_size"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ThreeDConfig.from_file(file)
    assert str(file) in str(caught.value)


def test_config_is_frozen_and_pickles() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.tensor_parallel_size = 4  # type: ignore[misc]  # the mistake under test
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG
