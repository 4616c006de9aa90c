"""Write the models of a run as files: one directory for each."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from descant.core.algorithm import Algorithm
from descant.core.files import sync_directory, write_atomic
from descant.core.import_object import named_in
from descant.core.permit import Permit
from descant.core.splits import SPLITS
from descant.core.task import inputs
from descant.core.threads import one_thread
from descant.deploy.export.card import card_files, privacy_words, test_figures
from descant.deploy.export.formats import NAMES, Converted, Format, convert, require_formats
from descant.deploy.export.layers import described
from descant.deploy.export.manifest import Manifest, save_model
from descant.deploy.export.network import OnRows, rebuilt
from descant.errors import DescantError, UsageError, one, unknown
from descant.experiment.run import Run, Setup, Which
from descant.models.module import ModuleTask

SHARED = "global"  # the directory of the global model
TRIED = 64  # rows on which files are compared
NO_BEST = "this is the last round: without validation data there is no best round"


class Exported(NamedTuple):
    places: list[Path]
    problems: list[str]  # what failed


def export_model(run: Run, client: int | str | None, to: str | Path, which: Which = "best",
                 formats: Sequence[Format] = (), card: bool = False) -> Path:
    """Write one client's model (None: the global model) to a directory in `to`, which is returned. With a
    `card`, it is one for the Hugging Face Hub."""
    if not isinstance(run, Run):
        raise UsageError(f"export_model needs a run, as of descant.run or descant.load, not {one(run)}")
    wanted = [] if client is None else [find_client(run, client)]
    made = export_models(run, wanted, Path(to), which=which, shared=client is None, formats=formats,
                         card=card)
    if made.problems:
        raise DescantError(made.problems[0])
    return made.places[0]


def export_models(run: Run, clients: Sequence[int], to: Path, *, which: Which = "best",
                  shared: bool = False, formats: Sequence[Format] = (), card: bool = False,
                  report: Callable[[int], None] = lambda done: None) -> Exported:
    """Write the models of these clients, and the global model if `shared`. Nothing is overwritten, and every
    written model is complete. `report` is called with the number done."""
    require_formats(formats)
    _require_module(run, clients)
    names = run.setup.federation.names
    safe = safe_names(names)
    wanted: list[tuple[str, int | None, Path]] = [(names[k], k, to / safe[names[k]]) for k in clients]
    if shared:
        run.global_model(which)  # raises if the method has none
        wanted.append(("the global model", None, to / SHARED))
    refuse_taken([place for *_, place in wanted])
    make_directory(to)
    places: list[Path] = []
    problems: list[str] = []
    for count, (name, client, place) in enumerate(wanted, 1):
        try:
            made = _of_run(run, client, which)
            hub = card_files(made.manifest, name, test_figures(run, client, which),
                             privacy_words(run, client, which)) if card else {}
            check = count == 1  # the others differ in their parameters only
            problems += [f"{name}: {problem}" for problem in write_model(
                place, *made, formats, check, hub)]
            places.append(place)
        except DescantError as error:
            problems.append(f"{name}: {error}")
        report(count)
    return Exported(places, problems)


class Made(NamedTuple):
    """A model before it is written."""

    module: nn.Module
    manifest: Manifest
    samples: Tensor  # a few preprocessed samples to try it on


def _of_run(run: Run, client: int | None, which: Which) -> Made:
    number, _, store = run.snapshot(which)
    setup, federation = run.setup, run.setup.federation
    about = partial(Manifest.of, setup, client, number=number, which=which, notes=notes_on(run, which))
    if client is None:
        return Made(run.global_model(which), about(name=None, newcomer=False), federation.x[:TRIED])
    newcomer = not bool(store.took_part(np.array([client]))[0])
    return Made(run.personal_model(client, which), about(name=federation.names[client], newcomer=newcomer),
                samples_of(setup, client))


def notes_on(run: Run, which: Which) -> tuple[str, ...]:
    """Caveats about the selected round."""
    return (NO_BEST,) if which == "best" and run.best_round is None else ()


def samples_of(setup: Setup, client: int) -> Tensor:
    """A few samples of a client, of any split."""
    rows = np.concatenate([setup.federation.split(split)[client] for split in SPLITS])[:TRIED]
    return setup.federation.x[torch.from_numpy(rows)]


def write_model(place: Path, module: nn.Module, manifest: Manifest, samples: Tensor,
                formats: Sequence[Format] = (), check: bool = True,
                more: Mapping[str, bytes] = MappingProxyType({})) -> list[str]:
    """Write a model to a directory, atomically, with `more` files; returns what failed. `check`: test whether
    the files give the same module again."""
    with torch.no_grad(), one_thread():
        manifest = _with_layers(module, manifest, samples)
        problems = _misfits(module, manifest, samples) if check and manifest.layers is None else []
        whole = OnRows(module, manifest).eval()
        converted = convert(whole, _rows(whole, samples), formats)
    failed = {name: made for name, made in converted.items() if isinstance(made, str)}
    problems += [f"{NAMES[name]} could not be written: {why}" for name, why in failed.items()]
    files = {name: made for name, made in converted.items() if isinstance(made, Converted)}
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # from an export that was killed
    try:
        temporary.mkdir()
        for name, data in ({NAMES[name]: made.data for name, made in files.items()} | dict(more)).items():
            write_atomic(temporary / name, data)
        about = {NAMES[name]: made.about for name, made in files.items()}
        save_model(temporary, module.state_dict(), dataclasses.replace(manifest, files=about))
        temporary.rename(place)
        sync_directory(place.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return problems


def _with_layers(module: nn.Module, manifest: Manifest, samples: Tensor) -> Manifest:
    """The manifest with the description of the module's layers, if the same module can be made of it."""
    found = dataclasses.replace(manifest, layers=described(module))
    return manifest if found.layers is None or _difference(module, found, samples) else found


