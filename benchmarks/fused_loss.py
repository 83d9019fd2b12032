"""What head and loss take with and without logits, forward and backward, with a vocabulary of 128k.

    python -m benchmarks.fused_loss

Two turns of each in processes of their own. Memory is the peak above what was there before (weights, rows), with the
gradient of the weight, which both make, and without it; time is the median over steps.

    fused      ``cross_entropy`` of lazy logits; bars: 1/8 of the memory, 1.05 of the time
    apart      ``F.linear``, then ``F.cross_entropy``
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_3d.tensor.vocabulary.head_call import HeadCall
from lightning_3d.tensor.vocabulary.lazy_tensor import lazy_logits

CLASSES, WIDTH, ROWS, STEPS = 128 * 1024, 128, 1024, 3


def _fused(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = lazy_logits(HeadCall(rows, weight, None, num_classes=CLASSES))
    return F.cross_entropy(logits.float(), target)


def _apart(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight).float(), target)


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"fused": _fused, "apart": _apart}


def measure(name: str) -> tuple[float, float]:
    """Peak bytes above the start, and the seconds of a step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.02 * torch.randn(CLASSES, WIDTH, generator=generator)).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), generator=generator).to(device)
    before = _peak(device)
    seconds = []
    for _ in range(STEPS):
        rows.grad = weight.grad = None
        start = time.perf_counter()
        CONTENDERS[name](rows, weight, target).backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return _peak(device) - before, statistics.median(seconds)


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _alone(name: str) -> tuple[float, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, name).result()


def main() -> None:
    """Measure and print."""
    turns = [{name: _alone(name) for name in CONTENDERS} for _ in range(2)]
    gradient = CLASSES * WIDTH * (2 if torch.cuda.is_available() else 4)
    table = Table(
        "", "peak MiB", "of apart's", "less gradient", "seconds", "of apart's", title=f"[{ROWS}, {WIDTH}] x {CLASSES}"
    )
    for name in CONTENDERS:
        memory = min(turn[name][0] for turn in turns)
        other = min(turn["apart"][0] for turn in turns)
        ratio = statistics.median(turn[name][1] / turn["apart"][1] for turn in turns)
        table.add_row(
            name,
            f"{memory / 2**20:,.0f}",
            f"{memory / other:.3f}",
            f"{(memory - gradient) / (other - gradient):.3f}",
            f"{min(turn[name][1] for turn in turns):.3f}",
            f"{ratio:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
