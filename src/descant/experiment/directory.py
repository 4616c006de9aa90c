"""The files of a run directory, which docs/run-directory.md lists. Lines are appended before their round is
committed; `truncate` drops those of an uncommitted round."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from descant.core import fields
from descant.core.federation import Federation
from descant.core.files import append, locked, write_atomic
from descant.core.import_object import is_place, marked, named_in, require_permitted
from descant.core.permit import Allowed, opened, top_of
from descant.core.privacy.settings import Privacy
from descant.core.sealed import CHECK, sealed_table, text_check, unsealed_table
from descant.engine.account import Account
from descant.engine.divergence import has_diverged
from descant.engine.evaluation import Evaluation
from descant.engine.settings import Train
from descant.errors import DescantError, UsageError
from descant.experiment import methods
from descant.experiment.config import Experiment, read_toml

if TYPE_CHECKING:
    from descant.experiment.run import Setup

CLIENTS = "clients_csv"  # in a line of metrics.jsonl: the checksum of the round's lines of clients.csv
NEEDED = ("seconds", "grad_steps", "bytes_down", "bytes_up", "participants", "rejected", "loss")  # of a line
OWN = "[data] and [model] are Python objects: resume with the same call of descant.run and resume=True"


def require_free(out: Path) -> None:
    """Refuse a directory that is not empty, and a name that is none."""
    try:
        out.stat()
    except FileNotFoundError:
        return
    except NotADirectoryError:
        pass  # it cannot be made, which is told then
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{str(out)!r:.60} cannot be the directory of a run: {why}; choose another --out"
                         ) from None
    if (out / "config.toml").exists():
        raise UsageError(f"{out} already holds a run: continue it with `{resume_command(out)}`, "
                         "or choose another --out")
    if out.is_file() or (out.is_dir() and any(not p.name.startswith(".") for p in out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: choose another --out")


def resume_command(out: Path) -> str:
    """The command that resumes a run, with --allow for the code that its directory names."""
    packages: list[str] = []
    with contextlib.suppress(DescantError):  # missing or damaged: this is part of another message
        sections, permit = config(out), opened()
        packages = [top_of(place) for field, place in named_in(sections)
                    if not field.startswith("eval.") and not permit.covers(place)]
    allow = (word for package in dict.fromkeys(packages) for word in ("--allow", package))
    return shlex.join(["descant", "resume", str(out), *allow])


@contextlib.contextmanager
def created(out: Path, sections: dict[str, Any]) -> Iterator[None]:
    """Make a run's directory, and lock it."""
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out))
            require_free(out)  # another process may have been faster
            write_config(out, sections)
        except OSError as error:
            raise DescantError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
        yield


def write_config(out: Path, sections: dict[str, Any]) -> None:
    note = "" if "data" in sections else f"# {OWN}\n\n"
    write_atomic(out / "config.toml", (note + tomli_w.dumps(sections)).encode())


def config(out: Path) -> dict[str, Any]:
    if not (out / "config.toml").exists():
        raise UsageError(f"{out} holds no run: it has no config.toml")
    return read_toml(out / "config.toml")


def experiment(out: Path, allow: Allowed = ()) -> Experiment:
    """The experiment of a run that was started from a file. Code that it names must be allowed."""
    sections = config(out)
    if "data" not in sections:
        raise UsageError(f"{out}: {OWN}")
    name = sections.get("algorithm", {}).get("name")
    if not is_place(name) and name not in methods.names():
        raise UsageError(f"{out}: the method {name!r} is not one of descant's or of an installed package: "
                         "resume with the same call of descant.run and resume=True")
    permit = opened(allow)
    needed = {name: table for name, table in sections.items() if name != "eval"}  # only comparisons measure
    require_permitted(needed, permit, f"{out / 'config.toml'}: ")
    method = methods.find(marked(name, permit), "algorithm.name")
    if field := fields.foreign(method, sections["algorithm"]):
        called = sections["algorithm"][field].get("name")
        raise UsageError(f"{out}: algorithm.{field} was a Python object, {called!r}, which config.toml does "
                         "not hold: resume with the same call of descant.run and resume=True; a run that its "
                         'directory alone can continue has it as { name = "own", place = '
                         '"package.module:name" }')
    return Experiment.parse(sections, permit)


