"""FedMAP: local training as MAP estimation under a prior that the server learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from descant.core.algorithm import Algorithm, ClientData, Message, Round, Weights, average
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.tree import Tree, map_tree, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief
from descant.priors.energy import Energy, Given, InputConvex, OwnPrior, check, server_gradient
from descant.priors.precision import Adaptive, FixedVariance, LearnedVariance, Precision, Sent, unstable
from descant.priors.prior import Gaussian, Prior
from descant.priors.solve import Adam, Proximal, Solver, solve, step_size

Step: TypeAlias = float | Literal["mean"]


class State(NamedTuple):
    theta: Model  # the personal model
    joined: Tensor  # [] whether theta was trained under the prior: 0 or 1


class Upload(NamedTuple):
    theta: Model
    log_omega: Tree  # [] log P(Z_k | theta_k) rho_gamma(theta_k), where the weights depend on it


class Shared(NamedTuple):
    prior: Tree  # what the family sends
    begun: Tree  # [] 0 in a round that only initialises, 1 afterwards; only with init = "client"


@dataclass(frozen=True)
class FedMAP(Algorithm):
    """Clients find the most probable model given their data and a prior rho_gamma; the server fits gamma.

    Client k, by the solver's steps (Algorithm 2, Eq. 7), with R = -log rho_gamma:
        theta_k ~ argmin  (1/N_k) sum_i loss(theta; z_i) + R(theta, gamma);
        log omega_k = -sum_i loss(theta_k; z_i) - R(theta_k, gamma), up to a constant                (Eq. 8).
    Server, with weights w_k = omega_k^(1/T) / sum_j omega_j^(1/T) (Algorithm 3):
        gamma <- gamma - lambda sum_k w_k grad_gamma R(theta_k, gamma)                               (Eq. 3),
    or, for a Gaussian prior, whose gamma is its mean, the minimiser of sum_k w_k R(theta_k, gamma):
        gamma <- sum_k w_k theta_k                                                                   (Eq. 9),
    which is Eq. 3 with lambda = sigma2. With exact local solutions and weights that do not change, Eq. 3 is
    gradient descent on M(gamma) = sum_k w_k min_theta L_k + R (Theorem 1; `descant.theory.envelope`).

    `prior` is a Gaussian with fixed variance sigma2 (Eq. 6), with a variance per coordinate that is learned
    (Lemma 1; epsilon ||mu||^2 draws the mean to zero, on the server alone; the step size of s is the prior's
    own `lr`), or adaptive; or any energy R(theta, gamma): an input-convex network, your own by its place
    "package.module:name", or an object of a class that you derive from `descant.priors.energy.Energy`. A run with
    such an object is resumed and loaded by the same call of `descant.run` with resume=True; `descant resume`
    and `descant.load` need the place.

    What to know of the printed weights, which are the default. log omega_k is about -N_k times the mean loss:
    differences of hundreds between clients, so that one client has all the weight, the one with the least
    total loss, which is more often a small client than a good one. The report says so (`effective` is
    1 / sum w_k^2, the number of clients that count). The authors' code for the paper never used them: it has
    weights = "samples". Their later code has "mean_log", log omega_k / N_k, which is nearly uniform. A
    `temperature` above 1 tempers any of these; all are computed from logarithms, and nothing overflows. With
    weights that depend on theta_k, M changes from round to round and Theorem 1 does not apply.

    Where printed variants differ: `likelihood` = "sum" is Eq. 2, whose prior is N_k times weaker than that of
    Eq. 7. `start` = "own" goes on from the client's own model (Algorithm 2; a client that joins starts at the
    prior's centre, in the first round the common initial model), "global" from the centre (later code). In
    Algorithm 1, gamma^(0) = theta^(0) is a random client's model; before training that is the common initial
    model ("model"). `init` = "client" takes a random client of the first round as it is after training
    without any prior, and nothing else from that round. A newcomer solves the same problem from the centre.
    """

    name: ClassVar[str] = "fedmap"
    citation: ClassVar[str] = (
        "Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts: FedMAP: Unlocking Potential in Personalized "
        "Federated Learning through Bi-Level MAP Optimization. 2024, arXiv:2405.19000"
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"solver": Adam(lr=1e-4)}}

    prior: FixedVariance | LearnedVariance | Adaptive | InputConvex | OwnPrior | Energy = hyper(
        FixedVariance(), "the family of priors")
    solver: Solver = hyper(Adam(lr=0.003), "local optimizer")
    weights: Weights | Literal["omega", "mean_log"] = hyper("omega", "what a client counts on the server")
    temperature: float = hyper(1.0, "weights are taken to the power 1 / temperature", gt=0)
    server_lr: Step = hyper("mean", "step size lambda of Eq. 3, or the weighted mean", gt=0)
    likelihood: Literal["mean", "sum"] = hyper("mean", "of a client's samples, beside the prior: Eq. 7 or 2")
    start: Literal["own", "global"] = hyper("own", "where local training starts")
    init: Literal["model", "client"] = hyper("model", "where the prior begins: initial model, or a client's")

    def __post_init__(self) -> None:
        super().__post_init__()
        prior = self.prior
        if isinstance(prior, Adaptive) and prior.per_client and self.weights in ("omega", "mean_log"):
            raise UsageError("fedmap.weights: omega compares densities of one prior, and prior.per_client "
                             'gives every client its own: use weights = "samples" or "uniform"')
        if not isinstance(prior, Energy):
            return
        if not dataclasses.is_dataclass(prior) or not isinstance(getattr(prior, "name", None), str):
            raise UsageError(f"fedmap.prior: {type(prior).__name__} must be a frozen dataclass with a "
                             "`name`: the record of a run tells what it was by these")
        if self.server_lr == "mean":
            raise UsageError(f"fedmap.server_lr: the prior {prior.name} has no weighted mean: give the step "
                             "size lambda of Eq. 3, such as server_lr = 1.0")
        if isinstance(self.solver, Proximal):
            raise UsageError(f"fedmap.solver: the prior {prior.name} has no proximal map in closed form: use "
                             "sgd or adam")

    def cautions(self) -> list[str]:
        if isinstance(self.prior, Energy):
            return []
        name = "1/sigma2" if isinstance(self.prior, FixedVariance) else "the precision"
        cautions = [] if self.likelihood == "sum" else unstable("solver.lr", step_size(self.solver),
                                                                self.prior, name)
        if not isinstance(self.prior, FixedVariance):
            return cautions
        pull = 1 / self.prior.sigma2
        if self.server_lr != "mean" and self.server_lr * pull > 1:
            cautions.append(f"server_lr = {self.server_lr:g} with sigma2 = {self.prior.sigma2:g}: the mean "
                            "overshoots the clients' models; it needs server_lr <= sigma2")
        return cautions

    @property
    def family(self) -> Gaussians | Energies:
        """The priors that the server chooses from."""
        return Energies(self.prior) if isinstance(self.prior, Energy) else Gaussians(self.prior)

    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        if isinstance(self.prior, Energy):
            check(self.prior, model.theta)
        return self.family.init(model, round)

    def init_client(self, task: Task, model: Model) -> State:
        return State(model, torch.zeros((), dtype=model.theta.dtype))

    def broadcast(self, server: Tree, round: Round) -> Message:
        shared, each = self.family.send(server, round)
        begun = round.sizes.new_tensor(float(round.number > 1)) if self.init == "client" else ()
        return Message(Shared(shared, begun), each)

    def newcomer(self, server: Tree, round: Round) -> Message:
        begun = round.sizes.new_tensor(1.0) if self.init == "client" else ()
        return Message(Shared(self.family.newcomer(server), begun))

    def local(self, task: Task, message: Message, state: State, data: ClientData) -> tuple[Upload, State]:
        start = self._centre(message)
        if self.start == "own":
            goes_on = state.joined > 0
            start = map_tree(lambda own, centre: torch.where(goes_on, own, centre), state.theta, start)
        theta = self._solved(task, message, start, data)
        joined = torch.ones_like(state.joined) if self.init == "model" else message.shared.begun.clone()
        return Upload(theta, self._log_omega(task, message, theta, data)), State(theta, joined)

    def _solved(self, task: Task, message: Message, start: Model, data: ClientData) -> Model:
        scale: Tensor | float = 1.0 if self.likelihood == "mean" else 1 / data.size
        if self.init == "client":
            scale = scale * message.shared.begun
        return solve(task, start, data, self.solver, self._prior(message, scale))

    def _log_omega(self, task: Task, message: Message, theta: Model, data: ClientData) -> Tree:
        if self.weights in ("uniform", "samples"):
            return ()
        mean_loss = data.mean(lambda batch: task.loss(theta, batch))
        return -data.size * mean_loss - self._prior(message, 1.0).energy(theta.theta)

    def _prior(self, message: Message, scale: Tensor | float) -> Prior:
        return self.family.prior(Sent(message.shared.prior, message.each), scale)

    def _centre(self, message: Message) -> Model:
        return self.family.centre(message.shared.prior)

    def aggregate(self, server: Tree, uploads: Upload, round: Round) -> tuple[Tree, dict[str, Any]]:
        if self.init == "client" and round.number == 1:
            j = int(round.generator("initial client").integers(len(round.cohort)))
            return self.family.init(take(uploads.theta, j), round), {"initial client": int(round.cohort[j])}
        w = client_weights(self.weights, uploads.log_omega, round.sizes, self.temperature)
        server, report = self.family.update(server, uploads.theta, w, self.server_lr, round)
        return server, {"weights": {"most": w.max(), "effective": 1 / w.square().sum()}} | report

    def personalize(self, task: Task, message: Message, state: State, data: ClientData) -> Model:
        return state.theta

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self._solved(task, message, self._centre(message), data)

    def global_model(self, server: Tree) -> Model:
        return self.family.centre(server)


def client_weights(kind: str, log_omega: Tree, sizes: Tensor, temperature: float = 1.0) -> Tensor:
    """What each client counts, in float64: softmax of log weights, which neither over- nor underflows."""
    N = sizes.double()
    if kind == "uniform":
        logs = torch.zeros_like(N)
    elif kind == "samples":
        logs = N.log()
    else:
        logs = log_omega.double() if kind == "omega" else log_omega.double() / N
    return torch.softmax(logs / temperature, 0)


class Gaussians(NamedTuple):
    """Gaussian priors, gamma = (mean, what the rule for the precision learns)."""

    rule: Precision

    def init(self, model: Model, round: Round) -> Belief:
        return Belief(model, self.rule.init(model.theta, round))

    def send(self, gamma: Belief, round: Round) -> Sent:
        shared, each = self.rule.send(gamma.pull, round)
        return Sent(Belief(gamma.mean, shared), each)

    def newcomer(self, gamma: Belief) -> Belief:
        return Belief(gamma.mean, self.rule.newcomer(gamma.pull).shared)

    def prior(self, sent: Sent, scale: Tensor | float) -> Gaussian:
        mean, shared = sent.shared
        return Gaussian(mean.theta, scale * self.rule.value(Sent(shared, sent.each)))

    def centre(self, gamma: Belief) -> Model:
        return gamma.mean

    def update(self, gamma: Belief, thetas: Model, weights: Tensor, step: Step, round: Round
               ) -> tuple[Belief, dict[str, Any]]:
        pulls, ridge = self.rule.pooled(gamma.pull, weights, round), self.rule.ridge()
        target = average(thetas, pulls.weights)
        if step == "mean":  # of sum_k w_k precision_k/2 ||theta_k - mu||^2 + ridge ||mu||^2, the minimiser
            mu = target.theta / (1 + 2 * ridge / pulls.precision)
        else:
            old = gamma.mean.theta
            mu = old - step * (pulls.precision * (old - target.theta) + 2 * ridge * old)
        # a gradient step is taken for all of gamma at once, the minimiser for one part after the other
        around = mu if step == "mean" else gamma.mean.theta
        evidence = vmap(self.rule.evidence, in_dims=(0, None))(thetas.theta, around)
        pull, report = self.rule.update(gamma.pull, evidence, weights, round)
        return Belief(Model(mu, target.stats), pull), report


class Learned(NamedTuple):
    gamma: Tree  # of the energy
    stats: Tensor  # [s] of the global model


class Energies(NamedTuple):
    """Priors given by an energy R(theta, gamma), by autograd."""

    energy: Energy

    def init(self, model: Model, round: Round) -> Learned:
        return Learned(self.energy.init(model.theta, round.generator("prior")), model.stats)

    def send(self, learned: Learned, round: Round) -> Sent:
        return Sent(learned)

    def newcomer(self, learned: Learned) -> Learned:
        return learned

    def prior(self, sent: Sent, scale: Tensor | float) -> Given:
        return Given(self.energy, sent.shared.gamma, scale)

    def centre(self, learned: Learned) -> Model:
        return Model(self.energy.centre(learned.gamma), learned.stats)

    def update(self, learned: Learned, thetas: Model, weights: Tensor, step: Step, round: Round
               ) -> tuple[Learned, dict[str, Any]]:
        assert step != "mean"  # refused when the method was made
        gradient = server_gradient(self.energy, learned.gamma, thetas.theta, weights)
        gamma = map_tree(lambda old, g: old - step * g, learned.gamma, gradient)
        return Learned(gamma, average(thetas, weights).stats), {}
