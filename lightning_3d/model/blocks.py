"""Finding blocks: the one unit that the pipeline cuts between and that ZeRO, tensor parallel and recomputation share.

[Note: blocks and glue]
A *block* is a module that runs as a whole on one pipeline stage. Everything outside blocks (``training_step``, the
forward of outer modules, the loss) is *glue* and runs on every stage. Blocks are found by walking the module tree:
containers and modules that contain a container are descended into; the elements of a container are blocks whatever
they hold inside; any other module with parameters is a block. With ``type:REGEX`` the modules whose class name matches
are blocks, with a list of FQNs those of that name; what contains one is descended into, and the rest is found as above.
A module that is a block by one of its names is none inside of another block: that one is descended into, too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torchmetrics
from torch import nn

from lightning_3d.config.checks import TYPE_PREFIX
from lightning_3d.errors import PlanError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so they can't be a block themselves


def find_blocks(root: nn.Module, partition: str | Sequence[str] = "parameters") -> dict[str, nn.Module]:
    """Find the blocks of ``root`` in definition order.

    Args:
        partition: The partition method; ``"type:REGEX"`` names the classes of blocks, a sequence names some blocks.

    Returns:
        FQN -> module. A module that is reachable by two names is listed once, under its first name.

    Raises:
        PlanError: the regular expression matches no class, or a name is no module's.
    """
    chosen, opened = _chosen(root, partition), set[nn.Module]()
    while True:
        blocks = _walk(root, chosen, opened)
        single = set(blocks.values())
        holders = {block for block in single - chosen if not single.isdisjoint({*block.modules()} - {block})}
        if not holders:
            return blocks
        opened |= holders


def _walk(root: nn.Module, chosen: set[nn.Module], opened: set[nn.Module]) -> dict[str, nn.Module]:
    """The blocks where ``chosen`` modules are blocks, and ``opened`` ones are not."""
    blocks: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if isinstance(child, torchmetrics.Metric) or child in seen or not holds_state(child):
                continue
            seen.add(child)
            is_element = isinstance(module, _CONTAINERS)
            if child in opened or (child not in chosen and _is_outer(child, chosen, element=is_element)):
                visit(child, f"{fqn}.")
            else:
                blocks[fqn] = child

    visit(root, "")
    return blocks


def num_parameters(block: nn.Module) -> int:
    """Elements of all parameters of a block."""
    return sum(parameter.numel() for parameter in block.parameters())


def tied_groups(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """The FQNs of the blocks, those that share a parameter together, in definition order of the first of each."""
    groups: list[list[str]] = []
    for fqn, block in blocks.items():
        own = set(block.parameters())
        shares = [group for group in groups if any(own.intersection(blocks[other].parameters()) for other in group)]
        groups = [group for group in groups if group not in shares[1:]]
        if not shares:
            groups.append([fqn])
        else:
            shares[0] += [*(other for group in shares[1:] for other in group), fqn]
    return groups


def inner_blocks(fqn: str, block: nn.Module) -> dict[str, nn.Module]:
    """The coarsest blocks inside a block, in definition order; a container that is never called gives its own."""
    found: dict[str, nn.Module] = {}
    for name, child in block.named_children():
        if isinstance(child, torchmetrics.Metric) or not holds_state(child):
            continue
        if isinstance(child, _NEVER_CALLED):
            found |= inner_blocks(f"{fqn}.{name}", child)
        else:
            found[f"{fqn}.{name}"] = child
    return found


def holds_state(module: nn.Module) -> bool:
    """Whether the module has a parameter anywhere below it."""
    return next(module.parameters(), None) is not None


def _is_outer(module: nn.Module, chosen: set[nn.Module], *, element: bool) -> bool:
    """Whether to look for blocks inside: yes for what is never called, and for what contains a container."""
    if isinstance(module, _NEVER_CALLED) or any(inner in chosen for inner in module.modules()):
        return True
    if isinstance(module, nn.Sequential):
        return not element and len(module) > 1
    return not element and any(isinstance(inner, _CONTAINERS) and len(inner) > 1 for inner in module.modules())


def _chosen(root: nn.Module, partition: str | Sequence[str]) -> set[nn.Module]:
    """The modules that the user wants as blocks."""
    if not isinstance(partition, str):
        return {_named(root, fqn) for fqn in partition}
    return _matching(root, partition.removeprefix(TYPE_PREFIX)) if partition.startswith(TYPE_PREFIX) else set()


def _named(root: nn.Module, fqn: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))
    if fqn in modules and fqn:
        return modules[fqn]
    nearest = difflib.get_close_matches(fqn, [name for name in modules if name], n=1, cutoff=0)
    raise PlanError(
        f"pipeline.partition names the block {fqn!r}, but {type(root).__name__} has no module of that name."
        + "".join(f" The nearest is {name!r}." for name in nearest)
    )


def fqns_matching(pattern: str, fqns: Iterable[str], setting: str) -> list[str]:
    """The blocks that a pattern of a setting names; ``*`` and ``?`` as in a shell.

    Raises:
        PlanError: it names none.
    """
    fqns = list(fqns)
    named = [fqn for fqn in fqns if fnmatchcase(fqn, pattern)]
    if not named:
        nearest = difflib.get_close_matches(pattern, fqns, n=1, cutoff=0)
        raise PlanError(
            f"{setting} has the pattern {pattern!r}, which matches no block."
            + "".join(f" The nearest block is {fqn!r}." for fqn in nearest)
        )
    return named


def _matching(root: nn.Module, pattern: str) -> set[nn.Module]:
    names = {type(module).__name__ for module in root.modules() if module is not root and holds_state(module)}
    if not any(re.search(pattern, name) for name in names):
        raise PlanError(
            f"pipeline.partition='{TYPE_PREFIX}{pattern}' matches no class of {type(root).__name__} that has"
            f" parameters. Its classes: {', '.join(sorted(names))}."
        )
    return {module for module in root.modules() if module is not root and re.search(pattern, type(module).__name__)}
