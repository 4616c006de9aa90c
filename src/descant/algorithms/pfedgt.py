"""pFedGT: every client plays its best response to the others, by target interpolation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.fields import Checked, hyper
from descant.core.ranges import Linear, Log
from descant.core.task import Batch, Task
from descant.core.tree import Tree, map_tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.precision import unstable
from descant.priors.solve import SGD, Solver, step_size
from descant.theory.game import own_share, stable_curvature


@dataclass(frozen=True)
class ByValidation(Checked):
    """gamma_i chosen by the client, in every round in which it takes part.

    It solves its problem once for each candidate, from the same start and on the same batches, and plays
    the solution with the least loss on its own validation rows; so a round costs as many times the local
    work as there are candidates, and no more communication than one number. Once the choices rest, the
    game is that of the chosen gammas. Without validation rows the client plays `fallback`.
    """

    name: ClassVar[str] = "by_validation"

    candidates: tuple[float, ...] = hyper((0.6, 0.8, 1.0), "values of gamma to try", ge=0, le=1)
    fallback: float = hyper(0.8, "gamma of a client without validation rows; one of the candidates",
                            ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fallback not in self.candidates:
            raise UsageError(f"by_validation.fallback = {self.fallback:g} must be one of the candidates "
                             f"{list(self.candidates)}")


Gamma: TypeAlias = float | tuple[float, ...] | ByValidation


class Server(NamedTuple):
    """Also the message, with theta only where there is a server model."""

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


class Others(NamedTuple):
    """The prior of target interpolation: what the others' losses and the ridge come to for client i,
    pull/2 ||w||^2 + slope'w. A Gaussian around -slope / pull, which is not formed: pull is small."""

    slope: Tensor  # [d]
    pull: Tensor | float

    def energy(self, theta: Tensor) -> Tensor:
        return self.pull * theta.square().sum() / 2 + self.slope @ theta

    def grad(self, theta: Tensor) -> Tensor:
        return self.pull * theta + self.slope

    def prox(self, theta: Tensor, step: float) -> Tensor:
        return (theta - step * self.slope) / (1 + step * self.pull)


class Played(NamedTuple):
    """What one client comes to in a round."""

    w: Model
    c: Tensor  # [d]
    eps: Tree
    gamma: Tree


