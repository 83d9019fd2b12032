"""As Lightning's example of a module that is served: a callback that starts a server and asks it before training."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.serve import ServableModule, ServableModuleValidator
from torch import Tensor

from tests.examples.basics import Digits, Profiled
from tests.examples.data import NUM_CLASSES, SIZE
from tests.examples.place import Outcome, Place, outcome


class Served(Profiled, ServableModule):
    """Takes the pixels of a picture, and answers with the number of classes."""

    def configure_payload(self) -> dict[str, Any]:
        picture, _ = self.trainer.train_dataloader.dataset[0]  # type: ignore[union-attr]
        return {"body": {"x": picture.flatten().tolist()}}

    def configure_serialization(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
        def read(pixels: list[float]) -> Tensor:
            return torch.tensor(pixels).view(1, 1, SIZE, SIZE)

        return {"x": read}, {"output": lambda logits: logits.shape[-1]}

    def serve_step(self, x: Tensor) -> dict[str, Tensor]:
        return {"output": self.model(x)}

    def configure_response(self) -> dict[str, Any]:
        return {"output": NUM_CLASSES}


def served(place: Place) -> Outcome:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    validator = ServableModuleValidator(port=port, timeout=60)
    trainer = place.trainer([validator], max_epochs=1, limit_train_batches=2)
    trainer.fit(Served(), datamodule=Digits())
    return outcome(trainer, validator.successful if trainer.is_global_zero else True)
