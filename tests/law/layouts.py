"""LAYOUTS: how ranks are shared among the axes pp, dp and tp, and the stages of ZeRO; most take two ranks."""

from __future__ import annotations

from tests.parity import Layout

LAYOUTS = {
    "pp2": Layout(pp=2, num_microbatches=2),
    "tp2": Layout(tp=2),
    "dp2-zero0": Layout(dp=2, zero=0),
    "dp2-zero1": Layout(dp=2, zero=1),
    "dp2-zero2": Layout(dp=2, zero=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "dp4-zero1": Layout(dp=4, zero=1),
    "dp4-zero3": Layout(dp=4, zero=3),
    "pp4": Layout(pp=4, num_microbatches=4),
    "tp4": Layout(tp=4),
    "cp2": Layout(cp=2),
    "cp2-zero3": Layout(cp=2, zero=3),
    "cp4": Layout(cp=4),
    "dp2-cp2-zero3": Layout(dp=2, cp=2, zero=3),
    "pp2-cp2": Layout(pp=2, cp=2, num_microbatches=2),
    "cp2-tp2": Layout(cp=2, tp=2),
    "cp2-tp2-zero3": Layout(cp=2, tp=2, zero=3),
    "pp2-cp2-zero3": Layout(pp=2, cp=2, zero=3, num_microbatches=2),
    "pp2-cp2-tp2": Layout(pp=2, cp=2, tp=2, num_microbatches=2),
    "pp2-dp2-zero2": Layout(pp=2, dp=2, zero=2, num_microbatches=2),
    "pp2-dp2-zero3": Layout(pp=2, dp=2, zero=3, num_microbatches=2),
    "pp2-tp2": Layout(pp=2, tp=2, num_microbatches=2),
    "dp2-tp2-zero3": Layout(dp=2, tp=2, zero=3),
    "pp2-dp2-tp2": Layout(pp=2, dp=2, tp=2, zero=1, num_microbatches=2),
}

OTHERS = {
    "cp2": "dp2-zero3",
    "cp2-zero3": "cp2",
    "cp4": "dp2-cp2-zero3",
    "dp2-cp2-zero3": "cp4",
    "pp2-cp2": "cp2-tp2",
    "cp2-tp2": "pp2-tp2",
    "cp2-tp2-zero3": "pp2-cp2",
    "pp2-cp2-zero3": "cp2-tp2",
    "pp2-cp2-tp2": "pp2-dp2-tp2",
    "pp2": "tp2",
    "tp2": "dp2-zero3",
    "dp2-zero0": "pp2",
    "dp2-zero1": "tp2",
    "dp2-zero2": "dp2-zero1",
    "dp2-zero3": "pp2",
    "dp4-zero1": "dp4-zero3",
    "dp4-zero3": "pp2-dp2-zero2",
    "pp4": "dp2-tp2-zero3",
    "tp4": "pp2-tp2",
    "pp2-dp2-zero2": "pp2-tp2",
    "pp2-dp2-zero3": "pp4",
    "pp2-tp2": "pp2-dp2-zero2",
    "dp2-tp2-zero3": "pp2-tp2",
    "pp2-dp2-tp2": "pp2-dp2-tp2",
}
"""Where a run begins that goes on in a layout; with as many ranks."""


def family(name: str) -> str:
    """The first axis that a layout adds to one process, for models: each is trained in a pipeline and on shards."""
    layout = LAYOUTS[name]
    return "pp" if layout.pp > 1 else "tp" if layout.tp > 1 else "cp" if layout.cp > 1 else "dp"
