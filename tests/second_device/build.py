"""Building the library of the second device for torch, by the C++ compiler alone."""

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
NAME = "second_device"
FILES = (HERE / "device.cpp", HERE / "backend.cpp", HERE / "device.h")
COMPILER = os.environ.get("CXX", "c++")


def compiler() -> str | None:
    """The path of the C++ compiler; None where there is none."""
    return shutil.which(COMPILER)


def library() -> Path:
    """The library for this torch and Python, which is built where it is not there yet; takes a minute."""
    versions = torch.__version__, sys.implementation.cache_tag
    contents = [path.read_bytes() for path in (Path(__file__), *FILES)]
    digest = hashlib.sha256(b"".join([repr(versions).encode(), *contents])).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"lightning-3d-second-device-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    built = folder / f"{NAME}-{digest}.so"
    with (folder / "lock").open("w") as lock:  # of the processes that share out the tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    sources = [path for path in FILES if path.suffix == ".cpp"]
    headers = [*include_paths(), sysconfig.get_paths()["include"]]
    options = ["-std=c++20", "-O0", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_DISTRIBUTED"]
    options += [f"-isystem{path}" for path in headers]
    linked = [*(f"-L{path}" for path in library_paths()), *(f"-Wl,-rpath,{path}" for path in library_paths())]
    linked += ["-lc10", "-ltorch_cpu", "-ltorch", "-Wl,--as-needed", "-ltorch_python"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        objects = [Path(folder, source.name).with_suffix(".o") for source in sources]
        running = [
            subprocess.Popen([COMPILER, "-c", source, "-o", made, *options])
            for source, made in zip(sources, objects, strict=True)
        ]
        for source, process in zip(sources, running, strict=True):
            if process.wait(timeout=600):
                raise RuntimeError(f"{COMPILER} failed on {source}")
        shared = Path(folder, built.name)
        subprocess.run([COMPILER, "-shared", *objects, "-o", shared, *linked], check=True, timeout=600)
        shared.rename(built)
