"""The printed tensor-parallel plan: a row per weight of every distinct block, with collectives, bytes and share."""

from __future__ import annotations

from rich.console import Console

from lightning_3d.tensor import plan_block, replicated_plan
from lightning_3d.tensor.table import tensor_table
from tests.models import Block
from tests.test_tensor_plan import tokens


def _lines(*blocks: object) -> list[str]:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(tensor_table(blocks))  # type: ignore[arg-type]
    return [" ".join(line.strip("│┃ ").split()) for line in captured.get().splitlines()]


def test_blocks_with_the_same_plan_share_rows() -> None:
    plan = plan_block(Block(32, 4), (tokens(),), {}, size=2)
    lines = _lines(("blocks.0", "Block", plan), ("blocks.1", "Block", plan), ("blocks.2", "Block", plan))
    share, size = f"{plan.sharded_share:.0%}", f"{plan.communicated_bytes / 1024:,.0f} KiB"
    assert f"Block: blocks.0 and 2 more │ 2 + 2 all-reduces, {size} │ {share}" in lines
    assert "attention.q.weight [32, 32] │ column" in lines
    assert "mlp.2.weight [32, 128] │ row" in lines
    assert "mlp.2.bias [32] │ replicate: added after the all-reduce of a row weight" in lines


def test_replicated_block_says_why() -> None:
    plan = replicated_plan(Block(32, 4), size=2, reason="its proof failed")
    lines = _lines(("blocks.0", "Block", plan))
    assert "Block: blocks.0 │ replicated: its proof failed │ 0%" in lines
