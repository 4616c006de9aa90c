"""Execute the notebooks of the tutorial and keep their output: `python docs/execute.py` (`make tutorial`)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIAL = Path(__file__).parent / "tutorial"
LONGEST = 600  # seconds for a cell, on a busy machine


def executed(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the output of its cells, run in a folder of its own; an error in a cell is raised."""
    cells = nbformat.read(notebook, 4)
    NotebookClient(cells, timeout=LONGEST, kernel_name="python3", coalesce_streams=True,
                   resources={"metadata": {"path": str(folder)}}).execute()
    for cell in cells.cells:
        cell.metadata = {}  # has the times of its execution
        if cell.cell_type == "code":  # progress is of no use on a page
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return cells


def main(names: list[str]) -> None:
    for notebook in sorted(TUTORIAL.glob("*.ipynb")):
        if not names or any(name in notebook.name for name in names):
            print(notebook.name, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(notebook, Path(folder)), notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