def _misfits(module: nn.Module, manifest: Manifest, samples: Tensor) -> list[str]:
    """Whether the model that is rebuilt from its name differs."""
    reason = None if manifest.model is None else _difference(module, manifest, samples)
    return [] if reason is None else [
        f"load_model cannot rebuild this model from its name ({reason}): pass the module, "
            "load_model(DIR, module=...)"]


def _difference(module: nn.Module, manifest: Manifest, samples: Tensor) -> str | None:
    """Why the model that is rebuilt from its files is not this module; None if it is."""
    try:
        places = named_in({"model": manifest.model or {}})
        of_run = Permit(tuple(place for _, place in places))  # permitted then
        again = rebuilt(manifest, dict(module.state_dict()), None, "", of_run)
        x = inputs(samples, manifest.torch_dtype)
        return None if torch.equal(again(x), module(x)) else "it gives other outputs"
    except DescantError as error:
        return str(error)


def _rows(network: OnRows, samples: Tensor) -> Tensor:
    """Raw rows near those of these samples, and one with all values missing."""
    rows = network.inverse(samples)
    if network.fill is not None:
        rows = torch.cat([rows, torch.full_like(rows[:1], torch.nan)])
    return rows if len(rows) > 1 else torch.cat([rows, rows])


def _require_module(run: Run, clients: Sequence[int]) -> None:
    """Refuse a run without one network per client."""
    algorithm = run.setup.algorithm
    if not isinstance(run.setup.task, ModuleTask):
        raise UsageError("the model of this run is a function of a vector, not a network: there is no module "
                         "to export; run.personal(client) has the parameters")
    if clients and run.setup.federation.is_remote:
        raise UsageError("the personal models of this run are on the clients' machines: each client has "
                         "model.safetensors in its client directory; use --global for the global model")
    if clients and type(algorithm).predict is not Algorithm.predict:
        raise UsageError(f"a client of {algorithm.name} predicts with more than one module, which cannot be "
                         "exported; run.personal(client) has the parts")


# -- names ---------------------------------------------------------------------------------------------


def find_client(run: Run, client: int | str) -> int:
    """A client by its name or number; a name takes precedence."""
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
    """For each client a directory name: its own if it is valid, else a shortened one with a hash."""
    plain = {name: re.sub(r"[^\w.-]+", "_", name).strip(".")[:60] or "_" for name in names}
    kept = [short.casefold() for name, short in plain.items() if short == name]  # some disks ignore case
    taken = Counter([SHARED, *kept])
    return {name: short if short == name and taken[short.casefold()] == 1
            else f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:8]}" for name, short in plain.items()}


def refuse_taken(places: Sequence[Path]) -> None:
    for place in places:
        if place.is_symlink() or place.exists():
            raise UsageError(f"{place} exists already: choose another --to, or remove it")


def make_directory(to: Path) -> None:
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {to}: {error.strerror or error}; choose another --to") from None


# -- runs ------------------------------------------------------------------------------------------------


def refuse_no_run(place: Path) -> None:
    """Refuse a directory that cannot hold one run."""
    if not place.is_dir():
        raise UsageError(f"there is no directory {place}: name that of a run")
    if (place / "comparison.json").exists():
        inner = sorted(path.parent for path in place.glob("runs/*/*/config.toml"))
        such = f", such as {inner[0]}" if inner else ""
        raise UsageError(f"{place} is a comparison: name one of its runs{such}")
