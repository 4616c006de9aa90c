"""The models of a run as files: one directory for each client, or none."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from descant.core.algorithm import Algorithm
from descant.core.files import sync_directory, write_atomic
from descant.core.import_object import named_in
from descant.core.permit import Allowed, Permit
from descant.core.splits import SPLITS
from descant.core.task import inputs
from descant.core.threads import one_thread
from descant.deploy.export.formats import NAMES, Converted, Format, convert, require_formats
from descant.deploy.export.manifest import Manifest, save_model
from descant.deploy.export.network import OnRows, rebuilt
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.run import Run, Setup, Which
from descant.models.module import ModuleTask

SHARED = "global"  # the directory of the model for all
TRIED = 64  # rows on which files are compared
NO_BEST = "this is the last round: there is no validation data to choose the best one by"


class Exported(NamedTuple):
    """What was written, and what was asked for and could not be."""

    places: list[Path]
    problems: list[str]


def export_model(run: Run, client: int | str | None, to: str | Path, which: Which = "best",
                 formats: Sequence[Format] = ()) -> Path:
    """Write one client's model (None: the model for all) to a directory in `to`, which is returned."""
    wanted = [] if client is None else [find_client(run, client)]
    made = export_models(run, wanted, Path(to), which=which, shared=client is None, formats=formats)
    if made.problems:
        raise DescantError(made.problems[0])
    return made.places[0]


def export_models(run: Run, clients: Sequence[int], to: Path, *, which: Which = "best",
                  shared: bool = False, formats: Sequence[Format] = (),
                  told: Callable[[int], None] = lambda done: None) -> Exported:
    """Write the models of these clients, and the one for all if it is wanted. Nothing is overwritten, and
    what is there is whole. `told` hears how many are done."""
    require_formats(formats)
    _require_module(run, clients)
    names = run.setup.federation.names
    safe = safe_names(names)
    wanted: list[tuple[str, int | None, Path]] = [(names[k], k, to / safe[names[k]]) for k in clients]
    if shared:
        run.global_model(which)  # which a method may not have
        wanted.append(("the model for all", None, to / SHARED))
    refuse_taken([place for *_, place in wanted])
    make_directory(to)
    places: list[Path] = []
    problems: list[str] = []
    for count, (name, client, place) in enumerate(wanted, 1):
        try:
            made = _of_run(run, client, which)
            check = count == 1  # one stands for all: they differ in their numbers only
            problems += [f"{name}: {problem}" for problem in write_model(place, *made, formats, check)]
            places.append(place)
        except DescantError as error:
            problems.append(f"{name}: {error}")
        told(count)
    return Exported(places, problems)


class Made(NamedTuple):
    """A model before it is written."""

    module: nn.Module
    manifest: Manifest
    samples: Tensor  # some that it can be tried on, as a run has them


def _of_run(run: Run, client: int | None, which: Which) -> Made:
    number, _, store = run.snapshot(which)
    notes, setup = notes_on(run, which), run.setup
    if client is None:
        about = Manifest.of(setup, None, name=None, newcomer=False, number=number, which=which, notes=notes)
        return Made(run.global_model(which), about, setup.federation.x[:TRIED])
    newcomer = not bool(store.took_part(np.array([client]))[0])
    about = Manifest.of(setup, client, name=setup.federation.names[client], newcomer=newcomer,
                        number=number, which=which, notes=notes)
    return Made(run.personal_model(client, which), about, samples_of(setup, client))


def notes_on(run: Run, which: Which) -> tuple[str, ...]:
    """What who asked for a round must know."""
    return (NO_BEST,) if which == "best" and run.best_round is None else ()


def samples_of(setup: Setup, client: int) -> Tensor:
    """Some samples of a client, of whichever split."""
    rows = np.concatenate([setup.federation.split(split)[client] for split in SPLITS])[:TRIED]
    return setup.federation.x[torch.from_numpy(rows)]


