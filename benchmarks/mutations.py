"""The mutations of `benchmarks.mutate`: one wrong line each, and the tests that are responsible for it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str  # in src/descant
    old: str  # what is there, once
    new: str  # what is put in its place
    tests: tuple[str, ...]  # what pytest is given
    why: str  # what is wrong about it


_METHODS = ("tests/algorithms/test_methods.py", "tests/algorithms/test_baselines.py")
_CONFORMANCE = ("tests/algorithms/test_conformance.py",)
_COMPOSITION = ("tests/algorithms/test_composition.py",)
_VOCABULARY = ("tests/core/test_vocabulary.py",)
_RUNS = ("tests/experiment/test_runs.py", "tests/engine/test_faults.py")


def _method(name: str) -> tuple[str, ...]:
    return (f"tests/algorithms/test_{name}.py",)


MUTATIONS: tuple[Mutation, ...] = (
    # -- beliefs and their parts -----------------------------------------------------------------------
    Mutation("priors/belief.py", "return interpolate(old, average(uploads, weights), self.beta)",
             "return interpolate(old, average(uploads, weights), 1.0)", _METHODS, "beta is ignored"),
    Mutation("priors/belief.py", "return Model(old.theta - self.gamma * gradient, target.stats)",
             "return Model(old.theta + self.gamma * gradient, target.stats)", _method("one_stage_fedprox"),
             "the server climbs"),
    Mutation("priors/belief.py", "gradient = pulls.precision * (old.theta - target.theta) + 2 * self.ridge * old.theta",
             "gradient = pulls.precision * (old.theta - target.theta)", _method("fedmap"),
             "the ridge of Lemma 1 is left out"),
    Mutation("priors/belief.py", " / (1 if self.kind == \"omega\" else round.sizes.double())", "",
             _method("fedmap"), "mean_log is omega"),
    Mutation("priors/belief.py", "w = torch.softmax(logs / self.temperature, 0)", "w = torch.softmax(logs, 0)",
             _method("fedmap"), "the temperature is ignored"),
    Mutation("priors/belief.py", "around = state.mean if self.evidence == \"old\" else mean", "around = state.mean",
             _method("fedmap"), "the variance is learned around the old mean"),
    Mutation("priors/belief.py", "        if not learn:\n            return state._replace(mean=mean), report\n", "",
             (*_method("cgpfl"), *_COMPOSITION), "evidence from before the clusters is used"),
    Mutation("priors/belief.py", "share = len(round.cohort) / round.population if self.lam is None else self.lam",
             "share = 1.0 if self.lam is None else self.lam", ("tests/algorithms/test_methods.py",
                                                               *_method("pfedgt")),
             "c is no longer the mean of all c_i"),
    # -- groups ----------------------------------------------------------------------------------------
    Mutation("priors/grouping.py", "which = torch.where(joining, state.K, which)", "which = which", _method("cgpfl"),
             "who joins late starts from cluster 0"),
    Mutation("priors/grouping.py", "labels = nearest(theta, state.centres).labels  # of those who join",
             "labels = torch.zeros(len(theta), dtype=torch.int64)", _method("cgpfl"),
             "who joins late is put into cluster 0"),
    Mutation("priors/grouping.py", "generator = round.generator(\"kmeans\") if len(theta) == round.population else None",
             "generator = None", _method("cgpfl"), "k-means++ starts do not compete when everyone takes part"),
    Mutation("priors/grouping.py", "placed[round.cohort] = True", "pass", _method("cgpfl"),
             "nobody is ever placed"),
    Mutation("priors/clustering.py", "best = lloyd(points, models)", "best = nearest(points, models)",
             _method("cgpfl"), "clusters are not improved after the first assignment"),
    Mutation("priors/clustering.py", "[float(share @ partition.squares) for partition in found])",
             "[float(partition.squares.mean()) for partition in found])", _method("cgpfl"),
             "clients count alike in the bound"),
    # -- precision -------------------------------------------------------------------------------------
    Mutation("priors/precision.py", "return 1 / (s + self.c)", "return 1 / s.clamp(min=1e-3)",
             ("tests/priors/test_precision.py",), "alpha(s) without c"),
    Mutation("priors/precision.py", "s = s - (s * (s + c).square() - b) / ((s + c) * (3 * s + c))",
             "s = s - 0.5 * (s * (s + c).square() - b) / ((s + c) * (3 * s + c)) * 0.1",
             ("tests/priors/test_precision.py",), "Newton's method does not arrive"),
    Mutation("priors/precision.py", "return Pooled(pulls / pulls.sum(), pulls.sum())",
             "return Pooled(weights, pulls.sum())", _method("one_stage_fedprox"),
             "lam_i do not weigh the mean"),
    # -- priors and solvers ----------------------------------------------------------------------------
    Mutation("priors/quadratic.py", "return (theta - step * self.slope) / (1 + step * self.pull)",
             "return (theta - step * self.slope) / (1 - step * self.pull)",
             ("tests/core/test_vocabulary.py", "tests/priors", *_method("pfedgt")),
             "the proximal map of the linear-quadratic prior"),
    Mutation("priors/quadratic.py", "return (theta + pull * self.mean) / (1 + pull)", "return (theta + pull * self.mean)",
             (*_VOCABULARY, *_METHODS), "the proximal map of the Gaussian"),
    Mutation("priors/quadratic.py", "return torch.lerp(theta, prior.mean, step * prior.precision)",
             "return torch.lerp(theta, prior.mean, prior.precision)", (*_VOCABULARY, *_METHODS),
             "the prior's step is not scaled"),
    Mutation("priors/solve.py", "direction = state = self.momentum * state + direction + prior.grad(theta)",
             "direction = state = self.momentum * state + direction", _VOCABULARY,
             "SGD with momentum forgets the prior"),
    Mutation("priors/solve.py", "g = gradient + prior.grad(theta) + self.weight_decay * theta",
             "g = gradient + prior.grad(theta)", (*_VOCABULARY, *_CONFORMANCE), "Adam forgets the weight decay"),
    Mutation("priors/solve.py", "descend(task, model, batch.redrawn(k), solver, prior, state)",
             "descend(task, model, batch, solver, prior, state)", (*_VOCABULARY, *_method("pfedbred"), *_METHODS),
             "all inner steps draw the same random numbers"),
    # -- methods ---------------------------------------------------------------------------------------
    Mutation("algorithms/scaffold.py", "c_i, correction = state, c - state", "c_i, correction = state, state - c",
             _METHODS, "the control variate has the wrong sign"),
    Mutation("algorithms/pfedme.py", "if start == \"w\":", "if start == \"theta\":", _METHODS,
             "where the inner steps begin"),
    Mutation("algorithms/ditto.py", "return self.belief.tell(message, w_i, v_i), v_i",
             "return self.belief.tell(message, v_i, v_i), v_i", _METHODS, "the personal model is uploaded"),
    Mutation("algorithms/fedmap.py", "return -data.size * mean_loss - self.belief.prior(sent).energy(theta.theta)",
             "return -mean_loss - self.belief.prior(sent).energy(theta.theta)", _method("fedmap"),
             "omega has the mean in place of the sum of the losses"),
    Mutation("algorithms/fedmap.py", "start = where(state.joined > 0, state.theta, start)", "start = state.theta",
             _method("fedmap"), "who joins does not start at the prior's centre"),
    Mutation("algorithms/pfedbred.py", "step = means.pulled_back(f, mean, step)", "pass", _method("pfedbred"),
             "the exact order leaves out Dmu"),
    Mutation("algorithms/pfedbred.py", "own = Own(done.theta, done.w.theta if means.remembers else ())",
             "own = Own(done.theta, done.theta.theta if means.remembers else ())", _method("pfedbred"),
             "the wrong model is remembered"),
    Mutation("algorithms/pfedgt.py", "others = Quadratic((1 - gamma) * (sent.c - c_i / sent.m), (1 - share) * self.mu + self.rho)",
             "others = Quadratic((1 - gamma) * sent.c, (1 - share) * self.mu + self.rho)", _method("pfedgt"),
             "the client's own message is not taken out"),
    Mutation("algorithms/pfedgt.py", "return Response(w, gradient - self.mu * w.theta, eps)",
             "return Response(w, gradient, eps)", _method("pfedgt"), "the message without the curvature"),
    Mutation("algorithms/one_stage_fedprox.py", "Descend(", "Descend(2 * ", _method("one_stage_fedprox"),
             "the server's step is twice as long"),
    Mutation("algorithms/cgpfl.py", "eta = self.beta if self.outer == \"pfedme\" else self.beta * message.shared / prior.precision",
             "eta = self.beta", _method("cgpfl"), "the printed step is not taken"),
    # -- the engine ------------------------------------------------------------------------------------
    Mutation("engine/rounds.py", "counted = np.isin(accepted, cohort)", "counted = np.ones(len(accepted), bool)",
             _CONFORMANCE, "clients outside the cohort are aggregated"),
    Mutation("engine/rounds.py", "wrong = _not_finite(result) if len(done) else {}", "wrong: dict[int, str] = {}",
             ("tests/engine/test_faults.py",), "NaN uploads are aggregated"),
    Mutation("engine/rounds.py", "        training.number -= 1\n", "", ("tests/engine/test_faults.py", *_RUNS),
             "a failed round counts"),
    Mutation("engine/rounds.py", "generator = stream(self.train.seed, \"cohort\", self.number)",
             "generator = stream(self.train.seed, \"cohort\", 0)", (*_VOCABULARY, *_RUNS, *_CONFORMANCE),
             "every round has the same cohort"),
    Mutation("engine/batches.py", "key = random.fold(self._tensors.key, b) if plan.draws else None",
             "key = self._tensors.key if plan.draws else None", (*_VOCABULARY, "tests/core/test_modules.py"),
             "every batch draws the same random numbers"),
    Mutation("engine/batches.py", "weight = None if plan.whole[b] else torch.arange(stop - start) < self._tensors.lengths[b]",
             "weight = None", (*_VOCABULARY, *_CONFORMANCE), "padding rows count"),
    Mutation("engine/batches.py", "parts = [own if in_order else generator.permutation(own) for _ in range(epochs)]",
             "parts = [own for _ in range(epochs)]", _VOCABULARY, "rows are not shuffled"),
    Mutation("engine/batches.py", "return map_tree(lambda a, b: torch.where(condition, a, b), new, old)", "return new",
             (*_VOCABULARY, *_CONFORMANCE), "clients go on after their last step"),
    Mutation("engine/evaluation.py", "pooled = work.task.figures(tallies.sum(0))",
             "pooled = work.task.figures(tallies[0])", ("tests/engine/test_personal.py",),
             "the pooled figures are of one client"),
    Mutation("engine/personal.py", "return \"adapt\" if is_newcomer else \"personalize\"", "return \"personalize\"",
             ("tests/engine/test_personal.py", *_RUNS), "newcomers are taken for participants"),
    Mutation("engine/store.py", "return np.asarray(self._last(clients) > 0)",
             "return np.asarray(self._last(clients) >= 0)", (*_VOCABULARY, *_RUNS, *_CONFORMANCE),
             "who never took part did"),
    Mutation("core/scoring.py", "return [tally[0] / rows, recall.sum() / (there > 0).sum()]",
             "return [tally[0] / rows, recall.sum() / len(there)]", ("tests/core/test_scores.py",),
             "balanced accuracy counts absent classes"),
    Mutation("core/algorithm.py", "old.theta + beta * (new.theta - old.theta)",
             "new.theta + beta * (new.theta - old.theta)", (*_VOCABULARY, *_METHODS), "interpolation from the new model"),
    # -- files -----------------------------------------------------------------------------------------
    Mutation("experiment/checkpoint.py", "if crc != f\"{_crc(tensors, text):08x}\":", "if False:",
             ("tests/cli/test_cli.py",),
             "damage to a checkpoint is not noticed"),
    Mutation("experiment/checkpoint.py",
             "        write_atomic(self._directory / \"state.safetensors\", self._encode(self._state(), False))\n"
             "        (self._directory / \"journal.safetensors\").unlink(missing_ok=True)\n",
             "        (self._directory / \"journal.safetensors\").unlink(missing_ok=True)\n"
             "        write_atomic(self._directory / \"state.safetensors\", self._encode(self._state(), False))\n",
             ("tests/experiment/test_crash.py",), "the journal goes before the state is safe"),
    # -- kernels and statistics ------------------------------------------------------------------------
    Mutation("comparison/statistics.py", "return np.asarray(stats.t.isf(alone / 2, freedom))",
             "return np.asarray(stats.t.isf(alone, freedom))", ("tests/comparison/test_comparison_statistics.py",),
             "one-sided intervals"),
    Mutation("comparison/statistics.py", "return self._replace(low=max(least, self.low), high=min(most, self.high))",
             "return self", ("tests/comparison",), "an interval of a share leaves [0, 1]"),
    Mutation("core/kernels/layers.py", "share = torch.where(alone, 0.0, torch.as_tensor(momentum, dtype=x.dtype))",
             "share = torch.where(alone, 0.0, torch.as_tensor(1 - momentum, dtype=x.dtype))",
             ("tests/core/test_chain.py", "tests/core/test_modules.py", *_VOCABULARY),
             "running statistics move by 1 - momentum"),
)
