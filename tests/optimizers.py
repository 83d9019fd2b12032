"""Optimizers written by hand, as users write them, for the tests."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer


class ByHand(Optimizer):
    """Runs the closure, then `update` on every parameter that has a gradient.

    Args:
        defaults: More settings of its groups.
    """

    def __init__(self, params: Any, lr: float = 0.05, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        """Before the parameters of a group."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter: that of gradient descent."""
        parameter.sub_(gradient, alpha=group["lr"])

    def kept(self, parameter: nn.Parameter, name: str, initial: Tensor | float = 0.0) -> Tensor:
        """A state of the parameter, at first `initial`."""
        state: dict[str, Tensor] = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter) + initial
        return state[name]


class Noted(ByHand):
    """Divides the gradients of some parameters by their norm: of those that an attribute of theirs names, or a state
    that it made with them, or a set of its own.
    """

    def __init__(self, params: Any, by: str) -> None:
        super().__init__(params)
        named = [p for group in self.param_groups for p in group["params"] if p.dim() > 1]
        self.by, self.named = by, set(named if by == "set" else [])
        for parameter in named:
            if by == "attribute":
                parameter.is_named = True
            elif by == "state":
                self.state[parameter]["is_named"] = True

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        by_state = self.state[parameter].get("is_named", False)
        if by_state or getattr(parameter, "is_named", False) or parameter in self.named:
            gradient = gradient / gradient.norm()
        super().update(parameter, gradient, group)


class Normed(ByHand):
    """Divides gradients by their norm while a setting of the group says so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, normed=False)

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["num_steps"], state["momentum"] = 0, torch.zeros_like(parameter)
        state["num_steps"] += 1
        state["momentum"].mul_(0.5).add_(gradient / gradient.norm() if group["normed"] else gradient)
        super().update(parameter, state["momentum"], group)


# ---- element by element


class Lion(ByHand):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675, but for the sign, which rounding turns around."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        momentum = self.kept(parameter, "momentum")
        parameter.sub_(torch.tanh(10 * torch.lerp(momentum, gradient, 0.1)), alpha=group["lr"])
        momentum.lerp_(gradient, 0.01)


class ScheduleFree(ByHand):
    """Counts steps and sums weights in its groups; Defazio et al. 2024, https://arxiv.org/abs/2405.15682.

    Its state is another tensor after each step.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr, num_steps=0, sum_of_weights=0.0)

    def begin(self, group: dict[str, Any]) -> None:
        group["num_steps"] += 1
        group["sum_of_weights"] += group["num_steps"] ** 0.5

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        base = self.kept(parameter, "base", parameter)
        parameter.lerp_(base, group["num_steps"] ** 0.5 / group["sum_of_weights"])
        parameter.sub_(gradient, alpha=0.1 * group["lr"])
        self.state[parameter]["base"] = base.sub(gradient, alpha=group["lr"])


class Switched(ScheduleFree):
    """Has other weights for evaluations than it trains, where it must not step, as those of schedulefree."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr)
        self.eval()

    def begin(self, group: dict[str, Any]) -> None:
        assert group["trains"], "call train() first"
        super().begin(group)

    def train(self) -> None:
        """Before steps."""
        self._switch(trains=True, weight=-1.0)

    def eval(self) -> None:
        """Before evaluations."""
        self._switch(trains=False, weight=0.5)

    @torch.no_grad()
    def _switch(self, *, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group.get("trains") != trains else ():
                if "base" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["base"], weight)
            group["trains"] = trains


class Derived(AdamW):
    """Its step and its base class's both have torch's hooks."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


# ---- whole parameters


class Lamb(ByHand):
    """Scales each parameter's step by its norm; You et al. 2020, https://arxiv.org/abs/1904.00962."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        ratio = parameter.norm() / (gradient.norm() + 1e-3)
        parameter.sub_(gradient * ratio.clamp(max=1.0), alpha=group["lr"])


class Lars(ByHand):
    """Lamb with momentum of the scaled steps; You et al. 2017, https://arxiv.org/abs/1708.03888."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        momentum = self.kept(parameter, "momentum")
        ratio = parameter.norm() / (gradient.norm() + 1e-3)
        momentum.mul_(0.9).add_(gradient * ratio.clamp(max=1.0), alpha=group["lr"])
        parameter.sub_(momentum)


