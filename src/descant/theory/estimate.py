"""The constants of the theory, estimated from data: L, mu, rho and the heterogeneity R of a federation.

All are found at pilot solutions, models that some clients fit alone to all their training rows, with a ridge:
f_i(theta) + ridge/2 ||theta||^2. Without a ridge there may be no minimiser (separable classes) and no strong
convexity (more parameters than rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from descant.core.federation import Federation
from descant.core.random import stream
from descant.core.task import Batch, Task, inputs
from descant.core.threads import one_thread
from descant.core.vector import Model
from descant.errors import UsageError
from descant.models.module import ModuleTask
from descant.theory.truth import identified

DENSE = 700  # parameters up to which the Hessian is written out
LANCZOS = 40  # products with the Hessian that find its ends otherwise
AT_ONCE = 2**22  # numbers of per-sample gradients that are held together
# largest of the loss in the outputs; of the mean squared error it is 2 / outputs
CURVATURE = {"binary_cross_entropy": 1 / 4, "cross_entropy": 1 / 2}
FLAT = 1e-9  # eigenvalues that count as zero, relative to the largest
SOLVED = 1e-4  # norm of the gradient at which a pilot solution is taken for one


def minimise(task: Task, batch: Batch, ridge: float, steps: int) -> Model:
    """argmin f(theta) + ridge/2 ||theta||^2, from the common initial model, by so many steps of L-BFGS."""
    model = task.init()
    theta = model.theta.clone().requires_grad_()
    solver = torch.optim.LBFGS([theta], max_iter=steps, max_eval=2 * steps, history_size=20,
                               tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value = task.loss(Model(theta, model.stats), batch) + ridge / 2 * theta.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(closure)
    return Model(theta.detach(), model.stats)


def smoothness(task: Task, model: Model, batch: Batch) -> float:
    """L of one client's loss. For a linear model it is known for all theta: c lambda_max(X'X / n), with X
    with a column of ones for the bias. For others it is the largest eigenvalue of the Hessian at this model:
    a local figure."""
    if isinstance(task, ModuleTask) and task.is_linear and task.loss_name in (*CURVATURE, "mse"):
        x = batch.x.flatten(1)
        if len(task.layout.parameters) == 2:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        c = CURVATURE.get(task.loss_name, 2 / task.layout.parameters[0].shape[0])
        return c * float(torch.linalg.matrix_norm(x, 2)) ** 2 / len(x)
    return _ends(task, model, batch).high


def strong_convexity(task: Task, model: Model, batch: Batch, ridge: float = 0.0) -> float:
    """mu of one client's loss at this model: the smallest eigenvalue of its Hessian, in directions that the
    task can tell, but at least 0, and the ridge; of a model too large for its Hessian, the ridge alone."""
    return ridge + (max(0.0, _ends(task, model, batch).low) if task.dim <= DENSE else 0.0)


def is_convex(task: Task, model: Model, batch: Batch) -> bool:
    """Whether no negative curvature shows at this model."""
    if isinstance(task, ModuleTask) and task.is_linear and task.loss_name in (*CURVATURE, "mse"):
        return True
    low, high = _ends(task, model, batch)
    return low >= -FLAT * high


def rho2(task: Task, model: Model, batch: Batch, ridge: float = 0.0) -> float:
    """The mean squared norm of the gradients of single samples at this model."""
    gradients = _sample_gradients(task, model, batch, ridge)
    return sum(float(part.square().sum()) for part in gradients) / len(batch.y)


def sampling_noise(task: Task, model: Model, batch: Batch, ridge: float = 0.0, steps: int = 100) -> float:
    """The expected squared error of a pilot solution: by the usual expansion tr(H^-1 S H^-1) / n, where H is
    the Hessian and S the covariance of the gradients of single samples. Where H is too large or not positive,
    it is seen directly: models fitted to the two halves of the rows (every second one) have errors of n / n_1
    and n / n_2 times that, independent of each other."""
    n = len(batch.y)
    if n < 2:
        raise UsageError("the noise of a model cannot be estimated from one row")
    if task.dim <= DENSE:
        values, vectors = torch.linalg.eigh(_hessian(task, model, batch))
        values = values + ridge
        if values[0] > -FLAT * values[-1]:  # at a minimum, as far as rounding can tell
            gradients = torch.cat(list(_sample_gradients(task, model, batch, ridge)))
            moves = (gradients - gradients.mean(0)) @ vectors  # in the basis of the Hessian
            kept = values > FLAT * values[-1]
            return float((moves[:, kept] / values[kept]).square().sum()) / (n * (n - 1))
    halves = [Batch(batch.x[k::2], batch.y[k::2]) for k in range(2)]
    one, other = (minimise(task, half, ridge, steps).theta for half in halves)
    return float((one - other).square().sum()) / sum(n / len(half.y) for half in halves)


class Heterogeneity(NamedTuple):
    """R of Assumption 1: how far the clients' models lie from their mean."""

    R: float  # root of the mean square, without the noise of estimation
    R_max: float  # of the farthest client, without the noise
    naive: float  # the same two with the noise
    naive_max: float
    squares: Tensor  # [clients] without the noise; one by one they may fall below 0


