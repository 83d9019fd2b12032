"""Which modules of which packages are trained, and what layouts make of them: data of tests and documentation."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity import Layout
from tests.refusals import markdown_table


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

    whole: frozenset[str] = frozenset()
    """Layouts in which a rank holds (nearly) the whole model, as it is one block or tensor parallel is not worth it."""

    inline: bool = False
    """Whether a pipeline runs its steps inline, as its batches can't be split."""

    def cell(self, layout: str) -> str:
        """How the documentation puts what a layout makes of the module."""
        if self.inline and layout == "pp 2":
            return "works, inline"
        return "works, whole on a rank" if layout in self.whole else "works"


WHOLE_IN_TP = frozenset({"tp 2"})

TABLE = (
    Row(package="chemprop", imported="chemprop", module="MPNN", jobs="chemprop_jobs", whole=WHOLE_IN_TP, inline=True),
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


LAYOUTS = {"dp 2": Layout(dp=2), "pp 2": Layout(pp=2), "tp 2": Layout(tp=2)}
"""By the name of their column."""


def rendered() -> str:
    """The documentation's table."""
    rows = [[f"`{row.package}`", f"`{row.module}`", *map(row.cell, LAYOUTS)] for row in TABLE]
    return markdown_table(["package", "module", *LAYOUTS], rows)
