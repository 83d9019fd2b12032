"""Evaluations that read data of blocks between their calls, as ``generate()`` does for every token, in a pipeline."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d import ThreeDStrategy
from tests import architectures as a
from tests.hugging_face import CLM, HuggingFace, hugging_face, text_settings
from tests.parity import Layout, fitted
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

Seen = dict[str, Any]

LAYOUTS = [Layout(pp=2), Layout(pp=2, tp=2), Layout(pp=2, dp=2)]


class Generates(HuggingFace):
    """Continues the texts that it validates, and one in a hook."""

    def __init__(self) -> None:
        settings = text_settings(width=16, num_heads=2, num_layers=4)
        model = hugging_face("LlamaConfig", CLM, **settings, bos_token_id=1, eos_token_id=7)
        super().__init__(model.model, {})
        self.hooked: list[list[int]] = []

    def _continued(self, ids: Tensor) -> Tensor:
        generated: Tensor = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
        )
        return generated

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        tokens = self._continued(batch["input_ids"])
        self.log("generated", tokens.sum() / len(tokens), sync_dist=True, batch_size=len(tokens))

    def on_validation_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        with strategy.summon_full_params() if isinstance(strategy, ThreeDStrategy) else nullcontext(), torch.no_grad():
            self.hooked += self._continued(torch.arange(8, 14).view(1, -1)).tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._continued(batch["input_ids"])


def _run(layout: Layout | None) -> tuple[Seen, list[str]]:
    trainer, model = fitted(layout, Generates, data=a.text, batches=2, epochs=1)
    assert isinstance(model, Generates)
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    batch = torch.utils.data.DataLoader(a.text(4), batch_size=4)
    told = [*trainer.strategy.plan.findings.evaluations] if isinstance(trainer.strategy, ThreeDStrategy) else []
    predicted = [] if layout is not None and layout.dp > 1 else trainer.predict(model, batch)
    return {**numbers, "hooked": model.hooked, "predicted": predicted}, told


@pytest.fixture(scope="module")
def expected() -> Seen:
    return _run(None)[0]


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS, lambda layout: layout.world_size > 2), ids=str)
def test_generation_is_that_of_one_process(layout: Layout, expected: Seen, workers: WorkerPools) -> None:
    runs = workers(layout.world_size).run(_run, layout)
    for seen, _ in runs:
        for name, value in expected.items():
            if name != "predicted" or layout.dp == 1:
                torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-5)
    (told,) = runs[0][1]
    assert told.startswith("validation_step: steps run inline, on the whole batch")


class Searches(Generates):
    """Continues the texts that it validates by beam search, which reorders what its blocks have cached."""

    def _continued(self, ids: Tensor) -> Tensor:
        generated: Tensor = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, num_beams=2, do_sample=False
        )
        return generated


def _searched(layout: Layout | None) -> tuple[Tensor, list[list[int]]]:
    trainer, model = fitted(layout, Searches, data=a.text, batches=1, epochs=1)
    assert isinstance(model, Searches)
    return trainer.callback_metrics["generated"], model.hooked


def test_beam_search_on_shards_is_that_of_one_process(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_searched, None)
    for found in workers(2).run(_searched, Layout(tp=2)):
        torch.testing.assert_close(found, expected)
