"""A remote federation as its server sees it: who is connected, who has replied, who was rejected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from descant.core.units import duration, size, times
from descant.engine.backends.choose import Timing
from descant.experiment.run import Run
from descant.view.display import JOBS, Display, line, listed, scores_of
from descant.view.outcome import worth

SHOWN = 20  # clients on a terminal; those that have not answered come first


class ServerDisplay(Display):
    """Shows a remote federation while it runs."""

    def __init__(self, console: Console, clients: int) -> None:
        self._wanted = clients
        self._there: list[str] = []  # who has come, before it begins
        self._names: tuple[str, ...] = ()  # of the federation, once it is complete
        self._rounds, self._done = 0, 0
        self._doing = "starting"
        self._asked_at = 0.0
        self._asked: dict[str, str | None] = {}  # client -> result of the present request; None: no reply yet
        self._received: dict[str, int] = {}  # bytes in this round
        self._slowest = (0.0, "")
        self._lost: dict[str, str] = {}  # who does not reply, and why
        self._missing: tuple[str, ...] = ()  # who is waited for
        self._told: set[str] = set()  # notes; one for every round is shown once
        self._scores = ""
        super().__init__(console)

    @property
    def stands(self) -> str:
        """Where it was stopped."""
        if not self._names:
            return f"stopped while waiting for clients: {len(self._there)} of {self._wanted} were connected"
        if self._done < self._rounds or not self._rounds:
            return f"stopped after round {self._done} of {self._rounds}"
        return f"stopped after all {times(self._rounds, 'round')}, while sending the models"

    # -- before the first round ------------------------------------------------------------------

    def waiting(self, there: int, wanted: int, missing: Sequence[str]) -> None:
        if not self._names:  # before the start, `missing` names the connected clients
            self._doing = "waiting for clients"
            self._gather(missing)
            return
        self._doing = f"waiting for {listed(missing)}"
        if self._missing != tuple(missing):
            self._missing = tuple(missing)
            self.say(f"waiting for {listed(missing)}: {there} of {wanted} needed clients are connected")

    def _gather(self, names: Sequence[str]) -> None:
        for name in [name for name in self._there if name not in names]:
            self._there.remove(name)
            self.say(f"{name} disconnected")
        for name in [name for name in names if name not in self._there]:
            self._there.append(name)
            self.say(f"{name} connected ({len(self._there)} of {self._wanted})")

    def refused(self, name: str, reason: str) -> None:
        self.say(f"refused {name or 'a client without a name'}: {reason}")

    def noted(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.say(f"note: {text}")

    def differing(self, some: Sequence[str], others: Sequence[str], how: str) -> None:
        self.noted(f"the samples of {listed(others)} differ from those of {listed(some)}: {how}; waiting for "
                   "most of them to agree")

    def gathered(self, names: Sequence[str], what: str, parameters: int, rounds: int) -> None:
        if self._there:
            self._gather(names)  # the last of them
        else:
            self.say(f"the clients of this federation: {listed(names)}")
        self._names = tuple(names)
        self.say(f"{what}: {times(len(names), 'client')}, {times(parameters, 'parameter')}, "
                 f"{times(rounds, 'round')}")

    def started(self, run: Run, measured: list[Timing]) -> None:
        self._run, self._rounds, self._done = run, run.setup.train.rounds, run.rounds
        for note in run.notes:
            self.say(f"note: {note}")
        for caution in run.setup.algorithm.cautions():
            self.say(f"caution: {caution}")
        if self._done >= self._rounds or run.is_converged:
            self.say(f"all {times(self._done, 'round')} are done")
            self._send_models()
        elif self._done:
            self.say(f"continuing after round {self._done} of {self._rounds}")

    # -- rounds ----------------------------------------------------------------------------------

    def asked(self, job: str, number: int, names: Sequence[str]) -> None:
        self._asked = dict.fromkeys(names)
        self._asked_at = time.monotonic()
        self._doing = f"round {number}/{self._rounds}: {JOBS.get(job, job)}"

    def answered(self, name: str, job: str, seconds: float, received: int) -> None:
        if self._lost.pop(name, None) is not None:
            self.say(f"{name} is back")
        self._missing = ()
        self._asked[name] = f"replied after {duration(seconds)}, {size(received)}"
        self._received[name] = self._received.get(name, 0) + received
        self._slowest = max(self._slowest, (seconds, name))

    def lost(self, name: str, job: str, reason: str) -> None:
        self._asked[name] = reason
        if self._lost.get(name) != reason:  # shown once, not in every round
            self._lost[name] = reason
            where = f"round {self._done + 1}" if self._done < self._rounds else "sending the models"
            self.say(f"{where}: nothing from {name}: {reason}")

    def played(self, row: dict[str, Any]) -> None:
        self._done = row["round"]
        if "note" in row and row["note"] not in self._told:
            self._told.add(row["note"])
            self.say(f"round {self._done}: {row['note']}")
        if "divergence" in row:
            self.say(f"round {self._done}: {row['divergence']}")
        scores = scores_of(row, self._run.setup.deciding.name)
        self._scores = "  ".join(scores) or self._scores
        if scores or self._live is None:
            number = f"{self._done:>{len(str(self._rounds))}}/{self._rounds}"
            self.say("  ".join([f"round {number}", self._traffic(row), *scores]))
        self._received, self._slowest = {}, (0.0, "")
        if self._done >= self._rounds or self._run.is_converged:
            self._send_models()

    def _traffic(self, row: dict[str, Any]) -> str:
        seconds = duration(row["seconds"] + row.get("eval_seconds", 0.0))
        slowest = f", slowest {self._slowest[1]}" if len(self._received) > 1 else ""
        return (f"{times(len(self._received), 'client')} in {seconds}{slowest}, "
                f"{size(sum(self._received.values()))}")

    def _send_models(self) -> None:
        self._doing, self._asked = "sending the models", {}
        self._lost.clear()
        self.say(self._doing)

    def served(self, name: str, figures: dict[str, Any]) -> None:
        self._lost.pop(name, None)
        self._asked[name] = "has its model"
        newcomer = "" if name in self._names else ", a newcomer,"
        self.say(f"{name}{newcomer} has its model: {worth(figures)}")

    def lines(self) -> RenderableType:
        states = self._states()
        grid = Table.grid(padding=(0, 2))
        for name, state in states[:SHOWN]:
            grid.add_row(line(f"  {name}"), line(state))
        parts: list[RenderableType] = [line(f"{self._doing}{self._count()}"), grid]
        if len(states) > SHOWN:
            parts.append(line(f"  and {times(len(states) - SHOWN, 'client')} more"))
        if self._scores:
            parts.append(line(self._scores))
        return Group(*parts)

    def _count(self) -> str:
        if not self._names:
            return f": {len(self._there)} of {self._wanted} are connected"
        if not self._asked:
            return ""
        done = sum(state is not None for state in self._asked.values())
        return f", {done} of {len(self._asked)} done"

    def _states(self) -> list[tuple[str, str]]:
        """Each client with what it does; those still working first."""
        if not self._names:
            return [(name, "connected") for name in self._there]
        since = duration(time.monotonic() - self._asked_at)
        states = sorted(self._asked.copy().items(), key=lambda pair: pair[1] is not None)
        return [(name, state or f"working for {since}") for name, state in states]