@dataclass(frozen=True)
class pFedGT(Algorithm):
    """A game in which client i wants  gamma_i f_i(w) + (1 - gamma_i) mean_j f_j(w)  to be small (Eq. 1), and
    knows the others by their messages c_j = grad f_j(w_j) - mu w_j alone:

        G_i(w; w_-i) = gt_i f_i(w) + rho/2 ||w||^2 + (1 - gamma_i)/m sum_{j != i}
                       [f_j(w_j) + grad f_j(w_j)'(w - w_j) + mu/2 ||w - w_j||^2],   gt_i below.

    Client, from the received theta and c, with gt = ((m - 1) gamma_i + 1) / m, on each batch:
        w_i <- w_i - lr (gt grad f_i(w_i) + (1 - gt) mu w_i + rho w_i + (1 - gamma_i)(c - c_i/m)),
        then c_i <- grad f_i(w_i) - mu w_i, over all its data; it keeps w_i, with which it predicts, and c_i.
    Server:  c <- c + lam mean_{i in S}(c_i+ - c_i),   theta <- theta + eta_s mean_{i in S}(w_i - theta).

    Where this departs from the printed paper:
    - The gradient is that of Eq. 4, on one batch (equal to Eq. 7), and c_i the full gradient that Lemma 1
      assumes; its norm gives the accuracy eps_i of the local solve for free, which is reported. `messages =
      "minibatch"` is Algorithm 2 as printed: c_i is the gradient on the last batch, before its step, and
      while training stands in for the client's own part, beginning at `c_start` (Figure 9: c, or the stored
      c_i; begun at c, the first step leaves even an equilibrium).
    - lam = |S|/m (absent) keeps c the mean of all c_i exactly, under any participation. The printed 0.7 with
      a quarter of the clients moves c by lam m/|S| = 2.8 times what it should: it does not rest at the Nash
      equilibrium.
    - theta moves by w_i - theta. The printed w_i - w_i(old) (Eq. 6) grows without bound when training starts
      at theta and not everybody takes part.
    - All c_i start at zero, whose mean c^0 = 0 is exact and free. `init = "gradient"` starts at c_i =
      grad f_i - mu w of the initial model: the first round is then an opening that asks everyone and trains
      nobody. (The paper's c^0, the sum of the c_i, must be their mean.)

    `start` is Figure 5's choice: the server's theta, the client's own w_i, or the initial model (random,
    drawn once). `server_model = false` sends and keeps no theta: half the traffic; it needs another start.
    gamma is one number, a list with one for each client, or chosen on validation rows (`by_validation`).
    rho > max(L, L_F) is what Theorem 1 asks for; gt > 1/2 is enough where losses curve alike
    (`theory.game`).

    A newcomer starts at theta (without a server model, at the initial model) and plays its best response to
    the present c as a client that has told nothing yet (after an opening it has: its own c_i/m stays in c);
    a client from outside the population as the one that joins: m + 1 clients, whose mean message is
    c m/(m + 1). From a list of gammas it takes the mean.
    """

    name: ClassVar[str] = "pfedgt"
    citation: ClassVar[str] = (
        "Anonymous authors: A Game-Theoretic Approach to Personalized Federated Learning Based on Target "
        "Interpolation. Under double-blind review"
    )
    tracking: ClassVar[bool] = True

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"gamma": 0.8, "mu": 0.05, "lam": 0.7, "messages": "minibatch"}}

    gamma: Gamma = hyper(0.8, "share of the client's own loss in what it wants", ge=0, le=1,
                         search=Linear(0.1, 0.9))
    mu: float = hyper(0.05, "curvature that the others' losses are taken to have", ge=0,
                      search=Log(0.01, 0.5))
    rho: float = hyper(0.0, "strength of the ridge", ge=0)
    lam: float | None = hyper(None, "step size of c; absent: |S|/m, exact tracking (printed: 0.7)", gt=0)
    eta_s: float = hyper(1.0, "step size of theta", gt=0)
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")
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
        told = unstable("solver.lr", step_size(self.solver), pull, "(1 - gamma) mu + rho")
        if least < 0.5:  # gt is greater than gamma, and tends to it with many clients
            bound = stable_curvature(least, self.mu, self.rho)
            told.append(f"gamma = {least:g}: with many clients whose losses curve alike, best responses "
                        f"diverge where the curvature is above (2 (1 - gamma) mu + rho) / (1 - 2 gamma) = "
                        f"{bound:g}; take gamma >= 0.5, or a larger mu or rho")
        return told

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
        played = self._play(task, sent, gamma, start, state.c, data)
        return self._told(played, sent, state), State(played.w, played.c, state.origin)

    def opens(self) -> bool:
        return self.init == "gradient"

    def opening(self, task: Task, message: Message, state: State, data: ClientData) -> tuple[Upload, State]:
        """Tell the c_i of the initial model."""
        c = data.mean(lambda batch: task.grad(state.w, batch).theta) - self.mu * state.w.theta
        nothing = torch.zeros_like(message.shared.m)
        played = Played(state.w, c, nothing if self.messages == "full" else (),
                        nothing if isinstance(self.gamma, ByValidation) else ())
        return self._told(played, message.shared, state), state._replace(c=c)

    def aggregate(self, server: Server, uploads: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        exact = len(round.cohort) / round.population
        is_opening = self.opens() and round.number == 1
        lam = exact if self.lam is None or is_opening else self.lam
        c = server.c + lam * uploads.dc.mean(0)
        if is_opening:
            return server._replace(c=c), {}
        theta = server.theta
        if self.server_model:
            theta = Model(theta.theta + self.eta_s * uploads.dw.mean(0), uploads.stats.mean(0))
        report: dict[str, Any] = {}
        if self.messages == "full":
            report["eps"] = {"mean": uploads.eps.mean(), "most": uploads.eps.max()}
        if isinstance(self.gamma, ByValidation):
            report["gamma"] = {f"{g:g}": int(torch.isclose(uploads.gamma, uploads.gamma.new_tensor(g)).sum())
                               for g in self.gamma.candidates}
        return Server(theta, c, server.m), report

    def personalize(self, task: Task, message: Message, state: State, data: ClientData) -> Model:
        return state.w

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        sent: Server = message.shared
        gamma = sum(self.gamma) / len(self.gamma) if isinstance(self.gamma, tuple) else self.gamma
        return self._play(task, sent, gamma, sent.theta, torch.zeros_like(sent.c), data).w

    def global_model(self, server: Server) -> Model | None:
        return server.theta if self.server_model else None

    # -- what ONE client does ----------------------------------------------------------------------------

    def _play(self, task: Task, sent: Server, gamma: Tensor | float | ByValidation, start: Model, c_i: Tensor,
              data: ClientData) -> Played:
        """Its answer to the others, with the gamma of least validation loss if there is a choice."""
        if not isinstance(gamma, ByValidation):
            return self._respond(task, sent, gamma, start, c_i, data)
        best, least = self._tried(task, sent, gamma.fallback, start, c_i, data)
        for candidate in gamma.candidates:
            if candidate != gamma.fallback:
                played, loss = self._tried(task, sent, candidate, start, c_i, data)
                is_better = loss < least
                best = map_tree(lambda new, old, b=is_better: torch.where(b, new, old), played, best)
                least = torch.where(is_better, loss, least)
        return best

    def _tried(self, task: Task, sent: Server, gamma: float, start: Model, c_i: Tensor, data: ClientData
               ) -> tuple[Played, Tensor]:
        """The answer for one candidate, and its loss on the validation rows: infinite if it has none."""
        played = self._respond(task, sent, gamma, start, c_i, data)
        loss = data.mean(lambda batch: task.loss(played.w, batch), "validation")
        return played._replace(gamma=sent.m.new_tensor(gamma)), loss.nan_to_num(math.inf, math.inf)

    def _respond(self, task: Task, sent: Server, gamma: Tensor | float, start: Model, c_i: Tensor,
                 data: ClientData) -> Played:
        """Its best response for one gamma, as good as the local work makes it."""
        if self.messages == "minibatch":
            return self._literal(task, sent, gamma, start, c_i, data)
        share = own_share(gamma, sent.m)
        others = Others((1 - gamma) * (sent.c - c_i / sent.m), (1 - share) * self.mu + self.rho)

        def step(carry: tuple[Model, Tree], batch: Batch) -> tuple[Model, Tree]:
            w, memory = carry
            gradient = task.grad(w, batch)
            theta, memory = self.solver.step(w.theta, share * gradient.theta, others, memory)
            return Model(theta, gradient.stats), memory

        w, _ = data.scan(step, (start, self.solver.init(start.theta)))
        gradient = data.mean(lambda batch: task.grad(w, batch).theta)
        eps = (share * gradient + others.grad(w.theta)).square().sum()
        return Played(w, gradient - self.mu * w.theta, eps, ())

    def _literal(self, task: Task, sent: Server, gamma: Tensor | float, start: Model, c_i: Tensor,
                 data: ClientData) -> Played:
        """Algorithm 2: the direction of Eq. 7, with the running c_i of the batch before."""

        def step(carry: tuple[Model, Tensor, Tree], batch: Batch) -> tuple[Model, Tensor, Tree]:
            w, running, memory = carry
            gradient = task.grad(w, batch)
            ahead = (1 - gamma) * (sent.c - running + (running - c_i) / sent.m)
            theta, memory = self.solver.step(w.theta, gradient.theta, Others(ahead, self.rho), memory)
            return Model(theta, gradient.stats), gradient.theta - self.mu * w.theta, memory

        running = sent.c if self.c_start == "c" else c_i
        w, running, _ = data.scan(step, (start, running, self.solver.init(start.theta)))
        return Played(w, running, (), ())

    def _told(self, played: Played, sent: Server, state: State) -> Upload:
        dc = played.c - state.c
        if not self.server_model:
            return Upload(dc, (), (), played.eps, played.gamma)
        return Upload(dc, played.w.theta - sent.theta.theta, played.w.stats, played.eps, played.gamma)
