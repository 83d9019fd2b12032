"""Context parallel for any module: the law's models that have sequences, on two and on four slices."""

from __future__ import annotations

import pytest

from tests.law.cover import Case
from tests.law.models import MODELS
from tests.law.test_law import judged
from tests.workers import WorkerPools

SLICED = [case for name in MODELS if (case := Case(name, "cp2")).is_allowed]
ON_FOUR = [
    case
    for name in MODELS
    if (case := Case(name, "cp4")).is_allowed
    and name
    in (
        *(
            "gpt",
            "llama",
            "llama-one-kv-head",
            "phi3",
            "gpt2",
            "mixtral",
            "mixtral-grouped",
            "qwen3-moe",
            "llama4",
            "gemma3n",
        ),
        *(
            "bert",
            "deberta-v2",
            "t5",
            "bart",
            "deepseek-v3",
            "swin",
            "vit",
            "clip",
            "whisper",
            "wav2vec2",
            "mamba",
            "dit",
        ),
        *("nn-transformer", "residual-vit", "odd-gpt"),
    )
]


@pytest.mark.matrix
@pytest.mark.parametrize("sliced", [*SLICED, *ON_FOUR], ids=str)
def test_slices_train_as_one_process(workers: WorkerPools, sliced: Case) -> None:
    assert not judged(workers, sliced)
