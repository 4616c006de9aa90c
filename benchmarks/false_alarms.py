"""How often one of several equal methods is called better: `python benchmarks/false_alarms.py`.

1,000 simulated comparisons for each line, with a seed effect that all methods share. The best method is set
beside the others with Holm's correction over these pairs alone, and over all, as `descant compare` does it.
"""

from __future__ import annotations

import itertools

import numpy as np

from descant.comparison.statistics import LEVEL, holm, paired_p

COMPARISONS = 1000


def main() -> None:
    rng = np.random.default_rng(0)
    for methods, seeds in itertools.product((2, 5, 8), (3, 5, 10)):
        alarms = np.zeros(2)
        for _ in range(COMPARISONS):
            values = 3 * rng.normal(size=(seeds, 1)) + rng.normal(size=(seeds, methods))
            best = str(values.mean(0).argmax())
            p = {(str(a), str(b)): paired_p(values[:, a], values[:, b])
                 for a, b in itertools.combinations(range(methods), 2)}
            beside = [pair for pair in p if best in pair]
            for k, given in enumerate(({pair: p[pair] for pair in beside}, p)):
                corrected = holm(given)
                alarms[k] += any((corrected[pair] or 0) < LEVEL for pair in beside)
        print(f"| {methods} | {seeds} | {alarms[0] / COMPARISONS:.1%} | {alarms[1] / COMPARISONS:.1%} |")


if __name__ == "__main__":
    main()
