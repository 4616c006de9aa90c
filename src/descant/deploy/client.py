"""The client: read a request, work on its own data, reply.

The work is the simulator's (`Work.execute`) for ONE client. The reply holds the method's upload, counts and
figures; the client's state and personal model stay in the client directory (docs/privacy.md says for which
methods the upload reveals them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from descant import __version__
from descant.core.algorithm import Message
from descant.core.federation import Federation
from descant.core.permit import Allowed, opened
from descant.core.sample import SampleFormat
from descant.core.splits import SPLITS
from descant.core.task import Task
from descant.core.threads import one_thread
from descant.core.tree import Tree, leaves, map_tree
from descant.core.vector import Model
from descant.data.spec import DataSpec
from descant.deploy.client_directory import ClientDirectory, ClientStates, Ledger
from descant.deploy.export.client_data import ClientData, read_client_data
from descant.deploy.export.layers import described
from descant.deploy.export.manifest import TENSORS, Manifest, save_model
from descant.deploy.export.personalize import figures_of, learned_alone
from descant.deploy.masking import PHASES, Masking
from descant.deploy.messages import WireMessage
from descant.deploy.privacy import OwnAccount, Spent, tells_nothing, without_loss
from descant.deploy.protocol import (
    MAX_CLIENTS,
    PROTOCOL,
    TRAINING,
    RemoteExperiment,
    Shapes,
    received_experiment,
    tables_of,
)
from descant.deploy.refusals import Mismatch, NotJoined, Refusal
from descant.deploy.riders import RIDER, apart, together
from descant.deploy.secure.parts import Identity
from descant.deploy.transport import Payload, Rejected
from descant.engine.features import on_features
from descant.engine.personal import job_for
from descant.engine.store import ASKED
from descant.engine.work import Job, LocalResult, Work
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.models.module import ModuleTask

JOINING = ("session", "experiment", "kind", "clients", "names", "client", "unseen", "secure")
REPEATS = 20  # of one request: a client or a server that was killed needs some
JOBS: tuple[Job, ...] = (*TRAINING, "score", "score_newcomer")


class Observer(Protocol):
    """Told what the client does, such as a display."""

    def joined(self, what: str, rounds: int, clients: int | None, sizes: dict[str, int]) -> None:
        """Without `clients`, as a newcomer."""

    def working(self, what: str, number: int) -> None: ...

    def answered(self, what: str, number: int, facts: Mapping[str, Any], shapes: Mapping[str, Sequence[int]],
                 count: int) -> None:
        """What leaves the machine: facts, tensors by name, bytes of the tensors."""

    def finished(self, figures: dict[str, Any], place: Path) -> None: ...

    def failed(self, what: str, error: Exception) -> None: ...


class Membership(NamedTuple):
    """A federation that this client has joined."""

    remote: RemoteExperiment
    client: int
    task: Task
    federation: Federation
    shapes: Shapes
    work: Work  # behind the frozen layers with which the network begins
    states: ClientStates
    ledger: Ledger
    account: OwnAccount | None  # of the privacy of its rows ...
    spending: list[Ledger]  # ... and all that counts for it

    @property
    def setup(self) -> Setup:
        return self.remote.setup(self.task, self.federation)


class Client:
    """`data` names its file, or a client of a known dataset. `secure`: it takes part only with secure
    aggregation, of so many clients at least."""

    def __init__(self, name: str, data: str, directory: Path, observer: Observer, *,
                 allow: Allowed = (), expected: Experiment | None = None, identity: Identity | None = None,
                 secure: int | None = None) -> None:
        self.name = name
        self._source = data
        self._directory = ClientDirectory(directory)
        self._observer = observer
        self._permit = opened(allow)
        self._expected = None if expected is None else tables_of(expected)
        self._data: tuple[DataSpec, ClientData] | None = None  # read for this [data] section
        self._membership: Membership | None = None
        self._masking = Masking(identity, secure)

    def reply(self, payload: Payload) -> Payload:
        """For a transport."""
        try:
            request = WireMessage.decode(payload)
        except Rejected as error:  # whose text quotes nothing of this client's
            return WireMessage({"failed": str(error)}).encode()
        return self.answer(request).encode()

    def answer(self, request: WireMessage) -> WireMessage:
        """Do what a request says. An error is reported here in full, but to the server only by its type: it
        may quote a value of a row."""
        what = request.facts.get("what")
        echo = {"what": what, "nonce": request.facts.get("nonce"), "name": self.name}
        with one_thread():
            if what == "work" and RIDER in request.facts:
                scored, request = apart(request, 2)
                found = together([self._done_of("scores", scored), self._done_of(what, request)])
            else:
                found = self._done_of(what, request)
        found = found._replace(facts=echo | found.facts)
        number = request.facts.get("number")
        shapes = {name: packed.shape for name, packed in found.tensors.items()}
        self._observer.answered(str(what), number if isinstance(number, int) else 0, found.facts, shapes,
                                found.nbytes())
        return found

    def _done_of(self, what: Any, request: WireMessage) -> WireMessage:
        """The reply to one piece of work, or why there is none."""
        handlers = {"hello": self._hello, "refuse": self._refuse, "join": self._join, "work": self._work,
                    "finish": self._finish, "secure": self._secure, "scores": self._scores}
        try:
            if what not in handlers:
                raise Rejected(f"request {what!r:.40} is unknown to descant {__version__}")
            return handlers[what](request)
        except Exception as error:
            self._observer.failed(str(what), error)
            told = isinstance(error, NotJoined | Mismatch | Spent)
            reason = str(error) if told else type(error).__name__
            facts = error.facts if isinstance(error, Mismatch) else {}
            return WireMessage(facts | {"failed": reason, "ready": not isinstance(error, NotJoined)})

    # -- before the first round ------------------------------------------------------------------

    def _hello(self, request: WireMessage) -> WireMessage:
        """Read the data for the experiment, and report their kind and number."""
        version, protocol = request.facts.get("version"), request.facts.get("protocol")
        if version != __version__ or protocol != PROTOCOL:
            raise Mismatch(f"the client runs descant {__version__}, the server {version!s:.20}: install the "
                           "same version on both")
        experiment = received_experiment(request.fact("experiment", dict), self._permit, self._expected)
        data = self._read(experiment)
        return WireMessage({"kind": data.kind.dump(), "rows": len(data.x), "version": __version__})

    def _refuse(self, request: WireMessage) -> WireMessage:
        """The server says why this client cannot take part."""
        text = "".join(letter if letter.isprintable() else " " for letter in request.fact("reason", str))
        raise Refusal(f"the server refuses this client: {text[:300]}")

    def _join(self, request: WireMessage) -> WireMessage:
        facts = {name: request.facts.get(name) for name in JOINING}
        joined = self._enter(facts)
        self._directory.join(facts)
        remote, client, federation = joined.remote, joined.client, joined.federation
        sizes = {str(split): int(federation.split(split).sizes[client]) for split in SPLITS}
        clients = None if client >= remote.clients - remote.unseen else remote.clients
        self._observer.joined(str(remote), remote.train.rounds, clients, sizes)
        return WireMessage({"session": remote.session, "client": client, "sizes": sizes})

    def _read(self, experiment: Experiment) -> ClientData:
        if self._data is None or self._data[0] != experiment.data:
            self._data = experiment.data, read_client_data(self._source, experiment.data)
        return self._data[1]

    def _enter(self, facts: dict[str, Any]) -> Membership:
        join = WireMessage(facts)
        tables, client = join.fact("experiment", dict), join.fact("client", int)
        experiment = received_experiment(tables, self._permit, self._expected)
        clients, unseen = join.fact("clients", int), join.fact("unseen", int)
        if not (1 <= clients <= MAX_CLIENTS and 0 <= unseen <= 1):  # before anything is made for each of them
            raise Rejected(f"a federation cannot have {clients} clients, {unseen} of them new")
        remote = RemoteExperiment(experiment, SampleFormat.parse(facts["kind"]), clients,
                                  join.fact("names", str), unseen, self._masking.agreed(facts.get("secure")))
        if not 0 <= client < remote.clients:
            raise Rejected(f"client {client} is not one of {remote.clients}")
        if remote.session != join.fact("session", str):
            raise Mismatch("server and client derive different experiments: their versions of descant differ")
        task = remote.task()
        federation = self._read(experiment).within(remote.federation(), client, experiment.data,
                                                   remote.train.torch_dtype)
        work, privacy = remote.work(*on_features(task, federation)), experiment.privacy
        states, ledger = self._directory.states(remote.session), self._directory.ledger(remote.session)
        account = None if privacy is None else OwnAccount.of(work, remote.train, privacy, client)
        self._membership = Membership(
            remote, client, task, federation, remote.shapes(task), work, states, ledger, account,
            [] if account is None else self._directory.kin(ledger, remote.agreed))
        return self._membership

    def _joined(self, request: WireMessage) -> Membership:
        """The federation of a request; after a restart, it is read from the client directory."""
        session = request.fact("session", str)
        if self._membership is None and (known := self._directory.joined()) is not None and (
                known["session"] == session and request.facts.get("number", 0) <= _rounds(known)):
            self._enter(known)
        if self._membership is None or self._membership.remote.session != session:
            raise NotJoined("not joined")
        return self._membership

    # -- rounds ----------------------------------------------------------------------------------

    def _work(self, request: WireMessage) -> WireMessage:
        joined = self._joined(request)
        job: Job = request.fact("job", str)
        if job not in JOBS or job not in joined.shapes.messages:
            raise Rejected(f"job {job!r:.40} is unknown")
        number, counted = request.fact("number", int), request.fact("counted", int)
        silent = tells_nothing(joined.remote.experiment.privacy)
        if silent and job not in TRAINING:
            raise Mismatch('privacy.figures = "off": the figures of held-out rows stay with the clients')
        self._count(joined, job, number)
        if joined.account is not None and job in TRAINING:
            joined.account.require(sum(ledger.total(TRAINING) for ledger in joined.spending),
                                   sum(ledger.rounds(TRAINING) for ledger in joined.spending))
        self._observer.working(job, number)
        state = joined.states.read(counted, joined.shapes.state)
        secret = job in TRAINING and joined.remote.secure is not None
        one = self._masking.prepare(joined, request) if secret else None
        value, steps = self._done(joined, job, number, request, state)
        facts = {"job": job, "number": number, "steps": steps}
        if not isinstance(value, LocalResult):
            return WireMessage.of(facts, value=value)
        value = without_loss(value) if silent else value
        kept = request.fact("kept", list)
        joined.states.write(ASKED if job == "opening" else number, value.state, {counted, *kept})
        if one is None:
            return WireMessage.of(facts, value=value._replace(state=()))
        masked = self._masking.masked(joined, one, self._message(joined, job, request), value)
        return masked._replace(facts=facts)

    def _scores(self, request: WireMessage) -> WireMessage:
        """Of the round before, beside the work of the next."""
        if request.facts.get("job") in TRAINING:
            raise Rejected("training does not ride with other work")
        return self._work(request)

    def _secure(self, request: WireMessage) -> WireMessage:
        """A phase of secure aggregation other than the work itself."""
        joined, phase = self._joined(request), request.fact("phase", str)
        if phase not in PHASES or joined.remote.secure is None:
            raise Rejected(f"phase {phase!r:.40} is unknown")
        self._count(joined, phase, request.fact("number", int))
        return self._masking.reply(joined, request)

    def _count(self, joined: Membership, what: str, number: int) -> None:
        """Enter a request in the ledger, before anything is done for it."""
        if number > joined.remote.train.rounds:
            # the experiment may have been given more rounds: joining tells how many, and --expect whether
            self._membership = None
            raise NotJoined("not joined")
        if number < 0:
            raise Rejected(f"there is no round {number}")
        if (times := joined.ledger.enter(what, number)) > REPEATS:
            raise Mismatch(f"the server has asked {times} times for {what!r} of round {number}: this client "
                           f"replies {REPEATS} times")

    def _done(self, joined: Membership, job: Job, number: int, request: WireMessage, state: Tree
              ) -> tuple[Any, int]:
        message = self._message(joined, job, request)
        return joined.work.execute_one(job, joined.client, number,
                                       Message(message.shared, _row(message.each)), _row(state))

    def _message(self, joined: Membership, job: Job, request: WireMessage) -> Message:
        """What this client was sent."""
        makes_model = job in ("personalize", "adapt")  # from the message of a score job
        form: Message = joined.shapes.messages[job_for(job == "adapt", score=True) if makes_model else job]
        message = Message(request.tree("shared", form.shared), request.tree("each", form.each))
        return message._replace(shared=message.shared.message) if makes_model else message

    # -- afterwards ------------------------------------------------------------------------------

    def _finish(self, request: WireMessage) -> WireMessage:
        """Make and save the personal model, and score it beside the shared model and local training alone."""
        joined = self._joined(request)
        number, counted = request.fact("number", int), request.fact("counted", int)
        self._count(joined, "finish", number)
        self._observer.working("finish", number)
        state = joined.states.read(counted, joined.shapes.state)
        is_newcomer = counted <= 0
        personal, _ = self._done(joined, job_for(is_newcomer), number, request, state)
        scored, _ = self._done(joined, job_for(is_newcomer, score=True), number, request, state)
        figures: dict[str, Any] = figures_of(joined.task, scored)
        place = self._save(joined, personal, number, newcomer=is_newcomer)
        if request.facts.get("alone"):
            figures["alone"] = learned_alone(joined.setup, joined.client, self.name, max(1, number))
        self._observer.finished(figures, place)
        told = {} if tells_nothing(joined.remote.experiment.privacy) else figures
        return WireMessage({"number": number, "figures": told})

    def _save(self, joined: Membership, personal: Tree, number: int, newcomer: bool) -> Path:
        """Save what this client predicts with: a state_dict if it is one network."""
        module = joined.task.module(personal) if isinstance(personal, Model) and isinstance(
            joined.task, ModuleTask) else None
        tensors: dict[str, Any] = dict(leaves(personal)) if module is None else module.state_dict()
        about = Manifest.of(joined.setup, joined.client, name=self.name, newcomer=newcomer, number=number,
                            which="best", tensors="parts" if module is None else "state_dict",
                            fitted=joined.remote.federation())
        about = dataclasses.replace(about, layers=None if module is None else described(module))
        save_model(self._directory.directory, tensors, about, private=True)
        return self._directory.directory / TENSORS


def _rounds(known: dict[str, Any]) -> int:
    """Of the experiment that was joined."""
    rounds: int = known["experiment"]["train"]["rounds"]
    return rounds


def _row(tree: Tree) -> Tree:
    return map_tree(lambda leaf: leaf[None], tree)
