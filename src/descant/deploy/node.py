"""What a client does when the server asks: read the order, work on its own data, answer.

The work is that of the simulator (`Work.execute`), for ONE client. What goes back is the method's upload,
counts and figures; the client's state and its personal model stay in its directory (docs/privacy.md says in
which methods the upload tells what they are).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from descant import __version__
from descant.core.algorithm import Message
from descant.core.permit import Allowed, opened
from descant.core.sample import SampleFormat
from descant.core.splits import SPLITS
from descant.core.task import Task
from descant.core.threads import one_thread
from descant.core.tree import Tree, leaves, map_tree
from descant.core.vector import Model
from descant.deploy.export.alone import learned_alone
from descant.deploy.export.manifest import TENSORS, Manifest, save_model
from descant.deploy.keep import Keep, States
from descant.deploy.letters import Letter, Refused
from descant.deploy.plan import PROTOCOL, Forms, Plan, read_experiment, tables_of
from descant.deploy.site import Site, read_site
from descant.engine.personal import job_for
from descant.engine.store import ASKED
from descant.engine.work import Job, LocalResult, Scored, Work
from descant.errors import DescantError, UsageError
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.models.module import ModuleTask

JOINING = ("session", "experiment", "kind", "clients", "names", "client", "unseen")
JOBS: tuple[Job, ...] = ("local", "opening", "score", "score_newcomer")


class Watcher(Protocol):
    """Whoever wants to know what the client does, such as a display."""

    def joined(self, plan: Plan, client: int, sizes: dict[str, int]) -> None: ...

    def working(self, what: str, number: int) -> None: ...

    def answered(self, what: str, number: int, letter: Letter) -> None:
        """What leaves the machine."""

    def finished(self, figures: dict[str, Any], place: Path) -> None: ...

    def failed(self, what: str, error: Exception) -> None: ...


class Joined(NamedTuple):
    """A federation that this client is part of."""

    plan: Plan
    client: int
    task: Task
    forms: Forms
    work: Work
    states: States

    @property
    def setup(self) -> Setup:
        """This client's part of the experiment as if it were a run."""
        sections = self.plan.experiment.dump()
        return Setup(self.plan.experiment.algorithm, self.task, self.work.federation, self.plan.train,
                     self.plan.experiment.eval, {name: sections[name] for name in ("data", "model")})


