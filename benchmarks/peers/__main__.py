"""descant beside FedJAX, pfl-research and Flower's simulator:

    python -m benchmarks.peers install            # an environment for each, in runs/peers/environments
    python -m benchmarks.peers run                # figures into runs/peers
    python -m benchmarks.peers join FILE...       # several runs as one: a table and a picture

The same rounds of FedAvg (20 of 100 clients, Fashion-MNIST or random data of its shape, the same batches in
the same order from the same parameters) are trained by all of them in turn. That all end the first round
with the same global model is checked; otherwise nothing is reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.peers.contest import compete
from benchmarks.peers.libraries import LIBRARIES
from benchmarks.peers.picture import draw
from benchmarks.peers.results import dump, joined, show, show_joined
from benchmarks.speed import results
from benchmarks.speed.case import EPOCH, MODELS, Case, fashion_mnist
from benchmarks.speed.command import LARGE, chosen
from descant.cli.common import reporting
from descant.cli.options import DataDir
from descant.core.files import write_atomic
from descant.core.threads import one_thread
from descant.core.units import times
from descant.errors import DescantError

REPETITIONS = 7
app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False,
                  help="descant beside other libraries.")


@app.command()
def install(names: Annotated[list[str] | None, typer.Argument(
        metavar="[LIBRARY]...", show_default=False, help="Of fedjax, pfl and flower. Default: all.")] = None
        ) -> None:
    """Install other libraries, each into an environment of its own under runs/peers/environments.

    One that cannot be installed keeps no other from it, and is named at the end.
    """
    with reporting("stopped") as console:
        failed = []
        for name in chosen("peer", ",".join(names) if names else None, tuple(LIBRARIES), LIBRARIES):
            console.print(f"installing {LIBRARIES[name].title}; this may take some minutes")
            try:
                LIBRARIES[name].install()
            except DescantError as error:
                failed.append(str(error))
        if failed:
            raise DescantError("; ".join(failed))


@app.command()
def run(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write peers.json and peers.png; "
                                      "replaces existing ones.")] = Path("runs/peers"),
    models: Annotated[str | None, typer.Option(
        "--models", metavar="NAME,...", show_default=False,
        help="Of mclr, dnn and cnn2. Default: all.")] = None,
    peers: Annotated[str | None, typer.Option(
        "--peers", metavar="NAME,...", show_default=False,
        help="Of fedjax, pfl and flower. Default: all.")] = None,
    repetitions: Annotated[int, typer.Option(
        "--repetitions", metavar="N", min=1, help="How often each side takes its turn.")] = REPETITIONS,
    data_dir: DataDir = None,
) -> None:
    """Let descant and the installed libraries play the same rounds in turn, and compare their times."""
    with reporting("stopped: nothing is written") as console:
        measure(console, out, chosen("model", models, MODELS, MODELS),
                chosen("peer", peers, tuple(LIBRARIES), LIBRARIES), repetitions)


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Some peers.json, of any models.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the picture goes.")] = Path(
        "runs/peers/peers.png"),
) -> None:
    """Take several runs as one: medians over the runs, and every run beside them."""
    with reporting("stopped") as console:
        found = joined([json.loads(file.read_text()) for file in files])
        show_joined(console, found)
        write_atomic(out, draw(found))
        console.print(f"{out}", soft_wrap=True)


def measure(console: Console, out: Path, models: tuple[str, ...], peers: tuple[str, ...], repetitions: int
            ) -> None:
    """Compare on each of the models, and keep the figures in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    machine = results.machine()
    federation, is_real = fashion_mnist()
    load = machine["load_at_start"]
    console.print(f"{machine['processor']}, {times(machine['cores'], 'core')}, "
                  f"load {'unknown' if load is None else f'{load:.1f}'}; "
                  f"{'Fashion-MNIST' if is_real else 'random data in its shape'}\n", soft_wrap=True)
    found: dict[str, Any] = {"machine": machine, "real_data": is_real, "repetitions": repetitions,
                             "cases": []}

    def tell(text: str) -> None:
        if console.is_interactive:
            console.print(text, style="dim", markup=False)

    with one_thread():
        for model in models:
            batches = EPOCH // 3 if model in LARGE else EPOCH  # as in the benchmark of speed
            case = Case("fedavg", model, federation, batches=batches, evaluated=0)
            figures = compete(case, tuple(LIBRARIES[name] for name in peers), repetitions, out, tell)
            found["cases"].append(dump(case, figures))
            show(console, found["cases"][-1], repetitions)
    found["machine"]["load_at_end"] = results.load()
    write_atomic(out / "peers.json", json.dumps(found, indent=1).encode())
    write_atomic(out / "peers.png", draw(found))
    for name in ("peers.json", "peers.png"):
        console.print(f"{out / name}", soft_wrap=True)


if __name__ == "__main__":
    app()
