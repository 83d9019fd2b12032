"""The loss in what a training step returned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_3d.errors import StepError


def check_loss(output: object) -> Tensor:
    """The loss in what ``training_step`` returned, to run the backward from.

    Raises:
        StepError: there is none, or no parameter would get a gradient from it.
    """
    loss = loss_of(output)
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss that does not require grad, so nothing would be trained. Don't detach it or"
            " compute it under torch.no_grad(), and leave at least one parameter that it depends on unfrozen."
        )
    return loss


def loss_of(output: object) -> Tensor:
    """The loss in what ``training_step`` returned; 0-d or of one element.

    Raises:
        StepError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise StepError(
            f"training_step returned {type(output).__name__}, not a loss. Return a 0-d tensor, or a dict with one under"
            " 'loss'. A step can't be skipped by returning None: the ranks of the other replicas would wait for this"
            " one's gradients."
        )
    if loss.numel() != 1:
        raise StepError(f"training_step returned a loss of shape {tuple(loss.shape)}; reduce it to a 0-d tensor.")
    return loss