def settled_train(out: Path, train: Train) -> Train:
    """The settings of a run started from Python, with the choices made at its start."""
    stored = fields.parse(Train, config(out).get("train", {}), "train")
    return dataclasses.replace(train, backend=stored.backend, chunk=stored.chunk, workers=stored.workers)


def rounds(out: Path) -> int:
    """How many rounds the run is planned for."""
    return fields.parse(Train, config(out).get("train", {}), "train").rounds


def append_row(out: Path, row: dict[str, Any], evaluations: list[Evaluation], federation: Federation) -> None:
    """Add a round's lines. That of metrics.jsonl has a checksum of itself, and of those of clients.csv."""
    if evaluations:
        path = out / "clients.csv"
        header, lines = _client_lines(evaluations, federation)
        append(path, lines if path.exists() else header + lines)
        row = row | {CLIENTS: text_check(header + lines)}
    append(out / "metrics.jsonl", json.dumps(sealed_table(row)) + "\n")


def _client_lines(evaluations: list[Evaluation], federation: Federation) -> tuple[str, str]:
    """The header of clients.csv, and the lines of a round."""
    texts = [_client_rows(evaluation, federation) for evaluation in evaluations]
    return texts[0][0], "".join(lines for _, lines in texts)


def _client_rows(evaluation: Evaluation, federation: Federation) -> tuple[str, str]:
    scored = [("personal", evaluation.personal), ("global", evaluation.shared)]
    figures = {f"{kind}_{short}_{metric}": getattr(scores, split)[:, k].tolist()
               for kind, scores in scored if scores is not None
               for short, split in (("test", "test"), ("val", "validation"))
               for k, metric in enumerate(evaluation.metrics)}
    header, text = io.StringIO(), io.StringIO()
    about = ["round", "client", "name", "newcomer", "unseen", "n_train", "n_val", "n_test"]
    csv.writer(header, lineterminator="\n").writerow([*about, *figures])
    writer = csv.writer(text, lineterminator="\n")
    sizes = (federation.train.sizes, federation.validation.sizes, federation.test.sizes)
    for k, client in enumerate(evaluation.clients.tolist()):
        values = (column[k] for column in figures.values())
        writer.writerow([evaluation.number, client, federation.names[client], int(evaluation.newcomer[k]),
                         int(client >= federation.population), *(int(n[client]) for n in sizes),
                         *("" if v != v else repr(v) for v in values)])  # NaN: no such rows
    return header.getvalue(), text.getvalue()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; an unfinished last line is left out."""
    return [{name: value for name, value in row.items() if name not in (CHECK, CLIENTS)}
            for row in _sealed_rows(out)]


def _sealed_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl with their checksums, which fit. Those of older versions have none."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in _whole_lines(path)]
        for k, row in enumerate(rows, 1):
            if type(row["round"]) is not int or row["round"] != k:
                raise ValueError("its rounds are not 1, 2, 3, ...")
            if k > 1 and CHECK in rows[k - 2] and CHECK not in row:
                raise ValueError(f"round {k} has no checksum")
            unsealed_table(row)
            if missing := [name for name in NEEDED if name not in row]:
                raise ValueError(f"round {k} has no {missing[0]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DescantError(f"{path} is damaged ({error}): restore it from a copy, or start the run anew"
                           ) from None
    return rows


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file; an unfinished last one is left out."""
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines(keepends=True)