def heterogeneity(models: Tensor, noise: Tensor, weights: Tensor | None = None) -> Heterogeneity:
    """R from estimated models [clients, d] whose expected squared errors are `noise` [clients]. ||w_i -
    w_g||^2 with w_g = sum_j p_j w_j is too large by (1 - 2 p_i) noise_i + sum_j p_j^2 noise_j on average,
    which is taken off; a square below 0 counts as 0. `weights` are the p_i; all alike without."""
    p = torch.full((len(models),), 1 / len(models), dtype=models.dtype) if weights is None else weights
    seen = (models - p @ models).square().sum(1)
    squares = seen - (1 - 2 * p) * noise - p.square() @ noise
    return Heterogeneity(
        math.sqrt(max(0.0, float(p @ squares))), math.sqrt(max(0.0, float(squares.max()))),
        math.sqrt(float(p @ seen)), math.sqrt(float(seen.max())), squares)


class Transfer(NamedTuple):
    """What the rows of other clients tell about a client's, beside its own rows: accuracies on validation
    rows, means over the clients."""

    own: float  # of the client's own model
    others: float  # of a model that is fitted to the rows of other clients
    rows: int  # that were predicted

    @property
    def gain(self) -> float:
        """Above 0 where others tell more than a client's own rows; far below where clients differ."""
        return self.others - self.own


class Estimates(NamedTuple):
    """What a survey of some clients found; a row for each of them where nothing else is said."""

    clients: np.ndarray  # their numbers
    sizes: Tensor  # training rows
    population: int  # of the federation
    rows: int  # training rows of the federation
    models: Tensor  # [clients, d] the pilot solutions
    smoothness: Tensor  # with the ridge
    convexity: Tensor  # with the ridge
    rho2: Tensor
    noise: Tensor
    solved: Tensor  # bool: the gradient of the pilot solution is small
    convex: Tensor  # bool: no negative curvature was seen
    ridge: float
    spread: Heterogeneity
    transfer: Transfer | None = None

    @property
    def n(self) -> float:
        """Training rows of a client, on average."""
        return float(self.sizes.mean())

    @property
    def L(self) -> float:
        """For every client: the largest."""
        return float(self.smoothness.max())

    @property
    def mu(self) -> float:
        """For every client: the smallest. No larger than L, whatever rounding says."""
        return min(float(self.convexity.min()), self.L)

    @property
    def rho(self) -> float:
        """Of a typical client: root of the mean square."""
        return math.sqrt(float(self.rho2.mean()))


def pilot_clients(federation: Federation, count: int, seed: int = 0) -> np.ndarray:
    """A random sample of the clients that have at least two training rows; all, if there are no more."""
    able = np.flatnonzero(federation.train.sizes[: federation.population] >= 2)
    if len(able) < 2:
        raise UsageError("how much clients differ can be measured with at least two clients that have two "
                         f"training rows or more; this federation has {len(able)} such clients")
    if len(able) <= count:
        return able
    return np.sort(stream(seed, "pilot").choice(able, count, replace=False))


def survey(task: Task, federation: Federation, clients: np.ndarray, *, ridge: float, steps: int = 300,
           told: Callable[[int], None] = lambda done: None) -> Estimates:
    """Estimate all constants from these clients. `told` is called with how many of them are done."""
    if len(clients) < 2:
        raise UsageError("how much clients differ cannot be measured with one client: ask at least two")
    models, figures = [], []
    with one_thread():
        for done, client in enumerate(clients.tolist(), 1):
            rows = federation.train[client]
            batch = _batch(task, federation, rows)
            model = minimise(task, batch, ridge, steps)
            slope = grad(_loss(task, model, batch))(model.theta)
            models.append(identified(task, model.theta))
            figures.append((
                smoothness(task, model, batch) + ridge, strong_convexity(task, model, batch, ridge),
                rho2(task, model, batch, ridge), sampling_noise(task, model, batch, ridge, steps),
                float((slope + ridge * model.theta).norm()) < SOLVED, is_convex(task, model, batch)))
            told(done)
    L, mu, rho_square, noise, solved, convex = torch.tensor(figures, dtype=task.dtype).T
    thetas, sizes = torch.stack(models), torch.from_numpy(federation.train.sizes[clients]).to(task.dtype)
    rows_of_all = int(federation.train.sizes[: federation.population].sum())
    return Estimates(clients, sizes, federation.population, rows_of_all, thetas, L, mu, rho_square, noise,
                     solved.bool(), convex.bool(), ridge, heterogeneity(thetas, noise),
                     transfer(task, federation, clients, thetas, ridge=ridge, steps=steps))


