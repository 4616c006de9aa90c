"""`descant.testing.check_algorithm`: a planted fault is found and named, a method without one passes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, Message, Round, average
from descant.core.fields import hyper
from descant.core.vector import Model
from descant.errors import DescantError, UsageError
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD, Solver, solve
from descant.testing import CHECKS, CheckFailed, check_algorithm


class Server(NamedTuple):
    w: Model
    seen: Tensor  # [clients] how often each has taken part


class Upload(NamedTuple):
    w: Model
    seen: Tensor  # []


@dataclass(frozen=True)
class Good(Algorithm):
    """Ditto whose server counts how often each client has taken part, and tells it."""

    name: ClassVar[str] = "good"
    citation: ClassVar[str] = "an example"

    lam: float = hyper(1.0, "strength of the prior", ge=0)
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")

    def init_server(self, task: Any, model: Model, round: Round) -> Server:
        return Server(model, model.theta.new_zeros(round.population))

    def init_client(self, task: Any, model: Model) -> Any:
        return model

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(server.w, server.seen[round.cohort])

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        w = solve(task, message.shared, data, self.solver)
        own = solve(task, state, data, self.solver, Gaussian(message.shared.theta, self.lam))
        return Upload(w, message.each + 1), own

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        seen = server.seen.index_copy(0, round.cohort, uploads.seen)
        return Server(average(uploads.w, round.weights("uniform")), seen), {}

    def personalize(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        return state

    def newcomer(self, server: Server, round: Round) -> Message:
        return Message(server.w)

    def adapt(self, task: Any, message: Message, data: Any) -> Any:
        return solve(task, message.shared, data, self.solver, Gaussian(message.shared.theta, self.lam))

    def global_model(self, server: Server) -> Model:
        return server.w


# -- one fault each --------------------------------------------------------------------------------------


class MutatedState(Good):
    """Its personal model is changed where it lies."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        state.theta.sub_(0.1)
        return Upload(message.shared, message.each), state


class ChangedMessage(Good):
    """Its clients write into what they were sent."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        found = super().local(task, message, state, data)
        message.shared.stats[:] = 0
        return found


class ChangedUploads(Good):
    """Its server weights the uploads where they lie."""

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        uploads.w.theta.mul_(0.5)
        return super().aggregate(server, uploads, round)


class ShortBatch(Good):
    """The targets of one row have no spread to divide by."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)

        def step(carry: Tensor, batch: Any) -> Tensor:
            y = batch.y.to(task.dtype)
            return ((y - y.mean()) / y.std(correction=0)).mean()

        return upload._replace(seen=data.scan(step, upload.seen)), own


