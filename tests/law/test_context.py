"""Context parallel for any module: the law's models that have sequences, on slices, alone and with other axes."""

from __future__ import annotations

import pytest

from tests.law.cover import Case
from tests.law.models import MODELS
from tests.law.test_law import judged
from tests.workers import WorkerPools

_ON_FOUR = """
gpt llama llama-one-kv-head phi3 gpt2 mixtral mixtral-grouped qwen3-moe llama4 gemma3n bert deberta-v2 t5 bart
deepseek-v3 swin vit clip whisper wav2vec2 mamba dit nn-transformer residual-vit odd-gpt
"""
_COMPOSED = "llama llama-one-kv-head gpt2 mixtral bert t5 vit whisper mamba nn-transformer odd-gpt dit"

CASES = [
    Case(name, layout)
    for layout, models in {
        "cp2": MODELS,
        "cp4": _ON_FOUR.split(),
        "pp2-cp2": _COMPOSED.split(),
        "cp2-tp2": _COMPOSED.split(),
        "pp2-cp2-tp2": ("gpt", "t5"),
    }.items()
    for name in models
    if Case(name, layout).is_allowed
]


@pytest.mark.matrix
@pytest.mark.parametrize("sliced", CASES, ids=str)
def test_slices_train_as_one_process(workers: WorkerPools, sliced: Case) -> None:
    assert not judged(workers, sliced)
