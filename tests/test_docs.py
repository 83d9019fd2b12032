"""The documentation tells the truth: its code runs, settings parse, commands exist, and tables are those of tests."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from torch import Tensor, nn

import lightning_3d
from lightning_3d import ThreeDConfig, ThreeDStrategy
from lightning_3d.cli.main import main
from tests.models import features, loader
from tests.parity import QUIET
from tests.workers import WorkerPools

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str) -> Iterator[str]:
    """The page's code in a language, but for that which is marked (`{.python .notest}`) or is the example."""
    for found, code in FENCE.findall(page.read_text()):
        if found == language and code.strip() != minimal():
            yield code


def minimal() -> str:
    return (ROOT / "examples/minimal.py").read_text().strip()


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """What mkdocs runs to generate pages."""
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "docs/pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_page
@pytest.mark.filterwarnings("ignore:.*tensorboardX")  # Lightning's advice where there is no TensorBoard
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), namespace)


@each_page
def test_settings_parse(page: Path) -> None:
    for code in blocks(page, "yaml"):
        settings = yaml.safe_load(code)
        if "trainer" in settings:  # of LightningCLI
            settings = settings["trainer"]["strategy"]["init_args"]
        ThreeDStrategy.from_config(settings)


def _exit_code(arguments: list[str]) -> object:
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code
    return 0


class Named(L.LightningModule):
    """Has its weights under `model.`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _save(path: Path) -> None:
    for name, is_folder in (("last.ckpt", False), ("folder.ckpt", True)):
        strategy = ThreeDStrategy(save_distributed_checkpoint=is_folder)
        trainer = L.Trainer(**QUIET, enable_checkpointing=False, devices=1, strategy=strategy, max_steps=1)
        trainer.fit(Named(), loader(features(8), global_batch_size=8))
        trainer.save_checkpoint(path / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, workers: WorkerPools) -> Path:
    """A folder with what commands of the pages read: checkpoints of one step, in both forms, and the examples."""
    path = tmp_path_factory.mktemp("saved")
    for folder in ("examples", "conf"):
        (path / folder).symlink_to(ROOT / folder)
    workers(1).run(_save, path)
    return path


@each_page
def test_commands_work(
    page: Path, capsys: pytest.CaptureFixture[str], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)
    monkeypatch.setattr(sys, "path", [*sys.path])
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for line in "".join(blocks(page, "bash")).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), line
        elif program == "pip":
            for extra in re.findall(r"\[(.*)\]", line):
                assert re.search(rf"^{extra} = ", project, re.MULTILINE), line
        elif program in ("python", "torchrun"):
            scripts = [argument for argument in arguments if argument.endswith((".py", ".yaml"))]
            scripts += [f"{arguments[1].replace('.', '/')}.py"] if arguments[0] == "-m" else []
            assert all((ROOT / script).exists() for script in scripts), line
            if "examples.hydra.main" in arguments:
                command = [sys.executable, *arguments, "--cfg", "job"]  # composed, and nothing trained
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
        else:
            assert program == "lightning-3d", f"{line}: no test knows this program"
            assert _exit_code([*arguments, "--help"]) == 0
            # 1: the user's own module is not there; 2 is a flag that does not parse
            assert _exit_code(arguments) == int("mine.GPT" in arguments), capsys.readouterr().err


def test_readme_is_short_and_shows_the_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    assert f"```python\n{minimal()}\n```" in readme


def test_links_of_the_readme_lead_somewhere() -> None:
    """The site's own are checked where it is built."""
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_setting_is_on_its_page(hook: ModuleType) -> None:
    page = hook.settings_page()
    sections = [item.default_factory for item in dataclasses.fields(ThreeDConfig)]
    for section in (ThreeDConfig, *(section for section in sections if isinstance(section, type))):
        for item in dataclasses.fields(section):
            if not isinstance(item.default_factory, type):
                name = f"{section.section}.{item.name}".lstrip(".")
                assert f"### `{name}`\n" in page
        texts = hook.field_docstrings(section)
        assert set(texts) == {item.name for item in dataclasses.fields(section)}
        assert all(text in page for text in texts.values())


def test_pages_have_their_tables_and_files(hook: ModuleType) -> None:
    assert minimal() in hook.filled((ROOT / "docs/quickstart.md").read_text())
    page = (ROOT / "docs/compatibility.md").read_text()
    written = hook.filled(page)
    assert page.count("<!-- table:") == 2
    assert "<!-- table:" not in written
    assert "| `ModelPruning` | works | refused: it reads weights of other stages | works |" in written


def test_errors_are_those_of_the_package() -> None:
    texts = [
        node.value
        for path in Path(lightning_3d.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    shown = re.findall(r"^\*\*`(.*?)`\*\*", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(shown) > 15
    assert [message for message in shown if not any(message in text for text in texts)] == []


def test_settings_that_pages_name_exist() -> None:
    sections = {item.name: item.default_factory for item in dataclasses.fields(ThreeDConfig)}
    known = {
        f"{name}.{item.name}"
        for name, section in sections.items()
        if isinstance(section, type)
        for item in dataclasses.fields(section)
    }
    prefix = "|".join(name for name, section in sections.items() if isinstance(section, type))
    for page in PAGES:
        named = set(re.findall(rf"`((?:{prefix})\.\w+)[`:=]", page.read_text()))
        assert named <= known, f"{page}: {named - known}"


@pytest.mark.filterwarnings("default")  # of mkdocs and its themes; those of the build itself end it
def test_site_builds(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site"))
    build(config)
    assert "zero.shard_size" in (tmp_path / "site/settings.html").read_text()