def rows_until(out: Path, number: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl up to round `number`, all of them."""
    rows = read_metrics(out)[:number]
    if len(rows) < number:
        raise DescantError(f"{out / 'metrics.jsonl'} is damaged: it ends at round {len(rows)}, the state "
                           f"at {number}; restore it from a copy, or start the run anew")
    return rows


def truncate(out: Path, number: int) -> None:
    """Drop what belongs to rounds after `number`, which were not committed."""
    rows_until(out, number)
    rows = _sealed_rows(out)[:number]
    if (out / "metrics.jsonl").exists():
        write_atomic(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    clients = out / "clients.csv"
    try:
        header, kept = _client_lines_until(clients, number)
        for row in rows:
            if CLIENTS in row and row[CLIENTS] != text_check(header + "".join(kept.get(row["round"], []))):
                raise ValueError(f"its lines of round {row['round']} are not as they were written")
    except (OSError, ValueError) as error:
        raise DescantError(f"{clients} is damaged ({error}): restore it from a copy, or start the run anew"
                           ) from None
    if kept:
        write_atomic(clients, "".join([header, *chain.from_iterable(kept.values())]).encode())
    else:
        clients.unlink(missing_ok=True)


def _client_lines_until(path: Path, number: int) -> tuple[str, dict[int, list[str]]]:
    """The header of clients.csv, and its lines by round, up to round `number`."""
    lines = _whole_lines(path) if path.exists() else []
    found: dict[int, list[str]] = {}
    for line in lines[1:]:
        round_number = int(line.split(",", 1)[0])
        if round_number <= number:
            found.setdefault(round_number, []).append(line)
    return "".join(lines[:1]), found


def summary(history: list[dict[str, Any]], best_round: int | None, best_key: tuple[float, ...] | None,
            setup: Setup, stopped: str | None) -> dict[str, Any]:
    """The figures of the last round and of the validation-best one, and what the run cost."""
    evaluated = {row["round"]: row for row in history if "personal" in row}

    def figures(number: int | None) -> dict[str, Any] | None:
        row = evaluated.get(number, {}) if number is not None else {}
        return {key: row[key] for key in ("round", "personal", "global", "unseen") if key in row} or None

    last, best = figures(max(evaluated, default=None)), figures(best_round)
    chosen = last if best is None else best
    diverged = next(({"round": row["round"], "words": row["divergence"]} for row in history
                     if "divergence" in row), None)
    totals = {key: sum(row[key] for row in history)
              for key in ("grad_steps", "bytes_down", "bytes_up", "rejected")}
    return {
        "algorithm": setup.algorithm.name,
        "rounds": len(history),
        "clients": setup.federation.population,
        **({} if setup.attack is None else {
            "attackers": [setup.federation.names[client] for client in setup.attackers]}),
        "parameters": setup.task.dim,
        "backend": setup.train.backend,
        "last": last,
        "best": best,
        "diverged": chosen is not None and has_diverged(chosen["personal"]),
        "divergence": diverged,  # when it was first seen, if so
        "metric": setup.deciding.name,
        "selected_by": None if best_key is None else list(best_key),
        "stopped": stopped,  # "converged", "budget" of privacy, or "asked": by a function of the user's; of
        # the runs of a comparison also "diverged"
        **({} if setup.privacy is None else {"privacy": _privacy(history, setup.privacy)}),
        **totals,
        "seconds": round(sum(row["seconds"] + row.get("eval_seconds", 0.0) for row in history), 3),
        "processor_seconds": (  # of training and evaluation; None where some rounds do not know it
            round(sum(row["processor_seconds"] for row in history), 3)
            if all("processor_seconds" in row for row in history) else None),
    }


def _privacy(history: list[dict[str, Any]], privacy: Privacy) -> dict[str, Any]:
    """What the run has spent, and how often its clip bound."""
    clipped = [row["clipped"] for row in history if "clipped" in row]
    return fields.as_table(privacy) | {
        "budget": privacy.epsilon, "epsilon": history[-1]["epsilon"] if history else 0.0,
        "clipped": sum(clipped) / len(clipped) if clipped else None,
        "last_clip": history[-1].get("clip") if history else None}


def write_privacy(out: Path, account: Account, rounds: int, federation: Federation) -> None:
    """privacy.csv: every client's own epsilon, where it is that of its rows."""
    if account.privacy.unit != "record":
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["client", "name", "n_train", "rounds", "epsilon", "delta"])
    taken = account.times(rounds)
    for client, epsilon in enumerate(account.each(rounds)):
        writer.writerow([client, federation.names[client], int(federation.train.sizes[client]),
                         int(taken[client]), f"{epsilon:.4g}", account.privacy.delta])
    write_atomic(out / "privacy.csv", text.getvalue().encode())


def write_summary(out: Path, figures: dict[str, Any]) -> None:
    write_atomic(out / "summary.json", (json.dumps(figures, indent=2) + "\n").encode())
