"""What comparing costs beside the runs themselves: overhead, two jobs in place of one, the report.

    python benchmarks/compare.py [TURNS]    # ten minutes a turn; needs Chromium for how long the page takes

Runs are small (digits, a dense network; 20 s each), so that what is not training shows. The bare runs are
made one after another without any comparison around them: by `descant run`, and all in one process, which
starts Python and torch only once. Figures are printed, nothing is kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

from descant.comparison import page
from descant.comparison import plan as planning
from descant.comparison.make import make
from descant.experiment import directory as layout
from descant.experiment.config import read_toml
from descant.view.page import render

EXPERIMENT = """
[data]
dataset = "digits"
partition = "dirichlet"
clients = 40
alpha = 0.3
[model]
name = "dnn"
[algorithm]
name = "fedavg"
[train]
rounds = {rounds}
cohort = 20
local = {{ steps = {steps} }}
backend = "vectorised"
[eval]
every = {every}
"""
METHODS = "fedavg,ditto,pfedme,localtrain"
MANY = "fedavg,fedprox,ditto,pfedme,pfedbred,cgpfl,fedmap,pfedgt,scaffold,localtrain"
BARE = """
import sys
from pathlib import Path
from descant.comparison import plan as planning
from descant.experiment import run as runs
plan = planning.read(Path(sys.argv[1]))
for k, planned in enumerate(plan.runs()):
    runs.start(runs.Setup.of(planned.experiment), Path(sys.argv[2]) / str(k))
"""


def seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def compare(file: Path, out: Path, jobs: int) -> float:
    return seconds(sys.executable, "-m", "descant", "compare", str(file), "--algorithms", METHODS, "--seeds",
                   "0,1", "--no-baselines", "--jobs", str(jobs), "--out", str(out))


def by_command(compared: Path, out: Path) -> float:
    """The runs of a comparison by commands of their own."""
    out.mkdir()
    taken = 0.0
    for k, run in enumerate(planning.read(compared).runs()):
        file = out / f"{k}.toml"
        file.write_text(tomli_w.dumps(run.experiment.dump()))
        taken += seconds(sys.executable, "-m", "descant", "run", str(file), "--out", str(out / str(k)))
    return taken


def costs(place: Path) -> None:
    file = place / "experiment.toml"
    file.write_text(EXPERIMENT.format(rounds=500, steps=20, every=50))
    taken: dict[str, list[float]] = {"runs": [], "in one process": [], "one": [], "two": []}
    for turn in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):  # in turns: noise hits all alike
        taken["one"].append(compare(file, place / f"one-{turn}", 1))
        taken["two"].append(compare(file, place / f"two-{turn}", 2))
        taken["in one process"].append(seconds(sys.executable, "-c", BARE, str(place / f"one-{turn}"),
                                               str(place / f"bare-{turn}")))
        taken["runs"].append(by_command(place / f"one-{turn}", place / f"runs-{turn}"))
        print({name: [round(each, 1) for each in values] for name, values in taken.items()}, flush=True)
    runs, together, one, two = (min(values) for values in taken.values())
    for name, bare in (("descant run, for each", runs), ("the same in one process", together)):
        print(f"{name}: {bare:.1f} s, --jobs 1 {one:.1f} s: overhead {100 * (one / bare - 1):.1f} %")
    print(f"--jobs 2 {two:.1f} s: efficiency {one / two:.2f} on two cores")


def report(place: Path) -> None:
    """10 methods x 5 seeds x 200 rounds x 100 clients: one seed is run, the others are copies of it."""
    file = place / "many.toml"
    text = EXPERIMENT.format(rounds=200, steps=1, every=5).replace("dnn", "mclr")
    file.write_text(text.replace("clients = 40", "clients = 100").replace("dirichlet", "iid").replace(
        "alpha = 0.3", ""))
    out = place / "many"
    seconds(sys.executable, "-m", "descant", "compare", str(file), "--algorithms", MANY, "--seeds", "0",
            "--budget", "rounds", "--no-baselines", "--jobs", "2", "--out", str(out))
    make(read_toml(file), out, range(5), algorithms=MANY, budget="rounds", baselines=False)
    for run in planning.read(out).runs(seeds=[1, 2, 3, 4]):
        shutil.copytree(run.place.parent / "seed-0", run.place)
        config = layout.config(run.place)
        layout.write_config(run.place, config | {"train": config["train"] | {"seed": run.seed}})
    start = time.perf_counter()
    html = render(page.page_data(out))
    print(f"report of 10 methods x 5 seeds x 200 rounds x 100 clients: {time.perf_counter() - start:.1f} s, "
          f"{len(html) / 1e6:.2f} MB")
    (place / "report.html").write_bytes(html)
    loads(place / "report.html")


def loads(path: Path) -> None:
    """From the start of the navigation to the first chart."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(5):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            tab.goto(path.as_uri(), wait_until="load")
            loaded = time.perf_counter() - start
            tab.wait_for_selector(".main-svg")
            print(f"the page loads in {loaded:.2f} s, its first chart is there after "
                  f"{time.perf_counter() - start:.2f} s", flush=True)
            tab.close()
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for part in (costs, report):
            part(Path(directory))