class EmptySplit(Good):
    """The mean loss over no validation rows is not a number."""

    def personalize(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        loss = data.mean(lambda batch: task.loss(state, batch), "validation")
        return Model(state.theta * (1 + 0 * loss), state.stats)


class Branch(Good):
    """A Python if on what a client computes."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        if own.theta.sum() > 0:
            return upload, own
        return upload, Model(own.theta * 2, own.stats)


class Item(Good):
    """A Python number of what a client computes."""

    def adapt(self, task: Any, message: Message, data: Any) -> Any:
        model = super().adapt(task, message, data)
        return Model(model.theta / max(1.0, model.theta.norm().item()), model.stats)


class RowsOfAll(Good):
    """It sends a cohort the rows of the population."""

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(server.w, server.seen)


class Weights(Good):
    """Its weights do not sum to one."""

    def client_weights(self, round: Round) -> Tensor:
        return round.sizes


class Outputs(Good):
    """It predicts one row, whatever it is asked for."""

    def predict(self, task: Any, personal: Any, x: Tensor) -> Tensor:
        return task.predict(personal, x)[:1]


class TorchRandom(Good):
    """A client draws from torch's generator."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        noise = torch.rand(len(state.theta), dtype=state.theta.dtype)
        return super().local(task, message, Model(state.theta + noise, state.stats), data)


class NumpyRandom(Good):
    """The server draws from numpy's generator."""

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        found, report = super().aggregate(server, uploads, round)
        return found._replace(seen=found.seen + np.random.rand()), report


class PythonRandom(Good):
    """The server draws from Python's generator."""

    def init_server(self, task: Any, model: Model, round: Round) -> Server:
        return Server(model, model.theta.new_full((round.population,), random.random()))


class Unseeded(Good):
    """A generator of its own, without a seed."""

    def adapt(self, task: Any, message: Message, data: Any) -> Any:
        model = super().adapt(task, message, data)
        return Model(model.theta + float(np.random.default_rng().random()), model.stats)


class Counting(Good):
    """It keeps something outside of the states."""

    calls: ClassVar[list[int]] = []

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        self.calls.append(0)
        upload, own = super().local(task, message, state, data)
        return upload, Model(own.theta + len(self.calls), own.stats)


class FirstWins(Good):
    """The server takes the upload that comes first."""

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        found, report = super().aggregate(server, uploads, round)
        return found._replace(w=Model(uploads.w.theta[0], uploads.w.stats[0])), report


class GrowingState(Good):
    """Its state becomes longer in every round."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        return upload, Model(own.theta, torch.cat([own.stats, own.stats]))

    def personalize(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        return message.shared


class LateState(Good):
    """Its state has nothing at first."""

    def init_client(self, task: Any, model: Model) -> Any:
        return ()

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        return super().local(task, message, message.shared, data)


class FormOfSteps(Good):
    """Its upload has a number for each step."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        return upload._replace(seen=upload.seen.expand(int(data.steps))), own

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        return super().aggregate(server, uploads._replace(seen=uploads.seen.mean(1)), round)


class CohortsMean(Good):
    """A client is sent its share among those who happen to be asked with it."""

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(server.w, server.seen[round.cohort] + round.weights("samples"))


class ListUpload(Good):
    """An upload that is a list."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        return [upload.w.theta], own


class NumberUpload(Good):
    """An upload with a Python number in it."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        return upload._replace(seen=1.0), own


class UploadAlone(Good):
    """Its state is forgotten."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        return super().local(task, message, state, data)[0].w.theta


class NoMessage(Good):
    """It sends a bare model."""

    def broadcast(self, server: Server, round: Round) -> Any:
        return server.w


class NoReport(Good):
    """Its server reports nothing."""

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        return super().aggregate(server, uploads, round)[0]


class Narrow(Good):
    """A number in the type that torch gives it."""

    def init_server(self, task: Any, model: Model, round: Round) -> Server:
        return Server(model, torch.zeros(round.population))


class Wide(Good):
    """A number in double precision."""

    def aggregate(self, server: Server, uploads: Any, round: Round) -> Any:
        found, report = super().aggregate(server, uploads, round)
        return found._replace(w=Model(found.w.theta.double(), found.w.stats)), report


class TwoSteps(Good):
    """Its server has two steps, which do not agree."""

    def absorb(self, server: Server, mean: Any, round: Round) -> Any:
        return Server(Model(-server.w.theta, server.w.stats), server.seen), {}


class WholeNumbers(TwoSteps):
    """Clients contribute something that has no mean."""

    def contribution(self, message: Message, upload: Any) -> Any:
        return upload._replace(seen=upload.seen.long())


class Graph(Good):
    """A state that still has a gradient."""

    def init_client(self, task: Any, model: Model) -> Any:
        return Model(model.theta.clone().requires_grad_(), model.stats)


class KnowsNewcomers(Good):
    """A newcomer is looked up in what the server keeps of its clients."""

    def newcomer(self, server: Server, round: Round) -> Message:
        return self.broadcast(server, round)


class MarksNewcomers(Good):
    """A newcomer is sent something by its number."""

    def newcomer(self, server: Server, round: Round) -> Message:
        return Message(server.w, round.cohort.to(server.seen.dtype))


class TestRows(Good):
    """It chooses between two models by the test rows."""

    __test__ = False

    def adapt(self, task: Any, message: Message, data: Any) -> Any:
        model = super().adapt(task, message, data)
        losses = [data.mean(lambda batch, m=each: task.loss(m, batch), "test")
                  for each in (model, message.shared)]
        return Model(torch.lerp(model.theta, message.shared.theta, losses[0] / sum(losses)), model.stats)


class Padding(Good):
    """It counts rows by the length of a batch, which padding changes."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        rows = data.scan(lambda carry, batch: carry + len(batch.y), 0 * upload.seen)
        return upload, Model(own.theta * rows, own.stats)


class NoVmap(Good):
    """In place on a tensor of its own, which vmap cannot do."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, state, data)
        theta = torch.zeros_like(message.shared.theta)
        theta += own.theta
        return upload, Model(theta, own.stats)


class Raises(Good):
    """It fails."""

    def personalize(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        raise KeyError("theta")


class GlobalTheta(Good):
    """Its model for all is a bare vector."""

    def global_model(self, server: Server) -> Any:
        return server.w.theta


class Nameless(Good):
    name: ClassVar[str] = ""


class Undocumented(Good):
    pass


class Plain(Good):
    """No dataclass, so that its field is none."""

    mu: float = hyper(1.0, "not read")


@dataclass(frozen=True)
class Signature(Good):
    mu: float = hyper(1.0, "its docstring is what dataclass makes of this line")


@dataclass(frozen=True)
class Bare(Good):
    """A field without a meaning."""

    mu: float = 1.0


@dataclass(frozen=True)
class Restless(Good):
    """A field is changed when the object is made."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lam", self.lam + 1)