class Node:
    """A client: its name, its data, its directory."""

    def __init__(self, name: str, data: str, directory: Path, watcher: Watcher, *,
                 allow: Allowed = (), expected: Experiment | None = None) -> None:
        self.name = name
        self._data = data
        self._keep = Keep(directory)
        self._watcher = watcher
        self._permit = opened(allow)
        self._expected = None if expected is None else tables_of(expected)
        self._site: tuple[str, Site] | None = None  # as an experiment's [data] section makes it
        self._joined: Joined | None = None

    def answer(self, order: Letter) -> Letter:
        """Do what an order says. Whatever goes wrong is told here in full, and to the server in a word:
        an error may quote a value of somebody's row."""
        what = order.facts.get("what")
        echo = {"what": what, "nonce": order.facts.get("nonce"), "name": self.name}
        try:
            with one_thread():
                answers = {"hello": self._hello, "join": self._join, "work": self._work,
                           "finish": self._finish}
                if what not in answers:
                    raise Refused(f"an order {what!r:.40} is not known to descant {__version__}")
                found = answers[what](order)
                found = found._replace(facts=echo | found.facts)
        except Exception as error:
            self._watcher.failed(str(what), error)
            reason = str(error) if isinstance(error, NotReady | Mismatch) else type(error).__name__
            found = Letter(echo | {"failed": reason, "ready": not isinstance(error, NotReady)})
        number = order.facts.get("number")
        self._watcher.answered(str(what), number if isinstance(number, int) else 0, found)
        return found

    # -- before the first round ------------------------------------------------------------------

    def _hello(self, order: Letter) -> Letter:
        """Read the data as the experiment wants them, and say of what kind they are, and how many."""
        if (version := order.facts.get("version")) != __version__ or order.facts.get("protocol") != PROTOCOL:
            raise Mismatch(f"the client runs descant {__version__}, the server {version!s:.20}: install the "
                           "same version on both sides")
        site = self._read(order.fact("experiment", dict))
        return Letter({"kind": site.kind.dump(), "rows": len(site.x), "version": __version__})

    def _join(self, order: Letter) -> Letter:
        """Take a place among the clients."""
        facts = {name: order.facts.get(name) for name in JOINING}
        joined = self._enter(facts)
        self._keep.join(facts)
        client, federation = joined.client, joined.work.federation
        sizes = {str(split): int(federation.split(split).sizes[client]) for split in SPLITS}
        self._watcher.joined(joined.plan, client, sizes)
        return Letter({"session": joined.plan.session, "client": client, "sizes": sizes})

    def _read(self, tables: dict[str, Any]) -> Site:
        experiment = read_experiment(tables, self._permit, self._expected)
        key = json.dumps(tables["data"], sort_keys=True)
        if self._site is None or self._site[0] != key:
            self._site = key, read_site(self._data, experiment.data)
        return self._site[1]

    def _enter(self, facts: dict[str, Any]) -> Joined:
        letter = Letter(facts)
        tables, client = letter.fact("experiment", dict), letter.fact("client", int)
        experiment = read_experiment(tables, self._permit, self._expected)
        plan = Plan(experiment, SampleFormat.parse(facts["kind"]), letter.fact("clients", int),
                    letter.fact("names", str), letter.fact("unseen", int))
        if not 0 <= client < plan.clients:
            raise Refused(f"client {client} is not one of {plan.clients}")
        if plan.session != letter.fact("session", str):
            raise Mismatch("the server's idea of the experiment is another: the versions of descant differ")
        task = plan.task()
        site = self._read(tables)
        federation = site.within(plan.frame(), client, experiment.data, plan.train.torch_dtype)
        self._joined = Joined(plan, client, task, plan.forms(task), plan.work(task, federation),
                              self._keep.states(plan.session))
        return self._joined

    def _ready(self, order: Letter) -> Joined:
        """The federation that an order is about; after a restart, it is in the directory."""
        session = order.fact("session", str)
        if self._joined is None and (kept := self._keep.joined()) is not None and kept["session"] == session:
            self._enter(kept)
        if self._joined is None or self._joined.plan.session != session:
            raise NotReady("not joined")
        return self._joined

    # -- rounds ----------------------------------------------------------------------------------

    def _work(self, order: Letter) -> Letter:
        """One job of a round."""
        joined = self._ready(order)
        job: Job = order.fact("job", str)
        if job not in JOBS or job not in joined.forms.messages:
            raise Refused(f"a job {job!r:.40} is not known")
        number, counted = order.fact("number", int), order.fact("counted", int)
        self._watcher.working(job, number)
        state = joined.states.read(counted, joined.forms.state)
        value, steps = self._done(joined, job, number, order, state)
        facts = {"job": job, "number": number, "steps": steps}
        if not isinstance(value, LocalResult):
            return Letter.of(facts, value=value)
        kept = order.fact("kept", list)
        joined.states.write(ASKED if job == "opening" else number, value.state, {counted, *kept})
        return Letter.of(facts, value=value._replace(state=()))

    def _done(self, joined: Joined, job: Job, number: int, order: Letter, state: Tree) -> tuple[Any, int]:
        makes_model = job in ("personalize", "adapt")  # from the message of a score job
        form: Message = joined.forms.messages[job_for(job == "adapt", score=True) if makes_model else job]
        message = Message(order.tree("shared", form.shared), order.tree("each", form.each))
        if makes_model:
            message = message._replace(shared=message.shared.message)
        return joined.work.execute_one(job, joined.client, number,
                                       Message(message.shared, _row(message.each)), _row(state))

    # -- afterwards ------------------------------------------------------------------------------

    def _finish(self, order: Letter) -> Letter:
        """Make the personal model, keep it, and see what it is worth: beside the model for all, and beside
        what this client could have learned alone."""
        joined = self._ready(order)
        number, counted = order.fact("number", int), order.fact("counted", int)
        self._watcher.working("finish", number)
        state = joined.states.read(counted, joined.forms.state)
        is_newcomer = counted <= 0
        personal, _ = self._done(joined, job_for(is_newcomer), number, order, state)
        scored, _ = self._done(joined, job_for(is_newcomer, score=True), number, order, state)
        figures = self._figures(joined, scored)
        place = self._save(joined, personal, number, newcomer=is_newcomer)
        if order.facts.get("alone"):
            figures["alone"] = learned_alone(joined.setup, joined.client, self.name, max(1, number))
        self._watcher.finished(figures, place)
        return Letter({"number": number, "figures": figures})

    def _figures(self, joined: Joined, scored: Scored) -> dict[str, Any]:
        named = {"personal": scored.personal} | ({} if scored.shared == () else {"shared": scored.shared})
        names = joined.task.metric_names
        return {who: {name: float(value) for name, value in
                      zip(names, joined.task.figures(scores.test), strict=True)}
                for who, scores in named.items()}

    def _save(self, joined: Joined, personal: Tree, number: int, newcomer: bool) -> Path:
        """What this client predicts with: as a state_dict where it is one network."""
        if is_network := isinstance(personal, Model) and isinstance(joined.task, ModuleTask):
            tensors: dict[str, Any] = joined.task.module(personal).state_dict()
        else:
            tensors = dict(leaves(personal))
        about = Manifest.of(joined.setup, joined.client, name=self.name, newcomer=newcomer, number=number,
                            which="best", tensors="state_dict" if is_network else "parts",
                            fitted=joined.plan.frame())
        save_model(self._keep.directory, tensors, about)
        return self._keep.directory / TENSORS


class NotReady(DescantError):
    """This client must join first."""


class Mismatch(UsageError):
    """The two sides do not fit; the reason may be told to both."""


def _row(tree: Tree) -> Tree:
    return map_tree(lambda leaf: leaf[None], tree)


