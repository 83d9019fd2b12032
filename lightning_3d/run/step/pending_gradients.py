"""Gradients of a pipeline step until Lightning asks for the backward.

[Note: pending gradients]
A schedule runs forward and backward together, inside ``training_step``. Lightning's automatic optimization calls
``training_step``, then ``zero_grad``, then ``backward``. So the new gradients are set aside before ``zero_grad`` can
clear them, and ``backward`` adds them to what accumulated before, scaled by whatever was applied to the loss meanwhile.
The loss that Lightning gets is a leaf; its gradient is that scale, and its hook is where the backward has come to.

Gradients that an optimizer has used wait for ``zero_grad`` only; unless someone looks at them there, they go before the
step, which then needs memory for one set of gradients, not two.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.lightning_helpers import callbacks_of
from lightning_3d.zero.engine import NO_GRADIENTS, HeldGradients, Zero


class PendingGradients:
    """Holds the gradients of one step.

    Args:
        zero: Holds the gradients.
    """

    def __init__(self, zero: Zero) -> None:
        self._zero = zero
        self._before = NO_GRADIENTS
        self._new: HeldGradients | None = None
        self.used = False
        """Whether the next step need not keep the gradients that are there."""

    def begin(self) -> None:
        """Before a step: set older gradients aside."""
        older = self._zero.take_gradients()
        self._before, self.used = NO_GRADIENTS if self.used else older, False

    def hold(self, loss: Tensor) -> Tensor:
        """After a step: set its gradients aside and put the older ones back.

        Args:
            loss: The step's loss, a value without a graph.

        Returns:
            A leaf with the loss's value; its backward releases the gradients.
        """
        self._new = self._zero.take_gradients()
        self._zero.put_gradients(self._before)
        self._before = NO_GRADIENTS
        leaf = loss.detach().clone().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._release)
        return leaf

    def abandon(self) -> None:
        """After a step that has failed, whose gradients are gone: put the older ones back."""
        self._zero.put_gradients(self._before)
        self._before = NO_GRADIENTS

    def check_released(self) -> None:
        """After the backward.

        Raises:
            StepError: the loss that was given is not made from the step's loss.
        """
        if self._new is not None:
            raise StepError(
                "backward() was called with a loss that does not come from the last training_step. With a pipeline each"
                " training_step runs forward and backward together; optimizers whose closure runs several of them"
                " (LBFGS) and extra backward calls need pipeline_parallel_size=1."
            )

    def _release(self, loss: Tensor) -> None:
        """Add the step's gradients, scaled like its loss."""
        assert self._new is not None
        assert loss.grad is not None
        self._zero.add_gradients(self._new, scale=loss.grad.reshape(()))
        self._zero.gather_grads()
        self._new = None


_SEE_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "optimizer_step",
    "optimizer_zero_grad",
)


def gradients_seen(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the user's code may look at gradients between a backward and the end of the batch."""
    callbacks = [callback for callback in callbacks_of(trainer) if _is_users(callback)]
    return not module.automatic_optimization or _are_overridden(_SEE_GRADIENTS, module, callbacks)


def zeroes_unseen(trainer: Trainer, module: LightningModule) -> bool:
    """Whether ``zero_grad`` after an optimizer's step shows the gradients to nobody."""
    return not _are_overridden(("on_before_zero_grad", "optimizer_zero_grad"), module, callbacks_of(trainer))


def _is_users(callback: Callback) -> bool:
    own = ("lightning.", "lightning_3d.")
    return isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith(own)


def _are_overridden(hooks: Iterable[str], module: LightningModule, callbacks: Iterable[Callback]) -> bool:
    """Whether the module, or a callback that has such a hook, overrides one of them."""
    return any(
        is_overridden(hook, module, LightningModule)
        or (hasattr(Callback, hook) and any(is_overridden(hook, callback, Callback) for callback in callbacks))
        for hook in hooks
    )
