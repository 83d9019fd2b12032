"""The picture of a schedule, planned and measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_3d import ConfigError
from lightning_3d.callbacks import Report, ScheduleTimeline
from lightning_3d.cli import main
from lightning_3d.pipeline.spans import Timeline
from lightning_3d.planning.schedule_order import Computation, schedule_order
from lightning_3d.planning.timing import idle_share
from tests.models import TinyGPT, loader, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools


class Counting(ScheduleTimeline):
    """Counts the pictures."""

    num_drawn = 0

    def on_train_batch_end(self, *args: Any) -> None:
        before = self.timeline
        super().on_train_batch_end(*args)
        self.num_drawn += self.timeline is not before


def _fit(layout: Layout, path: str) -> Timeline | None:
    timeline = Counting(path, step=1)
    settings = {
        **QUIET,
        "max_steps": 5,  # of two epochs
        "enable_checkpointing": False,
        "callbacks": [Report(Path(path).with_suffix(".html")), timeline],
    }
    trainer = L.Trainer(devices=layout.world_size, strategy=layout.strategy(), **settings)
    trainer.fit(TinyGPT(), loader(tokens(24), global_batch_size=8))
    assert timeline.num_drawn == 1
    return timeline.timeline


SPLIT = {"input", "weight"}


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("1f1b", {"forward", "backward"}),
        ("zbv", {"forward"} | SPLIT),
    ],
)
def test_a_real_run_is_drawn_as_it_was_planned(
    workers: WorkerPools, tmp_path: Path, schedule: Any, kinds: set[str]
) -> None:
    path = tmp_path / "pictures" / "timeline.png"
    layout = Layout(pp=2, schedule=schedule, num_microbatches=4)
    for timeline in workers(2).run(_fit, layout, str(path)):
        assert timeline is not None
        for planned, measured in zip(timeline.planned, timeline.measured, strict=True):
            assert [(s.kind, s.stage, s.microbatch) for s in planned] == [
                (s.kind, s.stage, s.microbatch) for s in measured
            ]
            assert all(span.start < span.end for span in measured)
        stage_ranks = layout.strategy().config.pipeline.stage_ranks(2)
        assert schedule_order(schedule, stage_ranks, 4) == [
            [Computation(kind=s.kind, stage=s.stage, microbatch=s.microbatch) for s in rank]
            for rank in timeline.planned
        ]
        assert kinds <= {span.kind for rank in timeline.measured for span in rank}
        assert 0 < idle_share(timeline.measured) < 1
    assert path.stat().st_size > 10_000
    page = path.with_suffix(".html").read_text()
    assert page.count('src="data:image/png;base64,') == 3  # weights, the schedule as planned and as measured
    assert all(text in page for text in ("<h1>TinyGPT on 2 ranks</h1>", "what each rank holds", "loss: ", "torch: "))
    assert "in the place of a ScheduleTimeline" in page  # how to get what Telemetry measures


@pytest.mark.parametrize(
    ("schedule", "stages", "said"),
    [("1f1b", 4, "33 forwards of a stage, of which a rank waits 27.3%"), ("zbv", 8, "51 forwards")],
)
def test_a_schedule_is_drawn_by_the_command(
    schedule: str, stages: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 1F1B takes (p - 1) + m times a forward and a backward, of which (p - 1) wait."""
    path = tmp_path / "schedule.png"
    main(["timeline", f"--schedule={schedule}", f"--stages={stages}", "--microbatches=8", f"--output={path}"])
    assert said in capsys.readouterr().out
    assert path.stat().st_size > 10_000
    with pytest.raises(SystemExit):
        main(["timeline", "--schedule=interleaved", "--stages=3"])
    assert "3 stages can't be shared out" in capsys.readouterr().err


def test_without_matplotlib_the_callback_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("drawing", "page"):
        monkeypatch.delitem(sys.modules, f"lightning_3d.callbacks.{name}", raising=False)
    for name in ("matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))):  # of other tests
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r'pip install "lightning-3d\[pictures\]"'):
        ScheduleTimeline()
    with pytest.raises(ConfigError, match=r'pip install "lightning-3d\[pictures\]"'):
        Report()
