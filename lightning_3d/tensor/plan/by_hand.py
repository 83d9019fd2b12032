"""Rules by hand, ``tensor.plan``: which weights are cut how, in place of what planning would find.

A rule is an FQN pattern and a style. The pattern, with ``*`` and ``?`` as in a shell, names parameters, or modules and
with them their parameters; of several rules that name a weight the last one holds. A bias goes with its weight.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from lightning_3d.errors import PlanError
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan, Role

Rule = tuple[str, str]
"""An FQN pattern and the role of the weights that it names."""


def roles_by_hand(
    rules: Sequence[Rule], module: nn.Module, blocks: Mapping[str, nn.Module]
) -> Mapping[str, Mapping[str, Role]]:
    """The roles that rules by hand give the weights of each block.

    Args:
        rules: In order; the last one that names a weight holds.
        module: The whole model, whose FQNs the patterns mean.
        blocks: FQN -> block.

    Returns:
        FQN of a block -> name of a parameter in it -> role; blocks without a rule are absent.

    Raises:
        PlanError: a rule names nothing, only what lies outside of blocks, or only vectors that it would shard.
    """
    owners = {
        f"{fqn}.{name}": (fqn, name)
        for fqn, block in blocks.items()
        for name, _ in block.named_parameters(remove_duplicate=False)
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    roles: dict[str, dict[str, Role]] = {}
    for pattern, role in rules:
        named = [fqn for fqn in parameters if _names(pattern, fqn)]
        if not named:
            raise PlanError(f"tensor.plan: {pattern!r} names no parameter and no module.{_nearest(pattern, module)}")
        inside = [fqn for fqn in named if fqn in owners]
        if not inside:
            raise PlanError(
                f"tensor.plan: {pattern!r} names {named[0]}, which lies outside of blocks and stays replicated. Let"
                " pipeline.partition='type:REGEX' name the classes that are blocks, or remove the rule."
            )
        if role != "replicate" and all(parameters[fqn].dim() < 2 for fqn in inside):
            raise PlanError(
                f"tensor.plan: {pattern!r} asks for {role!r} of {inside[0]} {list(parameters[inside[0]].shape)}, but"
                " biases and norms go with the weights beside them. Let the rule name a weight, or remove it."
            )
        for fqn in inside:
            block, name = owners[fqn]
            roles.setdefault(block, {})[name] = cast(Role, role)  # the config has checked it
    return roles


def check_roles(plan: BlockTensorPlan, roles: Mapping[str, Role], block: str) -> None:
    """After planning.

    Raises:
        PlanError: a weight of two or more dims can't be what a rule asks for.
    """
    for name, role in roles.items():
        weight = plan.weight(name)
        if weight.role != role and len(weight.shape) > 1:
            why = weight.reason or plan.reason or "planning made it so"
            raise PlanError(
                f"tensor.plan asks for {role!r} of {block}.{name} {list(weight.shape)}, but it is"
                f" {weight.role!r}: {why}. Change or remove the rule."
            )


def _names(pattern: str, fqn: str) -> bool:
    parts = fqn.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def _nearest(pattern: str, module: nn.Module) -> str:
    names = [fqn for fqn, _ in module.named_modules() if fqn] + [fqn for fqn, _ in module.named_parameters()]
    nearest = difflib.get_close_matches(pattern.replace("*", "0"), names, n=1)
    return f" The nearest name is {nearest[0]!r}." if nearest else ""
