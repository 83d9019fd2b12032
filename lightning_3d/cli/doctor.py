"""``lightning-3d doctor``: what this machine has for training, and combinations that are known not to work."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser, Namespace
from rich.console import Group
from rich.table import Table
from torch.utils.cpp_extension import CUDA_HOME

from lightning_3d.cli import nodes
from lightning_3d.cli.output import show
from lightning_3d.distributed.device_memory import total_memory
from lightning_3d.memory.rank_memory import size_text
from lightning_3d.torch_internals.versions import untested

HELP = "Report on this machine: versions, devices, links, compilers, memory, and known bad combinations."

_PACKAGES = ("lightning-3d", "torch", "lightning", "pytorch-lightning", "torchmetrics", "omegaconf", "jsonargparse")
_OPTIONAL = ("safetensors", "transformers", "triton", "torchvision")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MASTER_ADDR", "WORLD_SIZE", "NCCL_", "GLOO_", "TORCH_NCCL_")

Report = dict[str, dict[str, str]]
"""Section -> name -> finding."""


def add_arguments(parser: ArgumentParser) -> None:
    """Give the parser its arguments."""
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--nodes", action="store_true", help="report on all nodes of a job, on which its launcher starts this"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="of checkpoints, for --nodes; is made if missing")


def run(chosen: Namespace) -> None:
    """Print the report; exits with 1 where a combination is known not to work."""
    if chosen.nodes:
        nodes.run(chosen.folder, dict(_versions()))
        return
    report = {
        "versions": dict(_versions()),
        "devices": dict(_devices()),
        "communication": dict(_communication()),
        "host": dict(_host()),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }
    problems = list(_problems(report))
    if chosen.json:
        print(json.dumps({**report, "problems": problems}))
    else:
        table = Table("", "", "", show_header=False)
        for section, findings in report.items():
            table.add_section()
            for name, finding in findings.items():
                table.add_row(section if name == next(iter(findings)) else "", name, finding)
        show(Group(table, *(f"problem: {problem}" for problem in problems or ["none is known"])))
    if problems:
        raise SystemExit(1)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in _PACKAGES:
        yield package, _installed(package) or "missing"
    for package in _OPTIONAL:
        if (installed := _installed(package)) is not None:
            yield package, installed


def _devices() -> Iterator[tuple[str, str]]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield "accelerator", "none: training runs on the CPU"
        return
    for index in range(torch.accelerator.device_count()):
        at = torch.device(device.type, index)
        name = torch.get_device_module(at).get_device_name(index)
        yield str(at), f"{name}, {size_text(total_memory(at, 1))}"
    if device.type == "cuda":
        yield "CUDA of torch", f"{torch.version.cuda or torch.version.hip}"
        count = torch.cuda.device_count()
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
        apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        if pairs:
            yield "direct links", f"all but {', '.join(apart)}" if apart else "between all devices"


def _communication() -> Iterator[tuple[str, str]]:
    for name in ("gloo", "nccl", "mpi", "xccl", "ucc"):
        if dist.is_backend_available(name):
            yield name, ".".join(map(str, torch.cuda.nccl.version())) if name == "nccl" else "available"


def _host() -> Iterator[tuple[str, str]]:
    yield "cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    yield "memory", size_text(total_memory(torch.device("cpu"), 1))
    yield "shared memory", size_text(shutil.disk_usage("/dev/shm").free) if os.path.isdir("/dev/shm") else "unknown"
    yield "C++ compiler", shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or "none"
    yield "CUDA compiler", CUDA_HOME or "none"


def _problems(report: Report) -> Iterator[str]:
    """Combinations that are known not to work, or that nobody has tried."""
    versions, has_accelerator = report["versions"], "accelerator" not in report["devices"]
    yield from (f"{package} is not installed" for package in _PACKAGES if versions[package] == "missing")
    yield from untested()
    if versions["lightning"] != versions["pytorch-lightning"]:
        yield (
            f"lightning {versions['lightning']} beside pytorch-lightning {versions['pytorch-lightning']}: modules of"
            " the latter don't train by the Trainer of the former. Install the same version of both"
        )
    if "gloo" not in report["communication"]:
        yield "torch was built without gloo, which ranks exchange objects by"
    if has_accelerator and report["devices"].get("CUDA of torch") and "nccl" not in report["communication"]:
        yield "torch was built without NCCL, which GPUs communicate by"
    if has_accelerator and "triton" not in versions:
        yield "triton is not installed, which compile.enabled needs on GPUs"
    if not has_accelerator and report["host"]["C++ compiler"] == "none":
        yield "there is no C++ compiler, which compile.enabled needs on CPUs: use compile.backend=aot_eager"
