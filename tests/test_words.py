"""Names that gave way to the field's words stay away: an old one in the code of its room fails.

They are compared with the tokens of Python's code: names of classes, functions, attributes and variables, and
private names in strings.
"""

from __future__ import annotations

import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_3d

_ROOT = Path(lightning_3d.__file__).parent

OLD = {
    "": """
        Joint Joiner is_bent goes_by_data gives_more counts_once also_whole is_joint unsplit pass_point HeldMemory
        HeldAhead PlannedAhead Ahead keep_little _keep_little heed_signals_together rehearsed undisturbed Peeked
        leave_layouts lay_out _early outlets StandInDraws Unbuilt entangled Board failing_alike Origin Caused
        _giving_way doubtful _show_retained used_up EACH KeptAlike WrittenBack Replicas is_dealt leave_step reduce_late
        begin_gather is_elsewhere ends_itself bring_home take_back make_room give_up shown_state for_steps TailRun
        WholeTail""",
    "pipeline": """
        joint joints tail tails WAYS Average views sides Shown _left home homes Line line Decision Place joined""",
    "ranks": "Post Board board looks heed meet agreed",
    **dict.fromkeys(
        ("sharding", "tensor"),
        "Whole WHOLE Parts grouped marked enter need needs Need _meet answer then starts Call settle routes unread",
    ),
    "activations": "Kept KeptTensor given kept",
    "zero": "Whole divide settle lend follow arrive go_on",
    "checkpoint": "aside completed rest served alike Parts marked",
    "model/block_runner.py": "aside around _around Around joined Call meet",
}
"""Room or file -> the names that it does not have; of the whole package first."""


def _names(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME or (token.type == tokenize.STRING and token.string[1:2] == "_"):
                yield token.start[0], token.string.strip('"')


@pytest.mark.parametrize("room", OLD)
def test_old_words_stay_away(room: str) -> None:
    place, old = _ROOT / room, frozenset(OLD[room].split())
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    found = [f"{file.relative_to(_ROOT)}:{line} {name}" for file in files for line, name in _names(file) if name in old]
    assert not found, "\n".join(found)
