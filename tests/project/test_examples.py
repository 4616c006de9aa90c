"""The scripts of examples/ do what they say, each in a process of its own where nothing else is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_helpers import ENVIRONMENT

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(name: str, tmp_path: Path) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=tmp_path, env=ENVIRONMENT, text=True,
                          capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_pandas(tmp_path):
    pytest.importorskip("pandas")
    out = printed("pandas_frame.py", tmp_path)
    assert "Federation(arrays: 3 clients, samples of 6 (float32), 2 classes" in out
    assert float(re.search(r"20 .* (0\.\d+)", out)[1]) > 0.55
    assert "14 parameters for ('age', 'blood=0', 'blood=A', 'blood=B', 'blood=AB', 'smoker')" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_hugging_face_datasets(tmp_path):
    pytest.importorskip("datasets")
    out = printed("hugging_face_dataset.py", tmp_path)
    assert "2 clients, samples of 8 x 8 (float32), 10 classes" in out
    assert float(re.search(r"test accuracy (0\.\d+)", out)[1]) > 0.8
    assert "['README.md', 'config.json', 'model.json', 'model.safetensors']" in out


@pytest.mark.slow
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    out = printed("mlflow_tracking.py", tmp_path)
    rounds = {line.split()[0]: [int(step) for step in re.findall(r"\((\d+),", line)]
              for line in out.splitlines()}
    assert rounds == {"fedavg": [2, 4, 6], "ditto": [2, 4, 6]}
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
