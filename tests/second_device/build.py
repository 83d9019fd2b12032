"""Building the library of the second device, by the C++ compiler alone."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "backend.cpp")
COMPILER = os.environ.get("CXX", "c++")


def compiler() -> str | None:
    """The path of the C++ compiler; None where there is none."""
    return shutil.which(COMPILER)


def library() -> Path:
    """The library for this torch and Python, which is built where it is not there yet; takes a minute."""
    versions = torch.__version__, sys.implementation.cache_tag
    contents = [path.read_bytes() for path in (Path(__file__), HERE / "device.h", *(HERE / name for name in SOURCES))]
    digest = hashlib.sha256(b"".join([repr(versions).encode(), *contents])).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"lightning-3d-second-device-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    built = folder / f"second_device-{digest}.so"
    with (folder / "lock").open("w") as lock:  # of the processes that share out the tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    headers = [*include_paths(), sysconfig.get_paths()["include"]]
    options = ["-std=c++20", "-O0", "-fPIC", "-DTORCH_EXTENSION_NAME=second_device", "-DUSE_DISTRIBUTED"]
    options += [f"-isystem{path}" for path in headers]
    linked = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        objects = [Path(folder, source).with_suffix(".o") for source in SOURCES]
        running = [
            subprocess.Popen([COMPILER, "-c", HERE / source, "-o", made, *options])
            for source, made in zip(SOURCES, objects, strict=True)
        ]
        for source, process in zip(SOURCES, running, strict=True):
            if process.wait(timeout=600):
                raise RuntimeError(f"{COMPILER} failed on {source}")
        shared = Path(folder, built.name)
        subprocess.run([COMPILER, "-shared", *objects, "-o", shared, *linked], check=True, timeout=600)
        shared.rename(built)
