"""A page of pictures and tables in one file, which needs no other. Needs matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from rich.console import Console, RenderableType

from lightning_3d.callbacks.drawing import Figure, memory_figure, save, spans_figure, weights_figure
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.schedule_order import schedule_order
from lightning_3d.planning.timing import play

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em }}
pre {{ overflow-x: auto; line-height: 1.15 }}
img {{ max-width: 100% }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""

Section = tuple[str, RenderableType | Figure]
"""A heading, and a picture or what rich prints."""


def plan_sections(plan: Plan, planned: RenderableType | None = None) -> Iterator[Section]:
    """Yield what there is to show of a plan.

    Args:
        planned: What is printed in the place of the plan.
    """
    yield "Plan", planned or plan
    if plan.memory:
        yield "Memory", memory_figure(plan.memory)
    yield "Weights", weights_figure(plan)
    if plan.shape.pp > 1 and plan.inline is None:
        order = schedule_order(plan.schedule, plan.stage_ranks, plan.num_microbatches)
        times = [float(stage.load) for stage in plan.stages]
        spans = play(order, [3 * time * len(times) / max(sum(times), 1) for time in times])
        yield "Schedule", spans_figure([(f"{plan.schedule}, planned", spans, "forwards of a stage, on average")])


def write_page(path: Path, title: str, sections: Iterable[Section]) -> None:
    """Write a page that needs no other file."""
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{_html(content)}" for heading, content in sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PAGE.format(title=escape(title), body=body), encoding="utf-8")


def _html(content: RenderableType | Figure) -> str:
    if isinstance(content, Figure):
        save(content, file := io.BytesIO())
        return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
    console = Console(record=True, file=io.StringIO(), width=150, markup=False)
    console.print(content)
    return console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
