"""The state of this rank's blocks before a step in microbatches, to put it back where the step fails.

Code outside of blocks leaves nothing behind in any microbatch (``effects/``); blocks run as they are. Buffers that stay
as they are from one step to the next, as most do, are not copied for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lightning_3d.model.snapshot import Snapshot
from lightning_3d.torch_internals.modules import BUFFERS, TORCH_ATTRIBUTES, buffers_of
from lightning_3d.torch_internals.tensors import version_of

_IGNORED = TORCH_ATTRIBUTES - {BUFFERS}


class BlocksBefore:
    """State of blocks before a step.

    Args:
        blocks: Of this rank.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._modules = [
            module
            for module in dict.fromkeys(module for block in blocks for module in block.modules())
            if not type(module).__module__.startswith("torch.nn.") or buffers_of(module)
        ]
        self._snapshot: Snapshot | None = None
        self._versions: dict[int, int] = {}  # identity of a buffer -> its version before the last step

    def keep(self) -> None:
        """Before a step."""
        versions = self._versions

        def may_change(tensor: Tensor) -> bool:
            return versions.get(id(tensor)) != version_of(tensor)

        self._snapshot = Snapshot(self._modules, ignored=_IGNORED, with_data=may_change)
        self._versions = {id(buffer): version_of(buffer) for buffer in self._buffers()}

    @property
    def can_undo(self) -> bool:
        """Whether all that has changed since can be put back."""
        known = [buffer for buffer in self._buffers() if id(buffer) in self._versions]
        changed = [buffer for buffer in known if version_of(buffer) != self._versions[id(buffer)]]
        return self._snapshot is not None and all(map(self._snapshot.has_data_of, changed))

    def undo(self) -> None:
        """Put it back."""
        assert self._snapshot is not None
        self._snapshot.restore()

    def forget(self) -> None:
        """Let go of it."""
        self._snapshot = None

    def _buffers(self) -> Iterator[Tensor]:
        for module in self._modules:
            for buffer in buffers_of(module).values():
                if buffer is not None and not buffer.is_inference():
                    yield buffer