class Forgetful(Good):
    """It says that a client's state is made anew, and starts from it."""

    def forgets(self) -> bool:
        return True


class Counted(NamedTuple):
    own: Model
    rounds: Tensor  # [] int64


class ForgetfulCount(Good):
    """What it makes depends on a whole number that a client keeps."""

    def forgets(self) -> bool:
        return True

    def init_client(self, task: Any, model: Model) -> Any:
        return Counted(model, torch.tensor(0))

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, own = super().local(task, message, message.shared, data)
        scale = 1 / (1.0 + state.rounds).to(own.theta.dtype)
        return upload, Counted(own._replace(theta=own.theta * scale), state.rounds + 1)

    def personalize(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        return state.own


FAULTS: dict[type[Good], tuple[str, str]] = {
    ForgetfulCount: ("forgets", "local makes something else of another state"),
    Forgetful: ("forgets", "local makes something else of another state"),
    MutatedState: ("pure", "local changes its state in place: make a new tensor"),
    ChangedMessage: ("pure", "local changes its message in place"),
    ChangedUploads: ("pure", "aggregate changes its uploads in place"),
    ShortBatch: ("finite", "upload of local: seen is not finite for a client with 1 training rows"),
    EmptySplit: ("finite", "personalize returns: theta is not finite"),
    Branch: ("branch", r"local cannot be run for several clients together .*write torch\.where"),
    Item: ("branch", r"adapt or predict cannot .*no \.item\(\)"),
    RowsOfAll: ("rows", r"broadcast returns each\.value of shape \(5,\) for a cohort of 3: pick the rows"),
    Weights: ("rows", "client_weights are 3 numbers of the sum 17 for 3 clients"),
    Outputs: ("rows", "a row of outputs for each sample"),
    TorchRandom: ("random", "local draws from the generator of torch.*a client from batch.key"),
    NumpyRandom: ("random", "aggregate draws from the generator of numpy.*round.generator"),
    PythonRandom: ("random", "init_server draws from the generator of Python"),
    Unseeded: ("repeatable", "adapt gives another result when it is called again"),
    Counting: ("repeatable", "local gives another .*what it keeps must be in the states"),
    FirstWins: ("order", "aggregate comes to something else .*not by its place"),
    GrowingState: ("form", r"the new state of local: stats has shape \(24,\).*expected \(12,\)"),
    LateState: ("form", r"the new state of local: .* expected \[\]"),
    FormOfSteps: ("form", "from a client that takes no step"),
    CohortsMean: ("cohort", "broadcast sends a client something else when others are in the cohort"),
    ListUpload: ("trees", "the upload of local: the tree is a list"),
    NumberUpload: ("trees", "the upload of local: seen is a float"),
    UploadAlone: ("trees", "local must return two trees, its upload and its new state"),
    NoMessage: ("trees", "broadcast must return a Message, not a Model"),
    NoReport: ("trees", "aggregate must return the server's state, and a report"),
    Narrow: ("dtype", r"init_server returns: seen is torch\.float32, where the run is in torch\.float64"),
    Wide: ("dtype", r"w\.theta is torch\.float64, where the run is in torch\.float32"),
    TwoSteps: ("sums", "absorb makes something else of the mean .* than aggregate of the uploads"),
    WholeNumbers: ("sums", "contribution returns something else than real numbers"),
    Graph: ("trees", "init_client returns: theta still has a gradient"),
    KnowsNewcomers: ("newcomer", "newcomer (fails with IndexError|sends what depends on who asks)"),
    MarksNewcomers: ("newcomer", "newcomer sends what depends on who asks"),
    TestRows: ("test rows", "adapt makes another model where the test rows are others"),
    Padding: ("vectorised", r"local comes to something else .*not len\(batch\.y\)"),
    NoVmap: ("vectorised", "local cannot be run for several clients together .*change nothing in place"),
    Raises: ("runs", "personalize fails with KeyError: 'theta'"),
    GlobalTheta: ("trees", "global_model must return one Model, or None"),
    Nameless: ("class", "it lacks a name: write name: ClassVar"),
    Undocumented: ("class", "it has no docstring"),
    Signature: ("class", "it has no docstring"),
    Plain: ("class", r"write @dataclass\(frozen=True\) above it"),
    Bare: ("class", "its field mu does not tell what it is"),
    Restless: ("table", "makes another method"),
}


@pytest.mark.thorough
def test_a_method_without_a_fault_passes() -> None:
    assert check_algorithm(Good()) == []
    assert check_algorithm(Good(lam=3.0), on_fail="report") == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_named(fault: type[Good]) -> None:
    check, words = FAULTS[fault]
    with pytest.raises(CheckFailed, match=words) as told:
        check_algorithm(fault())
    assert told.value.check == check
    assert str(told.value).startswith(f"{fault.name} fails the check {check!r} ({CHECKS[check]}): ")
    assert "\n" not in str(told.value)
    assert isinstance(told.value, AssertionError)
    assert isinstance(told.value, DescantError)


def test_every_check_finds_something() -> None:
    assert {check for check, _ in FAULTS.values()} == {*CHECKS}


@pytest.mark.thorough
def test_faults_can_be_reported_together_and_left_out() -> None:
    found = check_algorithm(ChangedUploads(), on_fail="report")
    assert [failure.check for failure in found] == ["pure"]

    class Two(NumpyRandom, ChangedMessage):
        """Two faults, and a class that no other process can find."""

    found = check_algorithm(Two(), on_fail="report")
    assert [failure.check for failure in found] == ["table", "pure", "random"]
    assert "defined at the top of a module" in found[0].why
    assert check_algorithm(Two(), skip=["table", "pure", "random"]) == []


def test_what_is_checked_must_be_a_method() -> None:
    with pytest.raises(UsageError, match=r"such as MyMethod\(\) \(with brackets\)"):
        check_algorithm(Good)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown check 'branches': did you mean 'branch'"):
        check_algorithm(Good(), skip=["branches"])


@pytest.mark.thorough
def test_the_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate()
    check_algorithm(TorchRandom(), on_fail="report")
    check_algorithm(PythonRandom(), on_fail="report")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