class Shampoo(ByHand):
    """Preconditions rows and columns, with states of other shapes; Gupta et al. 2018, https://arxiv.org/abs/1802.09568."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        matrix = gradient.reshape(len(gradient) if gradient.dim() else 1, -1)
        state = self.state[parameter]
        for name, factor in (("left", matrix @ matrix.T), ("right", matrix.T @ matrix)):
            state[name] = state.get(name, torch.zeros_like(factor)) + factor
        left, right = (torch.linalg.inv(state[n] + torch.eye(len(state[n])).to(state[n])) for n in ("left", "right"))
        parameter.sub_((left @ matrix @ right).view(parameter.shape), alpha=group["lr"])


class MuonByHand(ByHand):
    """Muon for groups of matrices, signs with momentum for others, as one optimizer; Jordan et al. 2024.

    Its Newton-Schulz iterations have the dtype of the parameters.
    """

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        momentum = self.kept(parameter, "momentum").mul_(0.9).add_(gradient)
        if not group["is_matrix"]:
            parameter.sub_(torch.tanh(100 * momentum), alpha=0.1 * group["lr"])
            return
        step = momentum / momentum.norm()
        for _ in range(5):
            gram = step @ step.T
            step = 3.4445 * step + (2.0315 * gram @ gram - 4.775 * gram) @ step
        parameter.sub_(step, alpha=group["lr"])


# ---- all parameters


class ClippingAdam(Adam):
    """Clips all gradients together in its step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()
        return loss


class Prodigy(ByHand):
    """One rate for all parameters, by how far they are from their initial values, which it keeps when it is made; after
    Mishchenko et al. 2023, https://arxiv.org/abs/2306.06101.
    """

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr=lr, rate=0.01, distance=0.0)
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            self.state[parameter]["initial"] = parameter.detach().clone()

    def begin(self, group: dict[str, Any]) -> None:
        sums = []
        for p in [parameter for parameter in group["params"] if parameter.grad is not None]:
            group["distance"] += group["rate"] * float((p.grad * (self.kept(p, "initial", p) - p)).sum())
            sums.append(float(self.kept(p, "sum").add_(p.grad, alpha=group["rate"]).abs().sum()))
        group["rate"] = 0.01 + 0.1 * math.sqrt(abs(group["distance"]) / (1e-8 + sum(sums)))

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient, alpha=group["lr"] * group["rate"])


class Sam(ByHand):
    """Takes its gradient a little way up, by a second closure; Foret et al. 2021, https://arxiv.org/abs/2010.01412.

    It remembers its parameters in a list of its own.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr)
        self.listed = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        parameters = [parameter for parameter in self.listed if parameter.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad / norm, alpha=0.05)
        torch.enable_grad()(closure)()
        for parameter, value in zip(parameters, before, strict=True):
            has_gradient = parameter.grad is not None  # the second run may take another path than the first
            parameter.copy_(value.sub(parameter.grad, alpha=self.param_groups[0]["lr"]) if has_gradient else value)
        return loss


# ---- by communication of its own


class SharedMuon(ByHand):
    """Of each group every rank of the world steps the matrices that are its turn, and sends them to the others; after
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

    Args:
        alone: Steps of descent without communication before.
    """

    def __init__(self, params: Any, alone: int = 0) -> None:
        super().__init__(params)
        self.alone = alone

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.alone -= 1
        if self.alone >= 0:
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                owner = number % dist.get_world_size()
                if owner == dist.get_rank() and parameter.grad is not None:
                    momentum = self.kept(parameter, "momentum").mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum / momentum.norm(), alpha=group["lr"])
                shares = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
                dist.all_gather(shares, parameter.detach())
                parameter.copy_(shares[owner])
        return loss


# ---- wrappers


class Lookahead(Optimizer):
    """Goes back half of the way after two steps of another optimizer; Zhang et al. 2019, https://arxiv.org/abs/1907.08610.

    It does not call ``Optimizer.__init__``, shares the other's groups, and keeps its states there, as timm's does.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner, self.state, self.defaults = inner, defaultdict(dict), inner.defaults
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            group["num_steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"] if group["num_steps"] % 2 == 0 else ():
                if parameter.grad is not None:
                    slow = self.inner.state[parameter].setdefault("slow", parameter.clone())
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Chained(Optimizer):
    """Steps several optimizers, one after the other.

    Args:
        saves: How it saves their states: "list", "dict" of lists, or "groups" of the first alone.
    """

    def __init__(self, *inner: Optimizer, saves: str) -> None:
        super().__init__([group for optimizer in inner for group in optimizer.param_groups], {})
        self.inner, self.saves = inner, saves

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer in self.inner:
            optimizer.step()
        return loss

    def state_dict(self) -> Any:
        states = [optimizer.state_dict() for optimizer in self.inner]
        return {"list": states, "dict": {"optimizers": states}, "groups": states[0]}[self.saves]
