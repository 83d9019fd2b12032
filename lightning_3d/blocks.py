"""Finding blocks: the one unit that the pipeline cuts between and that ZeRO, tensor parallel and recomputation share.

[Note: blocks and glue]
A *block* is a module that runs as a whole on one pipeline stage. Everything outside blocks (``training_step``, the
forward of outer modules, the loss) is *glue* and runs on every stage. Blocks are found by walking the module tree:
containers and modules that contain a container are descended into; the elements of a container are blocks whatever
they hold inside; any other module with parameters is a block. With ``type:REGEX`` the modules whose class name matches
are blocks, what contains one is descended into, and the rest is found as above.
"""

from __future__ import annotations

import re

import torchmetrics
from torch import nn

from lightning_3d.errors import PlanError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so they can't be a block themselves
_TYPE_PREFIX = "type:"


def find_blocks(root: nn.Module, partition: str = "parameters") -> dict[str, nn.Module]:
    """Find the blocks of ``root`` in definition order.

    Args:
        partition: The partition method; ``"type:REGEX"`` names the classes of blocks.

    Returns:
        FQN -> module. A module that is reachable by two names is listed once, under its first name.

    Raises:
        PlanError: the regular expression matches no class.
    """
    chosen = _matching(root, partition.removeprefix(_TYPE_PREFIX)) if partition.startswith(_TYPE_PREFIX) else set()
    blocks: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if isinstance(child, torchmetrics.Metric) or child in seen or not holds_state(child):
                continue
            seen.add(child)
            if child not in chosen and _is_outer(child, chosen, element=isinstance(module, _CONTAINERS)):
                visit(child, f"{fqn}.")
            else:
                blocks[fqn] = child

    visit(root, "")
    return blocks


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


def _matching(root: nn.Module, pattern: str) -> set[nn.Module]:
    names = {type(module).__name__ for module in root.modules() if module is not root and holds_state(module)}
    if not any(re.search(pattern, name) for name in names):
        raise PlanError(
            f"pipeline.partition='{_TYPE_PREFIX}{pattern}' matches no class of {type(root).__name__} that has"
            f" parameters. Its classes: {', '.join(sorted(names))}."
        )
    return {module for module in root.modules() if module is not root and re.search(pattern, type(module).__name__)}
