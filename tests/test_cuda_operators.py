"""Every operator that CUDA takes where CPUs take others has its rules: what is kept, what draws, how it is sharded.

torch chooses operators by device above the level that dispatch modes see: attention, RMS norms, cuDNN's norms and RNNs.
Convolutions and products are chosen below, where modes see ``aten.convolution`` and ``aten.mm`` on all devices.
Optimizers, whose operators (``_foreach_*``, ``_fused_*``) no rule reads, are tried on the device where they step.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from lightning_3d.memory.block_cost import FORMULAS
from tests.fake_cuda.dispatched import JOBS, Seen
from tests.second_device import build

pytestmark = pytest.mark.skipif(
    build.compiler() is None, reason=f"torch's choices for CUDA are built by {build.COMPILER}, which is missing"
)

REPOSITORY = Path(__file__).parents[1]

CUDA_ALONE = {
    "aten._scaled_dot_product_cudnn_attention.default": True,
    "aten._scaled_dot_product_efficient_attention.default": True,
    "aten._scaled_dot_product_flash_attention.default": True,
    "flex_attention": True,
    "aten._cudnn_rnn.default": False,
    "aten._fused_rms_norm.default": False,
    "aten.cudnn_batch_norm.default": False,
    "aten.native_dropout.default": False,
}
"""Operator that no CPU takes in a forward -> whether selective recomputation keeps its results.

Those of an RNN are all that its backward needs, so that to keep them is not to recompute it.
"""

CPU_ALONE = {"aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.mkldnn_rnn_layer.default"}
"""Products that torch's counter of operations does not know."""

MOVES = {
    *("aten.constant_pad_nd.default", "aten.empty_like.default", "aten.empty_strided.default", "aten.fill_.Scalar"),
    *("aten.index_put_.default", "aten.sort.stable"),
}
"""Operators that CPUs have, too, where other code calls them."""

UNSHARDED = {"lstm", "mamba"}
"""Architectures of whose blocks tensor parallel shards none."""

Runs = dict[tuple[str, str], Seen]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """Architecture -> (precision, device) -> what was seen there."""
    library = build.library("fake_cuda", [Path(__file__).parent / "fake_cuda/choices.cpp"])
    result = tmp_path_factory.mktemp("fake_cuda") / "seen.pickle"
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"from tests.fake_cuda.dispatched import main; main({str(result)!r})"]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Runs] = pickle.loads(result.read_bytes())
    assert len(found) == len(JOBS)
    return found


def _operators(seen: dict[str, Runs], kind: str) -> dict[str, bool]:
    """Name -> whether its results are kept, of all architectures on one kind of device."""
    of_runs = [run.operators for runs in seen.values() for (_, device), run in runs.items() if device == kind]
    return {name: kept for operators in of_runs for name, (kept, _) in operators.items()}


def _operator(name: str) -> torch._ops.OpOverload:
    namespace, packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def test_operators_of_cuda_alone_are_known(seen: dict[str, Runs]) -> None:
    others = _operators(seen, "cpu")
    alone = {name: kept for name, kept in _operators(seen, "cuda").items() if name not in others}
    products = {name: kept for name, kept in alone.items() if name in CUDA_ALONE or "_backward" not in name}
    elementwise = {n for n in products if n.count(".") == 2 and torch.Tag.pointwise in _operator(n).tags}
    assert {n: kept for n, kept in products.items() if n not in elementwise | MOVES} == CUDA_ALONE


def test_what_is_kept_is_what_takes_time(seen: dict[str, Runs]) -> None:
    operators = {name: kept for kind in ("cpu", "cuda") for name, kept in _operators(seen, kind).items()}
    known = {*flop_registry, *FORMULAS}
    counted = {name for name in operators if name.count(".") == 2 and _operator(name).overloadpacket in known} | {
        "flex_attention"
    }
    kept = {name for name, is_kept in operators.items() if is_kept}
    assert kept - CPU_ALONE == {name for name in counted if "_backward" not in name}
    assert {"aten._grouped_mm.default", "aten.convolution.default", "aten.mm.default", "aten.bmm.default"} < kept


@pytest.mark.parametrize("name", JOBS)
def test_plans_are_those_of_a_cpu(seen: dict[str, Runs], name: str) -> None:
    runs = seen[name]
    for (precision, _), run in runs.items():
        assert run.is_random == ("dropout" in name), precision
    if name == "flex":  # CPUs have no backward of it
        return
    roles = runs["32", "cuda"].roles
    assert roles == runs["32", "cpu"].roles
    assert ({"column", "row"} <= set(roles.values())) == (name not in UNSHARDED)
