"""The documentation as a site: it builds without a warning, names all that is public, and notebooks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import descant

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))
#: Modules, whose content has pages of its own.
MODULES = {"algorithms", "data", "models", "export", "__version__"}


def test_every_public_name_is_documented() -> None:
    shown = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = {place.rpartition(".")[2] for place in re.findall(r"^::: (\S+)$", shown, re.MULTILINE)}
    assert set(descant.__all__) - MODULES - named == set()
    assert [name for name in {*descant.__all__} - {"__version__"} if not getattr(descant, name).__doc__] == []


def test_a_notebook_shows_its_output_and_no_path_of_a_machine() -> None:
    nbformat = pytest.importorskip("nbformat")
    assert len(NOTEBOOKS) == 5
    for notebook in NOTEBOOKS:
        text = notebook.read_text(encoding="utf-8")
        cells = nbformat.reads(text, 4).cells
        assert any(cell.get("outputs") for cell in cells), f"{notebook.name}: run make tutorial"
        assert not [out for cell in cells for out in cell.get("outputs", []) if out.output_type == "error"]
        assert not re.search(r"/(home|root|tmp|Users)/", text), notebook.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
                          cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    methods = (tmp_path / "reference" / "methods.html").read_text(encoding="utf-8")
    for name in descant.algorithms.ALGORITHMS:
        assert f'id="{name}"' in methods
    assert "descant compare" in (tmp_path / "reference" / "command-line.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    from docs.execute import executed

    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # of Jupyter's own parts
    cells = executed(notebook, tmp_path).cells
    assert any(cell.get("outputs") for cell in cells)