def transfer(task: Task, federation: Federation, clients: np.ndarray, models: Tensor | None = None, *,
             ridge: float, steps: int = 300) -> Transfer | None:
    """Every client is predicted by its own pilot solution (of `models`, if these are known) and by that of
    the half of the clients that it is not in; None without classes or validation rows. The ridge is that of
    one client; the rows of a half share it."""
    if "accuracy" not in task.metric_names:
        return None
    place, stats, scores, rows = task.metric_names.index("accuracy"), task.init().stats, [], 0
    with one_thread():
        for half in range(2):
            teachers = [federation.train[client] for client in clients[1 - half :: 2].tolist()]
            common = minimise(task, _batch(task, federation, np.concatenate(teachers)),
                              ridge / len(teachers), steps)
            for k in range(half, len(clients), 2):
                if not len(federation.validation[clients[k]]):
                    continue
                own = Model(models[k], stats) if models is not None else minimise(
                    task, _batch(task, federation, federation.train[clients[k]]), ridge, steps)
                batch = _batch(task, federation, federation.validation[clients[k]])
                scores.append([float(task.metrics(task.predict(model, batch.x), batch)[place])
                               for model in (own, common)])
                rows += len(batch.y)
    if not scores:
        return None
    own_mean, others_mean = np.mean(scores, 0).tolist()
    return Transfer(own_mean, others_mean, rows)


def _batch(task: Task, federation: Federation, rows: np.ndarray) -> Batch:
    return Batch(inputs(federation.x[rows], task.dtype), federation.y[rows])


class Ends(NamedTuple):
    """The smallest and the largest eigenvalue."""

    low: float
    high: float


def _loss(task: Task, model: Model, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The loss as it is in prediction (no Dropout, BatchNorm by its statistics), of theta."""
    return lambda theta: task.loss(Model(theta, model.stats), batch)


def _product(task: Task, model: Model, batch: Batch) -> Callable[[Tensor], Tensor]:
    """v -> Hessian v."""
    pull: Callable[[Tensor], tuple[Tensor]] = vjp(grad(_loss(task, model, batch)), model.theta)[1]
    return lambda v: pull(v)[0]  # the Hessian is symmetric


def _hessian(task: Task, model: Model, batch: Batch) -> Tensor:
    product = _product(task, model, batch)
    H: Tensor = vmap(product, chunk_size=64)(torch.eye(task.dim, dtype=task.dtype))
    return (H + H.T) / 2


def _ends(task: Task, model: Model, batch: Batch) -> Ends:
    """The ends of the Hessian's spectrum: exactly, or (the upper end is the sharp one) by Lanczos."""
    if task.dim > DENSE:
        return lanczos(_product(task, model, batch), task.dim, task.dtype)
    H, one = _hessian(task, model, batch), torch.eye(task.dim, dtype=task.dtype)
    untold = one - identified(task, one)  # the projection on directions without any effect
    values = torch.linalg.eigvalsh(H)
    lowest = torch.linalg.eigvalsh(H + values[-1] * untold) if bool(untold.any()) else values
    return Ends(float(lowest[0]), float(values[-1]))


def lanczos(product: Callable[[Tensor], Tensor], dim: int, dtype: torch.dtype, steps: int = LANCZOS) -> Ends:
    """The ends of the spectrum of a symmetric matrix that is known by its products with vectors. Both lie
    inside the true ones, and come to them in `dim` steps at the latest; the larger in modulus much sooner."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)
    basis = [q / q.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, dim)):
        v = product(basis[-1])
        diagonal.append(float(basis[-1] @ v))
        Q = torch.stack(basis)
        for _ in range(2):  # once is not enough in floating point
            v = v - Q.T @ (Q @ v)
        if v.norm() <= 1e-12 * np.abs(diagonal).max():  # the basis is complete
            break
        beside.append(float(v.norm()))
        basis.append(v / v.norm())
    from scipy.linalg import eigh_tridiagonal  # slow to import, and a run needs it only where steps diverge

    values = eigh_tridiagonal(diagonal, beside[: len(diagonal) - 1], eigvals_only=True)
    return Ends(float(values[0]), float(values[-1]))


def _sample_gradients(task: Task, model: Model, batch: Batch, ridge: float) -> Iterable[Tensor]:
    """The gradients of single samples [some rows, d], a bounded number at a time."""
    def one(x: Tensor, y: Tensor) -> Tensor:
        gradient: Tensor = grad(_loss(task, model, Batch(x[None], y[None])))(model.theta)
        return gradient + ridge * model.theta

    at_once = max(1, AT_ONCE // task.dim)
    for start in range(0, len(batch.y), at_once):
        part = slice(start, start + at_once)
        yield vmap(one)(batch.x[part], batch.y[part])
