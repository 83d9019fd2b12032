"""Parameters and buffers of blocks that code outside of them reads in a step, as of a codebook or a tied table.

The rank that has the block sends the value to the others, whose copies take part in their graphs; a gradient counts
where the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_3d.pipeline.inline.exchange import Exchange
from lightning_3d.torch_internals.modules import attributes_replaced


class BlockWeights:
    """Answers reads of tensors of blocks.

    Args:
        blocks: FQN -> block.
        homes: FQN of a block -> index on the pp axis of the rank that has it.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], homes: Mapping[str, int], exchange: Exchange) -> None:
        self._exchange = exchange
        self._homes = {module: homes[fqn] for fqn, block in blocks.items() for module in block.modules()}

    @contextmanager
    def shown(self, is_in_glue: Callable[[], bool]) -> Iterator[None]:
        """Answer attributes of modules inside.

        Args:
            is_in_glue: Whether the present code is outside of blocks, and so runs on all ranks.
        """
        present = nn.Module.__getattr__

        def read(module: nn.Module, name: str) -> Any:
            value = present(module, name)
            if isinstance(value, Tensor) and module in self._homes and is_in_glue():
                return self._exchange.read(value, self._homes[module])
            return value

        with attributes_replaced(nn.Module, {"__getattr__": read}):
            yield
