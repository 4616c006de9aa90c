"""pFedGT: every client plays its best response to the others, by target interpolation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.fields import hyper
from descant.core.ranges import Linear, Log
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Tracked
from descant.priors.candidates import ByValidation
from descant.priors.precision import unstable
from descant.priors.quadratic import Quadratic
from descant.priors.solve import SGD, Solver, solve, step_size
from descant.theory.game import diverging, own_share

Gamma: TypeAlias = float | tuple[float, ...] | ByValidation


class Server(NamedTuple):  # also the message, with theta only where there is a server model
    theta: Model  # of newcomers only, and for ever the initial one, where there is no server model
    c: Tensor  # [d] the mean of all clients' c_i, with lam = |S|/m
    m: Tensor  # [] number of clients


class State(NamedTuple):
    w: Model  # the personal model
    c: Tensor  # [d] what the client last told: grad f_i(w_i) - mu w_i
    origin: Tree  # the initial Model, where local training starts there


class Upload(NamedTuple):
    dc: Tensor  # [d] c_i(new) - c_i(old)
    dw: Tree  # [d] w_i - theta, and ...
    stats: Tree  # [s] ... the statistics of w_i; nothing without a server model
    eps: Tree  # [] ||grad G_i(w_i)||^2, where the full gradient is known
    gamma: Tree  # [] the one that was chosen, where there was a choice


class Response(NamedTuple):  # what one client comes to in a round
    w: Model
    c: Tensor  # [d]
    eps: Tree
    gamma: Tree = ()


@dataclass(frozen=True)
class pFedGT(Algorithm):
    """A game in which client i wants  gamma_i f_i(w) + (1 - gamma_i) mean_j f_j(w)  to be small (Eq. 1), and
    knows the others by their messages c_j = grad f_j(w_j) - mu w_j alone.

    Client, from the received theta and c, with gt = ((m - 1) gamma_i + 1) / m, on each batch:
        w_i <- w_i - lr (gt grad f_i(w_i) + (1 - gt) mu w_i + rho w_i + (1 - gamma_i)(c - c_i/m)),   (Eq. 4)
        then c_i <- grad f_i(w_i) - mu w_i, over all its data; it keeps w_i, with which it predicts, and c_i.
    Server:  c <- c + lam mean_{i in S}(c_i+ - c_i),   theta <- theta + eta_s mean_{i in S}(w_i - theta).

    Traps: the printed lam = 0.7 with few clients a round does not rest at the Nash equilibrium; absent, it is
    |S|/m, which keeps c exact. gt < 1/2 with a small mu and rho diverges. messages = "minibatch" is Algorithm
    2 as printed. init = "gradient" begins with an opening round that asks everyone. A newcomer plays its best
    response to c as a client that has told nothing yet. More in docs/methods/pfedgt.md.
    """

    name: ClassVar[str] = "pfedgt"
    citation: ClassVar[str] = ("Anonymous authors: A Game-Theoretic Approach to Personalized Federated "
                               "Learning Based on Target Interpolation. Under double-blind review")
    tracking: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"gamma": 0.8, "mu": 0.05, "lam": 0.7, "messages": "minibatch"}}

    gamma: Gamma = hyper(0.8, "share of the own loss in a client's aim", ge=0, le=1,
                         search=Linear(0.1, 0.9))
    mu: float = hyper(0.05, "assumed curvature of the others' losses", ge=0, search=Log(0.01, 0.5))
    rho: float = hyper(0.0, "strength of the ridge", ge=0)
    lam: float | None = hyper(None, "step size of c; absent: |S|/m, exact tracking (printed: 0.7)", gt=0)
    eta_s: float = hyper(1.0, "step size of theta", gt=0)
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer; its weight_decay is a ridge as rho")
    start: Literal["theta", "w", "initial"] = hyper("theta", "where local training starts")
    server_model: bool = hyper(True, "whether the server keeps and sends theta")
    init: Literal["zero", "gradient"] = hyper("zero", "what c_i is before the first round")
    messages: Literal["full", "minibatch"] = hyper("full", "c_i from all data, or literally Algorithm 2's")
    c_start: Literal["c", "c_i"] = hyper("c", "where the c_i of Algorithm 2 begins (minibatch messages)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "theta" and not self.server_model:
            raise UsageError('pfedgt.start = "theta" needs the server model: use "w" or "initial", '
                             "or server_model = true")

    def cautions(self) -> list[str]:
        values = self.gamma.candidates if isinstance(self.gamma, ByValidation) else self.gamma
        least = min(values, default=1.0) if isinstance(values, tuple) else values
        pull = (1 - least) * self.mu + self.rho
        steps = unstable("solver.lr", step_size(self.solver), pull, "(1 - gamma) mu + rho")
        return steps + diverging(least, self.mu, self.rho)

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        if isinstance(self.gamma, tuple) and len(self.gamma) != round.population:
            raise UsageError(f"pfedgt.gamma is a list of {len(self.gamma)} numbers for {round.population} "
                             "clients: it must have one for each client")
        return Server(model, torch.zeros_like(model.theta), torch.tensor(round.population, dtype=task.dtype))

    def init_client(self, task: Task, model: Model) -> State:
        return State(model, torch.zeros_like(model.theta), model if self.start == "initial" else ())

    def broadcast(self, server: Server, round: Round) -> Message:
        shared = server if self.server_model else server._replace(theta=())  # type: ignore[arg-type]
        if not isinstance(self.gamma, tuple):
            return Message(shared)
        return Message(shared, torch.tensor(self.gamma, dtype=server.m.dtype)[round.cohort])

    def newcomer(self, server: Server, round: Round) -> Message:
        if bool((round.cohort >= round.population).all()):  # whoever joins makes the clients one more
            m = server.m + 1
            server = server._replace(c=server.c * (server.m / m), m=m)
        return Message(server)

    def local(self, task: Task, message: Message, state: State, data: ClientData) -> tuple[Upload, State]:
        sent: Server = message.shared
        start = {"theta": sent.theta, "w": state.w, "initial": state.origin}[self.start]
        gamma = message.each if isinstance(self.gamma, tuple) else self.gamma
        found = self._respond(task, sent, gamma, start, state.c, data)
        return self._upload(found, sent, state), State(found.w, found.c, state.origin)

    def opens(self) -> bool:
        return self.init == "gradient"

    def opening(self, task: Task, message: Message, state: State, data: ClientData) -> tuple[Upload, State]:
        """Tell the c_i of the initial model."""
        c = data.mean(lambda batch: task.grad(state.w, batch).theta) - self.mu * state.w.theta
        nothing = torch.zeros_like(message.shared.m)
        found = Response(state.w, c, nothing if self.messages == "full" else (),
                         nothing if isinstance(self.gamma, ByValidation) else ())
        return self._upload(found, message.shared, state), state._replace(c=c)

    def _upload(self, found: Response, sent: Server, state: State) -> Upload:
        dw, stats = (found.w.theta - sent.theta.theta, found.w.stats) if self.server_model else ((), ())
        return Upload(found.c - state.c, dw, stats, found.eps, found.gamma)

    def contribution(self, message: Message, upload: Upload) -> Upload:
        by = self.gamma if isinstance(self.gamma, ByValidation) else None
        return upload if by is None else upload._replace(gamma=by.marks(upload.gamma))

    def absorb(self, server: Server, mean: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        if self.opens() and round.number == 1:
            return server._replace(c=Tracked()(server.c, mean.dc, round)), {}
        c, theta = Tracked(self.lam)(server.c, mean.dc, round), server.theta
        if self.server_model:
            theta = Model(theta.theta + self.eta_s * mean.dw, mean.stats)
        told = self.gamma.told(mean.gamma, round) if isinstance(self.gamma, ByValidation) else {}
        return Server(theta, c, server.m), told | ({"eps": mean.eps} if self.messages == "full" else {})

    def personalize(self, task: Task, message: Message, state: State, data: ClientData) -> Model:
        return state.w

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        sent = message.shared
        gamma = sum(self.gamma) / len(self.gamma) if isinstance(self.gamma, tuple) else self.gamma
        return self._respond(task, sent, gamma, sent.theta, torch.zeros_like(sent.c), data).w

    def global_model(self, server: Server) -> Model | None:
        return server.theta if self.server_model else None

    def _respond(self, task: Task, sent: Server, gamma: Tensor | float | ByValidation, start: Model,
                 c_i: Tensor, data: ClientData) -> Response:
        """ONE client's best response, as good as the local work makes it."""
        if isinstance(gamma, ByValidation):
            return gamma.best(task, data, lambda g: self._respond(task, sent, g, start, c_i, data)._replace(
                gamma=sent.m.new_tensor(g)), lambda found: found.w)
        if self.messages == "minibatch":
            return self._literal(task, sent, gamma, start, c_i, data)
        share = own_share(gamma, sent.m)
        others = Quadratic((1 - gamma) * (sent.c - c_i / sent.m), (1 - share) * self.mu + self.rho)
        w = solve(task, start, data, self.solver, others, scale=share)
        gradient = data.mean(lambda batch: task.grad(w, batch).theta)
        eps = (share * gradient + others.grad(w.theta)).square().sum()
        return Response(w, gradient - self.mu * w.theta, eps)

    def _literal(self, task: Task, sent: Server, gamma: Tensor | float, start: Model, c_i: Tensor,
                 data: ClientData) -> Response:
        """Algorithm 2: the direction of Eq. 7, with the running c_i of the batch before."""

        def step(carry: tuple[Model, Tensor, Tree], batch: Batch) -> tuple[Model, Tensor, Tree]:
            w, running, memory = carry
            gradient = task.grad(w, batch)
            ahead = Quadratic((1 - gamma) * (sent.c - running + (running - c_i) / sent.m), self.rho)
            theta, memory = self.solver.step(w.theta, gradient.theta, ahead, memory)
            return Model(theta, gradient.stats), gradient.theta - self.mu * w.theta, memory

        begun = (start, sent.c if self.c_start == "c" else c_i, self.solver.init(start.theta))
        w, running, _ = data.scan(step, begun)
        return Response(w, running, ())
