"""What the site has beyond the files of docs/: the project's own pages, and references made from the code.

Links that lead out of docs/ are of use in the repository. On the site those to the project's pages lead to
their copies, and those to other files become the path in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PROJECT = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md",
           "README.md": "index.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for source, page in PROJECT.items():
        if page != "index.md":
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=_moved(text, "", page)))
    for page, make in {"reference/methods.md": _methods, "reference/data.md": _data,
                       "reference/models.md": _models, "reference/command-line.md": _commands}.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links of a page of docs/."""
    name = page.file.src_uri
    return markdown if name in PROJECT.values() else _moved(markdown, f"docs/{posixpath.dirname(name)}", name)


def _moved(text: str, folder: str, page: str) -> str:
    """The text of a file in a folder of the repository, with links as they must be on a page of the site."""

    def mended(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        there = posixpath.normpath(posixpath.join(folder, target))
        if there.startswith("docs/"):
            there = there.removeprefix("docs/")
        elif there in PROJECT:
            there = PROJECT[there]
        else:
            return words if there in words else f"{words} (`{there}`)"
        return f"[{words}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor})"

    return LINK.sub(mended, text)


# -- references made from the code, as `descant show` has it -------------------------------------------


def _methods() -> str:
    return _registry("Methods", "algorithm", "A method is chosen by its name, in a file or on the command "
                     "line, or is an object: `descant.algorithms.Ditto(lam=0.5)`.")


def _models() -> str:
    return _registry("Models", "model", "Any `nn.Module` can take their place "
                     "([your own model](../tutorial/3_own_model.ipynb)).")


def _data() -> str:
    datasets = _registry("Datasets", "dataset", "Where their files come from: [data](../data.md).")
    return datasets + _registry("Partitions", "partition", "How a pool of rows is divided among clients.")


def _registry(title: str, kind: str, about: str) -> str:
    from descant.experiment import catalogue

    found = [f"# {title}\n\n{about}\n"]
    for name in catalogue.REGISTRIES[kind]:
        [entry] = [entry for entry in catalogue.find(name) if entry["kind"] == kind]
        found.append(f"## {name}\n\n{entry['summary']}\n")
        if entry["description"]:
            found.append(f"```text\n{entry['description']}\n```\n")
        found.append(_table(entry["fields"]))
        for preset, values in entry.get("presets", {}).items():
            said = ", ".join(f"`{key} = {catalogue.as_toml(value)}`" for key, value in values.items())
            found.append(f'`preset = "{preset}"`: {said}\n')
        if "citation" in entry:
            found.append(f"*{entry['citation']}*\n")
    return "\n".join(found)


def _table(rows: list[dict[str, Any]]) -> str:
    from descant.experiment.catalogue import as_toml

    if not rows:
        return ""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for row in rows:
        default = "" if row["default"] is None else f"`{as_toml(row['default'])}`"
        meaning = row["meaning"] + (f" (searched {row['search']})" if row["search"] else "")
        cells = (cell.replace("|", "\\|") for cell in (f"`{row['name']}`", default, meaning))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _commands() -> str:
    import typer

    from descant.cli import app

    group = typer.main.get_command(app)
    found = ["# The command line\n"]
    with typer.Context(group, info_name="descant") as above:
        for name in group.list_commands(above):  # type: ignore[attr-defined]
            found += _command(group.get_command(above, name), name, above)  # type: ignore[attr-defined]
    return "\n".join(found)


def _command(command: Any, name: str, above: Any) -> list[str]:
    """A command as its own --help says it, and the commands below it."""
    with type(above)(command, info_name=name, parent=above, max_content_width=100) as context:
        found = [f"## {context.command_path}\n", f"```text\n{command.get_help(context)}\n```\n"]
        for inner in getattr(command, "commands", {}):
            found += _command(command.commands[inner], inner, context)
    return found
