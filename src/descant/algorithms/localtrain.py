"""LocalTrain: every client alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.solve import SGD, Solver, solve


@dataclass(frozen=True)
class LocalTrain(Algorithm):
    """Each client minimises its own loss and never talks: the baseline every method must beat.

    Client:  theta_i <- theta_i - lr grad f_i(theta_i)   on each batch of the round.

    The model persists from round to round; nothing is uploaded. A newcomer trains alone for the local
    work of one round, from the common initial model.
    """

    name: ClassVar[str] = "localtrain"
    citation: ClassVar[str] = "no federation: the client's own empirical risk minimisation"

    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message()

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[tuple[()], Model]:
        return (), solve(task, state, data, self.solver)

    def absorb(self, server: Model, mean: tuple[()], round: Round) -> tuple[Model, dict[str, Any]]:
        return server, {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def newcomer(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return solve(task, message.shared, data, self.solver)
