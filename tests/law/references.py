"""Runs of one process, each made once in a session of tests and kept in a folder that its processes share."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from filelock import FileLock

from tests.conftest import REFERENCES
from tests.law.cover import Case
from tests.law.run import Run, run_case


@lru_cache(maxsize=8)
def _read(path: Path) -> Run:
    run: Run = torch.load(path, weights_only=False)
    return run


def reference_of(case: Case) -> Run:
    """The run of one process that a case is compared with."""
    path = Path(os.environ[REFERENCES], hashlib.sha1(case.reference.encode()).hexdigest() + ".pt")
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            torch.save(_made(case), path)
    return _read(path)


def _made(case: Case) -> Run:
    """Train in an empty folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return run_case(case, None)
        finally:
            os.chdir(before)
