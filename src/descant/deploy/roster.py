"""Who is who: the clients of a federation, by name and number, and the nodes that they are at present.

A client is known by the name under which its key is registered; its number is the place of its name among
all names, and stays. Which node it is may change with every restart.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from descant import __version__
from descant.core.files import write_atomic
from descant.core.sample import SampleFormat
from descant.deploy.exchange import Exchange, Lost, Seen
from descant.deploy.frame import Member
from descant.deploy.letters import Letter, Refused
from descant.deploy.plan import PROTOCOL, Plan
from descant.errors import DescantError, UsageError

PATIENCE = 60.0  # seconds that a node has to read its data, or to join; and until it is asked again
TRIES = 3  # to join, in one round
FRESH = 0.4  # seconds for which it is known who is there


class Guest(NamedTuple):
    """A node that said hello."""

    name: str
    kind: SampleFormat
    since: str


class Roster:
    """The nodes, as far as they are known. `refused` is told of those that cannot take part."""

    def __init__(self, exchange: Exchange, tables: dict[str, Any], refused: Callable[[str, str], None]
                 ) -> None:
        self._exchange = exchange
        self._tables = tables
        self._refused = refused
        self._guests: dict[int, Guest] = {}  # by node
        self._left_out: dict[int, tuple[str, float]] = {}  # nodes: when they had come, and until when
        self._greeted = -FRESH
        self.plan: Plan | None = None
        self.names: tuple[str, ...] = ()  # of the clients, by their numbers
        self._members: dict[str, Member] = {}

    # -- who is there ----------------------------------------------------------------------------

    def greet(self) -> dict[str, Guest]:
        """Say hello to those who are new or were restarted, and return everybody who is there and fits."""
        if time.monotonic() - self._greeted < FRESH:
            return {guest.name: guest for guest in self._guests.values()}
        online = self._exchange.online()
        self._guests = {node: guest for node, guest in self._guests.items()
                        if node in online and online[node].since == guest.since}
        new = {node: seen for node, seen in online.items()
               if node not in self._guests and not self._is_left_out(node, seen)}
        hello = {"what": "hello", "protocol": PROTOCOL, "version": __version__, "experiment": self._tables}
        for node, answer in self._asked({node: Letter(dict(hello)) for node in new}, PATIENCE):
            if isinstance(answer, Lost):  # it is asked again, but must not keep everybody waiting
                self._left_out[node] = new[node].since, time.monotonic() + PATIENCE
                continue
            try:
                self._guests[node] = self._guest(new[node], answer)
            except Refused as error:
                self._left_out[node] = new[node].since, math.inf
                self._refused(new[node].name or str(answer.facts.get("name"))[:80], str(error))
        self._greeted = time.monotonic()
        return {guest.name: guest for guest in self._guests.values()}

    def _is_left_out(self, node: int, seen: Seen) -> bool:
        since, until = self._left_out.get(node, ("", 0.0))
        return since == seen.since and time.monotonic() < until

    def _guest(self, seen: Seen, answer: Letter) -> Guest:
        refuse_failure(answer)
        name = answer.fact("name", str)
        if not name.isprintable() or not 0 < len(name) <= 100:
            raise Refused(f"{name!r:.80} is no name")
        if seen.name and name != seen.name:
            raise Refused(f"it calls itself {name!r}, but its key is that of {seen.name!r}")
        if any(guest.name == name for guest in self._guests.values()):
            raise Refused(f"there is already a client of the name {name!r}")
        rows, known = answer.fact("rows", int), self._members.get(name)
        if known is not None and rows != sum(known[1:]):
            raise Refused(f"it joined with {sum(known[1:])} rows, and has {rows} now: give it the data that "
                          "it had")
        try:
            kind = SampleFormat.parse(answer.facts.get("kind"))
        except UsageError as error:
            raise Refused(str(error)) from None
        for guest in self._guests.values():
            if differs := guest.kind.differs(kind):
                raise Refused(f"its samples are not like those of {guest.name}: {differs}")
        return Guest(name, kind, seen.since)

    def is_there(self, client: int) -> bool:
        return self.names[client] in self.greet()

    # -- joining ---------------------------------------------------------------------------------

    def begin(self, plan: Plan, names: tuple[str, ...], members: list[Member]) -> None:
        """From now on the federation is this; without members, they are asked for how many rows they have."""
        self.plan = plan
        self.names = names
        self._members = {member.name: member for member in members}

    def join_all(self) -> list[Member]:
        """Let everybody take their place, in the order of their numbers."""
        assert self.plan is not None
        for client, name in enumerate(self.names):
            node = self._node(name)
            if node is None:
                raise DescantError(f"{name} went away before it joined: start again when it is there")
            if isinstance(found := self.join(node, self.plan, client, name), str):
                raise DescantError(f"{name} cannot join: {found}")
        return [self._members[name] for name in self.names]

    def join(self, node: int, plan: Plan, client: int, name: str) -> Member | str:
        """Give a node its place in the federation; returns what it has, or why it does not take the place."""
        order = Letter({"what": "join", "session": plan.session, "experiment": self._tables,
                        "kind": plan.kind.dump(), "clients": plan.clients, "names": plan.names,
                        "client": client, "unseen": plan.unseen})
        for _, answer in self._asked({node: order}, PATIENCE):
            if isinstance(answer, Lost):
                return answer.reason
            try:
                refuse_failure(answer)
                sizes = Letter(answer.fact("sizes", dict))
                member = Member(name, *(sizes.fact(split, int) for split in Member._fields[1:]))
                if member.train < 1 or min(member[1:]) < 0:
                    raise Refused(f"it says that it has {member.train} rows to train on")
                if (known := self._members.setdefault(name, member)) != member:
                    raise Refused(f"it joined with {known[1:]} rows for training, validation and test, and "
                                  f"has {member[1:]} now: give it the data that it had")
            except Refused as error:
                return str(error)
            return member
        return "not connected"

    # -- orders ----------------------------------------------------------------------------------

    def ask(self, orders: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Letter | Lost]]:
        """Send clients, by their numbers, their orders; a client that forgot where it belongs joins again."""
        assert self.plan is not None
        left, until = dict(orders), time.monotonic() + seconds
        for _ in range(TRIES):
            nodes = {client: self._node(self.names[client]) for client in left}
            client_of = {node: client for client, node in nodes.items() if node is not None}
            letters = {node: left[client] for node, client in client_of.items()}
            again: list[int] = []
            for node, answer in self._asked(letters, max(0.1, until - time.monotonic())):
                client = client_of[node]
                if isinstance(answer, Letter) and answer.facts.get("ready") is False:
                    again.append(client)
                    continue
                del left[client]
                yield client, answer
            for client in again:
                found = self.join(nodes[client] or 0, self.plan, client, self.names[client])
                if isinstance(found, str):
                    del left[client]
                    yield client, Lost(f"it cannot join again: {found}", True)
            if not again:
                break
        for client in left:
            yield client, Lost("not connected")

    def send(self, node: int, letter: Letter, seconds: float) -> Letter | Lost:
        """One order for one node."""
        return next((answer for _, answer in self._asked({node: letter}, seconds)), Lost("not connected"))

    def newcomers(self) -> dict[int, Guest]:
        """Those who are there and are not part of the federation."""
        self.greet()
        return {node: guest for node, guest in self._guests.items() if guest.name not in self.names}

    def _node(self, name: str) -> int | None:
        self.greet()
        return next((node for node, guest in self._guests.items() if guest.name == name), None)

    def _asked(self, letters: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Letter | Lost]]:
        """Ask under a word that the answer must repeat: an old answer does not know it."""
        nonces = {node: secrets.token_hex(8) for node in letters}
        marked = {node: letter._replace(facts=letter.facts | {"nonce": nonces[node]})
                  for node, letter in letters.items()}
        for node, answer in self._exchange.ask(marked, seconds):
            if isinstance(answer, Letter) and (answer.facts.get("nonce") != nonces[node]
                                               or answer.facts.get("what") != letters[node].facts["what"]):
                yield node, Lost("it repeats the answer to another order", True)
            else:
                yield node, answer

    # -- the file --------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        assert self.plan is not None
        write_atomic(path, json.dumps({
            "session": self.plan.session, "kind": self.plan.kind.dump(),
            "members": [self._members[name]._asdict() for name in self.names],
        }, indent=1).encode())


def read_members(path: Path) -> tuple[str, SampleFormat, list[Member]]:
    """What `Roster.write` wrote: the session, the kind of the data, the members."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        members = [Member(**member) for member in found["members"]]
        return found["session"], SampleFormat.parse(found["kind"]), members
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DescantError(f"{path} is damaged ({error}): restore it from a copy, or begin the federation "
                           "anew in another place") from None


def refuse_failure(answer: Letter) -> None:
    """A failure that the client itself reports."""
    if (reason := answer.facts.get("failed")) is not None:
        raise Refused(f"it failed: {_printable(reason)}")


def _printable(reason: Any) -> str:
    """What somebody else wrote, fit for a terminal and a log."""
    return "".join(letter if letter.isprintable() else " " for letter in str(reason))[:200]


