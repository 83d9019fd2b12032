"""Which modules of which packages are trained, and which layouts refuse them, why: data of tests and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.parity import Layout
from tests.refusals import Refusal, markdown_table, refused_or


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module."""

    package: str
    """As pip calls it."""

    imported: str
    """What is imported of it."""

    module: str
    """Its key in `JOBS` of the file `jobs`."""

    jobs: str

    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """By layout."""

    whole: frozenset[str] = frozenset()
    """Layouts in which a rank holds (nearly) the whole model, as it is one block or tensor parallel is not worth it."""

    def cell(self, layout: str) -> str:
        """How the documentation puts what a layout makes of the module."""
        return refused_or(self.refused, layout, "works, whole on a rank" if layout in self.whole else "works")


NO_GRAPHS = {
    "pp 2": Refusal(
        message="A pipeline splits every tensor of a batch along dimension 0, so all must have the same length there",
        reason="its batches of graphs can't be split into microbatches",
    )
}
WHOLE_IN_TP = frozenset({"tp 2"})

TABLE = (
    Row(
        package="chemprop",
        imported="chemprop",
        module="MPNN",
        jobs="chemprop_jobs",
        refused=NO_GRAPHS,
        whole=WHOLE_IN_TP,
    ),
    Row(package="lightly", imported="lightly", module="LinearClassifier", jobs="lightly_jobs", whole=WHOLE_IN_TP),
    Row(package="pytorch-forecasting", imported="pytorch_forecasting", module="NBeats", jobs="forecasting_jobs"),
    Row(
        package="pytorch-forecasting",
        imported="pytorch_forecasting",
        module="TemporalFusionTransformer",
        jobs="forecasting_jobs",
    ),
    Row(package="scvi-tools", imported="scvi", module="SCVI", jobs="scvi_jobs", whole=WHOLE_IN_TP),
    Row(package="torchgeo", imported="torchgeo", module="ClassificationTask", jobs="torchgeo_jobs"),
)


LAYOUTS = {"dp 2": Layout(dp=2), "pp 2": Layout(pp=2, num_microbatches=2), "tp 2": Layout(tp=2)}
"""By the name of their column."""


def rendered() -> str:
    """The documentation's table."""
    rows = [[f"`{row.package}`", f"`{row.module}`", *map(row.cell, LAYOUTS)] for row in TABLE]
    return markdown_table(["package", "module", *LAYOUTS], rows)
