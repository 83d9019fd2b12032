"""Stand-ins that optimizers step in place of the module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.tensors import version_of
from lightning_3d.zero.attributes import users_attributes
from lightning_3d.zero.wrapped_optimizers import with_wrapped


class StandIns:
    """Parameters that are stepped in place of others: the same in every step, as optimizers may remember them."""

    def __init__(self) -> None:
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
        """That of a parameter, with these values, no gradient, and the attributes that users set on the parameter."""
        stepped = self._made.get(parameter)
        if stepped is None or (stepped.dtype, stepped.device) != (values.dtype, values.device):
            stepped = self._made[parameter] = nn.Parameter(values, requires_grad=False)
        stepped.requires_grad_(parameter.requires_grad)
        stepped.grad = None
        stepped.data = values
        vars(stepped).update(users_attributes(parameter))
        return stepped

    def let_go(self, parameter: nn.Parameter) -> Tensor:
        """The values of that of a parameter, whose memory it keeps no longer."""
        stepped = self._made[parameter]
        values, stepped.grad = stepped.data, None
        stepped.data = values.new_empty(0)
        return values


class Swapped:
    """An optimizer whose groups hold others in place of parameters, which have their states, or lack them.

    Args:
        stepped: Parameter -> what is stepped in its place; None leaves it out.
        then: Called once the parameters are back.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stepped: Mapping[nn.Parameter, nn.Parameter | None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer, self._then = optimizer, then
        self._stepped = {parameter: other for parameter, other in stepped.items() if other is not None}
        self._originals = [[*group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            others = [stepped.get(parameter, parameter) for parameter in group["params"]]
            group["params"][:] = [other for other in others if other is not None]  # LBFGS remembers this list
        _rekey(optimizer, self._stepped)

    def gradients(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Parameter -> something that differs once its gradient is another, or was changed in place."""
        pairs = self._stepped.items()
        return {p: (id(other.grad), version_of(other.grad)) for p, other in pairs if other.grad is not None}

    def without_gradients(self, before: Mapping[nn.Parameter, tuple[int, int]]) -> list[nn.Parameter]:
        """Parameters whose gradients the optimizer has let go of, as by ``zero_grad()`` in its step.

        Args:
            before: The `gradients` that it was given.

        Raises:
            StepError: it has changed others in place, as by ``zero_grad(set_to_none=False)``.
        """
        now = self.gradients()
        if not now.items() <= before.items():
            raise StepError(
                f"{type(self._optimizer).__name__} changes gradients in its step, before it calls its closure, but"
                " steps parts of parameters that have none of their own: let it call zero_grad(), which sets them"
                " to None, or use one process or plain replicas (zero.stage=0)."
            )
        return [parameter for parameter in before if parameter not in now]

    def back(self) -> None:
        """The other way."""
        for group, parameters in zip(self._optimizer.param_groups, self._originals, strict=True):
            group["params"][:] = parameters
        _rekey(self._optimizer, {other: parameter for parameter, other in self._stepped.items()})
        for other in self._stepped.values():
            other.grad = None
        self._then()


def _rekey(optimizer: Optimizer, names: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for one in with_wrapped(optimizer):
        for old, new in names.items():
            if old in one.state:
                one.state[new] = one.state.pop(old)
