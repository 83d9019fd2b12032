"""Checks an installation without extras: `python installed.py SDIST`, in a folder with the example `minimal.py` alone.

`make test-install` runs it by the python of a fresh environment, which has the package and what that needs at run time.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import lightning_3d as package
from lightning_3d import ConfigError
from lightning_3d.callbacks import ScheduleTimeline

MOST_OF_LIGHTNING = 0.03
RUNS = 3
TIME_IMPORT = """
import time
began = time.process_time()
import torch, lightning.pytorch
theirs = time.process_time()
import lightning_3d
print((time.process_time() - theirs) / (theirs - began))
assert not torch.cuda.is_initialized(), "import lightning_3d has started CUDA"
"""
MODEL = """
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    pass
"""
JOB = """
model: model.Model
trainer:
  accelerator: cpu
  strategy: 3d
  max_epochs: 1
  enable_progress_bar: false
"""


def run(*command: str) -> str:
    """The output of a program that ends well. Python keeps what it compiles, as it does where people install."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["OMP_NUM_THREADS"] = "1"
    ended = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ended.returncode == 0, f"{' '.join(command)} exited with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


def lightning_3d(*arguments: str) -> str:
    """The output of our command, as the environment has installed it."""
    return run(str(Path(sys.executable).with_name("lightning-3d")), *arguments)


def one(pattern: str) -> str:
    """The path that matches."""
    found = [str(path) for path in Path().glob(pattern)]
    assert len(found) == 1, f"{pattern}: {found}"
    return found[0]


def sdist_has_the_package_and_no_tests() -> None:
    with tarfile.open(sys.argv[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    tops = {name.split("/")[0] for name in names}
    present = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "lightning_3d", "lightning_3d/py.typed"}
    assert present <= names, f"the sdist lacks {present - names}"
    assert not tops & {"tests", "examples", "conf", "docs", "benchmarks"}, f"the sdist has {tops}"


def modules_import() -> None:
    assert "site-packages" in str(package.__file__), package.__file__
    names = [module.name for module in pkgutil.walk_packages(package.__path__, "lightning_3d.")]
    assert len(names) > 100, names
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ConfigError as error:
            failed[name] = str(error)
    assert failed.keys() == {"lightning_3d.callbacks.drawing", "lightning_3d.callbacks.page"}, failed
    assert all("No module named 'matplotlib'" in why for why in failed.values()), failed


def pictures_say_what_to_install() -> None:
    message = ""
    try:
        ScheduleTimeline()
    except ConfigError as error:
        message = str(error)
    assert message.endswith('pip install "lightning-3d[pictures]"'), message


def import_is_quick_and_starts_no_cuda() -> None:
    # A share of what torch and Lightning take in the same process, and the least of some runs: machines are busy.
    share = min(float(run(sys.executable, "-c", TIME_IMPORT)) for _ in range(RUNS))
    told = f"import lightning_3d takes {share:.1%} of the time of torch and lightning.pytorch"
    print(f"  {told}")
    assert share <= MOST_OF_LIGHTNING, told


def commands_run() -> None:
    assert lightning_3d("--version").split() == ["lightning-3d", version("lightning-3d")]
    described = lightning_3d("--help")
    Path("model.py").write_text(MODEL)
    Path("job.yaml").write_text(JOB)
    for name in ("fit", "validate", "test", "predict"):
        assert f"Trainer.{name}" in described
        devices = 2 if name == "fit" else 1
        lightning_3d(name, "--config=job.yaml", f"--trainer.devices={devices}", f"--trainer.default_root_dir={name}")
    saved = one("fit/lightning_logs/version_0/checkpoints/*")
    assert "is whole" in lightning_3d("checkpoint", "verify", saved)
    lightning_3d("checkpoint", "convert", saved, "exported")
    one("exported/*.safetensors")


def example_trains_saves_and_resumes() -> None:
    os.chdir(Path("example"))
    run(sys.executable, "minimal.py")
    # An epoch of 64 steps on two replicas; the next goes on in a pipeline of one, whose steps are as many as batches.
    one("lightning_logs/version_0/checkpoints/epoch=0-step=64.ckpt")
    one("lightning_logs/version_1/checkpoints/epoch=1-step=192.ckpt")


CHECKS: tuple[Callable[[], None], ...] = (
    sdist_has_the_package_and_no_tests,
    modules_import,
    pictures_say_what_to_install,
    import_is_quick_and_starts_no_cuda,
    commands_run,
    example_trains_saves_and_resumes,
)

if __name__ == "__main__":
    for check in CHECKS:
        print(check.__name__.replace("_", " "), flush=True)
        check()
