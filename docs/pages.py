"""Pages and tables of the site that come from the code: a hook of mkdocs, which writes them while it builds.

The settings are the fields of the config dataclasses with the docstrings below them; the tables of compatibility are
data of the tests.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from lightning_3d import ThreeDConfig, ThreeDStrategy

ROOT = Path(__file__).parents[1]

QUOTES = "\"'"

_RUN_ARGUMENTS = ("process_group_backend", "timeout", "heartbeat_timeout", "start_method")
"""Arguments of the strategy that are no settings of a configuration file."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated whole."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "settings.md", content=settings_page()))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put tables of tests where a page says `<!-- table: NAME -->`, and files where its code says `# file: PATH`."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """The page with its tables and files."""
    markdown = re.sub(r"^# file: (\S+)$", lambda match: (ROOT / match[1]).read_text().strip(), markdown, flags=re.M)
    return re.sub(r"<!-- table: (\w+) -->", lambda match: _table(match[1]), markdown)


def _table(name: str) -> str:
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # mkdocs does not look there
    from tests.packages import table as packages
    from tests.test_callbacks import rendered as callbacks

    return {"callbacks": callbacks, "packages": packages.rendered}[name]()


def settings_page() -> str:
    """One heading for each setting, with its values, its default and its docstring."""
    parts = [
        "# Every setting",
        "The same keys are arguments of `ThreeDStrategy(...)`, lines of a YAML file and overrides of its"
        ' `from_config`: `zero.stage` is `zero={"stage": 2}` in Python, `zero: {stage: 2}` in YAML and'
        " `zero.stage=2` as an override. A key that does not exist raises a `ConfigError` that names the nearest"
        " one that does, and a value that is not allowed one that names those that are.",
        "## Sizes and checkpoints",
    ]
    sections = []
    for item in dataclasses.fields(ThreeDConfig):
        if isinstance(item.default_factory, type):
            sections.append((item.default_factory, field_docstrings(ThreeDConfig)[item.name]))
        else:
            parts.append(_entry(ThreeDConfig, item))
    for section, docstring in sections:
        parts += [f"## `{section.section}`", docstring]
        parts += [_entry(section, item) for item in dataclasses.fields(section)]
    parts += ["## Of the strategy alone", "Arguments of `ThreeDStrategy(...)` that no configuration file has."]
    documented = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(ThreeDStrategy) or "", re.MULTILINE))
    parts += [f"### `{name}`\n\n{_markdown(documented[name])}" for name in _RUN_ARGUMENTS]
    return "\n\n".join(parts) + "\n"


def _entry(section: Any, item: dataclasses.Field[Any]) -> str:
    name = f"{section.section}.{item.name}".lstrip(".")
    default = {"()": "[]", "True": "true", "False": "false", "None": "none"}.get(str(item.default), item.default)
    text = field_docstrings(section)[item.name]
    return f"### `{name}`\n\nValues: {_values(section, item)} · default: `{default}`\n\n{text}"


def _values(section: Any, item: dataclasses.Field[Any]) -> str:
    """The annotation in words."""
    words = str(item.type)
    words = re.sub(r"Annotated\[(\w+), AtLeast\((\d+)\)\]", r"\1 of at least \2", words)
    words = re.sub(r"Literal\[([^]]*)\]", lambda match: match[1].replace(", ", " | "), words)
    for ours, plain in {
        "Size": "int of at least 1",
        "Mode": '"none" | "full" | "selective"',
        "tuple[str, ...]": "list of strings",
        "tuple[tuple[str, str], ...]": "list of pairs of strings",
        "bool": "true | false",
        "None": "none",
    }.items():
        words = words.replace(ours, plain)
    return ", ".join(f"`{word.strip().strip(QUOTES)}`" for word in words.split("|"))


def field_docstrings(section: type) -> dict[str, str]:
    """Field -> the docstring below it, as Markdown."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body  # type: ignore[attr-defined]  # that of the class
    found: dict[str, str] = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = _markdown(str(text.value.value))
    return found


def _markdown(docstring: str) -> str:
    """A docstring's text: its inline code has two backticks."""
    paragraphs = re.split(r"\n\s*\n", docstring.replace("``", "`"))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
