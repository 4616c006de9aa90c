"""How soon a run begins: nothing is imported that the first round does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from descant.data.datasets import Digits

# packages that each take from a fifth of a second to longer than torch itself
SLOW = ["matplotlib", "sklearn", "scipy", "sympy", "torch._dynamo", "torch._inductor", "ray"]
PROGRAM = """
import json, sys, time
import torch
start = time.process_time()
from descant import cli
from descant.experiment import run

play = run.Training.play

def watched(training, backend):
    report = play(training, backend)
    print(json.dumps([name for name in {slow} if name in sys.modules]), file=sys.stderr)
    print(time.process_time() - start, file=sys.stderr)
    return report

run.Training.play = watched
sys.argv = ["descant", "run", "--set", "train.rounds=1", "--set", "model.name={model}", "--out", {out!r}]
cli.main()
"""


def test_digits_are_those_of_scikit_learn():
    """They are read from its file without its code."""
    pixels, digits = load_digits(return_X_y=True)
    found = Digits().load(10, 0)
    assert torch.equal(found.x, torch.from_numpy(pixels / 16).float())
    assert torch.equal(found.y, torch.from_numpy(digits))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("model", ["mclr", "dnn"])
def test_the_first_round_does_not_wait_for_what_it_does_not_need(tmp_path, model):
    text = PROGRAM.format(slow=SLOW, model=model, out=str(tmp_path / "run"))
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120,
                            check=False)
    assert result.returncode == 0, result.stderr
    imported, seconds = result.stderr.splitlines()
    assert json.loads(imported) == []
    assert float(seconds) < 2  # of processor time besides torch's own import, the first round included
