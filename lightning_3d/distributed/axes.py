"""The axes of the mesh, a row each, outermost first.

What an axis cuts decides what its ranks hold and see. All else follows from the rows: coordinates of ranks, process
groups, samplers and seeds, the labels of layouts, and where a layout that is not built is refused.

Groups have roles, which name what their ranks have in common, not how many axes that takes:

    state      hold the same weights, gradients and optimizer states, which ZeRO shards over them
    samples    draw samples of their own, as the replicas of data parallel do
    replica    work on one batch together
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AxisName = Literal["pp", "dp", "cp", "tp"]
Role = Literal["state", "samples", "replica"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisRow:
    """One axis: its names, and what its ranks share out."""

    name: AxisName
    setting: str
    """Its size, as `ThreeDConfig` has it."""
    label: str
    """As layouts are written: ``pipeline 2 x data 4``."""
    cuts: Literal["layers", "samples", "sequence", "features"]

    @property
    def cuts_model(self) -> bool:
        """Whether its ranks hold parts of the model: those of others hold the same, which ZeRO may shard over them."""
        return self.cuts in ("layers", "features")

    @property
    def has_one_batch(self) -> bool:
        """Whether its ranks work on the same samples."""
        return self.cuts != "samples"


AXES = (
    AxisRow(name="pp", setting="pipeline_parallel_size", label="pipeline", cuts="layers"),
    AxisRow(name="dp", setting="data_parallel_size", label="data", cuts="samples"),
    AxisRow(name="cp", setting="context_parallel_size", label="context", cuts="sequence"),
    AxisRow(name="tp", setting="tensor_parallel_size", label="tensor", cuts="features"),
)
"""Ranks along the last are neighbours, so that tensor parallel stays inside a node."""

ROLES: dict[Role, tuple[AxisName, ...]] = {
    "state": tuple(axis.name for axis in AXES if not axis.cuts_model),
    "samples": tuple(axis.name for axis in AXES if not axis.has_one_batch),
    "replica": tuple(axis.name for axis in AXES if axis.has_one_batch),
}
"""The axes along which a group of each role lies."""