def write_model(place: Path, module: nn.Module, manifest: Manifest, samples: Tensor,
                formats: Sequence[Format] = (), check: bool = True) -> list[str]:
    """Write a model to a directory that appears whole or not at all; returns what could not be had. `check`:
    see whether the files make the same module again."""
    with torch.no_grad(), one_thread():
        problems = _misfits(module, manifest, samples) if check else []
        whole = OnRows(module, manifest).eval()
        converted = convert(whole, _rows(whole, samples), formats)
    failed = {name: made for name, made in converted.items() if isinstance(made, str)}
    problems += [f"{NAMES[name]} could not be made: {why}" for name, why in failed.items()]
    files = {name: made for name, made in converted.items() if isinstance(made, Converted)}
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    try:
        temporary.mkdir()
        for name, made in files.items():
            write_atomic(temporary / NAMES[name], made.data)
        about = {NAMES[name]: made.about for name, made in files.items()}
        save_model(temporary, module.state_dict(), dataclasses.replace(manifest, files=about))
        temporary.rename(place)
        sync_directory(place.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return problems


def _misfits(module: nn.Module, manifest: Manifest, samples: Tensor) -> list[str]:
    """Whether the model that is made again from files is another."""
    if manifest.model is None:
        return []
    try:
        again = rebuilt(manifest, dict(module.state_dict()), None, "", _of_own_run(manifest))
        x = inputs(samples, manifest.torch_dtype)
        if torch.equal(again(x), module(x)):
            return []
        reason = "it gives other outputs"
    except DescantError as error:
        reason = str(error)
    return [f"load_model cannot make this model again by its name ({reason}): give it the module, "
            "load_model(DIR, module=...)"]


def _of_own_run(manifest: Manifest) -> Permit:
    """A permit for the model of a run that is loaded: its code was permitted for that."""
    return Permit(tuple(place for _, place in named_in({"model": manifest.model})))


def _rows(network: OnRows, samples: Tensor) -> Tensor:
    """Rows as they are in the data, near those that became these samples, and one with nothing in it."""
    rows = network.undone(samples)
    if network.fill is not None:
        rows = torch.cat([rows, torch.full_like(rows[:1], torch.nan)])
    return rows if len(rows) > 1 else torch.cat([rows, rows])


def _require_module(run: Run, clients: Sequence[int]) -> None:
    """Refuse what is not one network for each client."""
    algorithm = run.setup.algorithm
    if not isinstance(run.setup.task, ModuleTask):
        raise UsageError("the model of this run is a function of a vector and no network: there is no module "
                         "to export; run.personal(client) has the numbers")
    if clients and run.setup.federation.elsewhere:
        raise UsageError("the personal models of this run are with its clients, on their own machines: each "
                         "has model.safetensors in its directory; here is the one for all, if any: --global")
    if clients and type(algorithm).predict is not Algorithm.predict:
        raise UsageError(f"a client of {algorithm.name} predicts with more than one module: this cannot be "
                         "exported as one; run.personal(client) has the parts")


# -- names ---------------------------------------------------------------------------------------------


def find_client(run: Run, client: int | str) -> int:
    """A client by its name or number; the name counts where it is both."""
    names = run.setup.federation.names
    if isinstance(client, str):
        if client in names:
            return names.index(client)
        if not client.isdecimal():
            raise unknown("client", client, names)
        client = int(client)
    if not 0 <= client < len(names):
        raise UsageError(f"client {client} does not exist: there are clients 0 to {len(names) - 1}")
    return client


def safe_names(names: Sequence[str]) -> dict[str, str]:
    """For each client the name of a directory: its own where that can be one, and else what is left of it
    with a hash, so that no two are the same."""
    plain = {name: re.sub(r"[^\w.-]+", "_", name).strip(".")[:60] or "_" for name in names}
    kept = [short.casefold() for name, short in plain.items() if short == name]  # some disks see no case
    taken = Counter([SHARED, *kept])
    return {name: short if short == name and taken[short.casefold()] == 1
            else f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:8]}" for name, short in plain.items()}


def refuse_taken(places: Sequence[Path]) -> None:
    """Nothing is overwritten."""
    for place in places:
        if place.is_symlink() or place.exists():
            raise UsageError(f"{place} exists already: choose another --to, or remove it")


def make_directory(to: Path) -> None:
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {to}: {error.strerror or error}; choose another --to") from None


# -- where a run is ------------------------------------------------------------------------------------


def load_run(place: Path, allow: Allowed = ()) -> Run:
    """The run in a directory, also one that `descant server` led, to be read only. Code that it names must be
    in `allow`."""
    if not place.is_dir():
        raise UsageError(f"there is no directory {place}: name that of a run")
    if (place / "comparison.json").exists():
        inner = sorted(path.parent for path in place.glob("runs/*/*/config.toml"))
        such = f", such as {inner[0]}" if inner else ""
        raise UsageError(f"{place} is a comparison: name one of its runs{such}")
    if (place / "federation.json").exists() and not (place / "config.toml").exists():
        place = place / "run"
    if (place.parent / "federation.json").exists() and place.name == "run":
        return runs.load(place, _led(place, allow))
    return runs.load(place, allow=allow)


def _led(place: Path, allow: Allowed) -> Setup:
    """What the server of a federation knows of its run."""
    from descant.deploy import require_flower

    require_flower()
    from descant.deploy.plan import Plan, hashed
    from descant.deploy.roster import read_members

    _, kind, members = read_members(place.parent / "federation.json")
    names = hashed([member.name for member in members])
    plan = Plan(layout.experiment(place, allow), kind, len(members), names)
    return plan.setup(plan.task(), members)
