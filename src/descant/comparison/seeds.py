"""The seeds that methods have in common."""

from __future__ import annotations

from collections.abc import Mapping


def shared_seeds(seeds: Mapping[str, set[int]]) -> tuple[list[int], list[str]]:
    """The seeds that methods are compared over, the same for all, and the methods that are left out. One with
    few of the seeds would leave few for all: it is left out until it has more."""
    kept, left_out = dict(seeds), list[str]()
    while kept:
        shared = set.intersection(*kept.values())
        if 2 * len(shared) >= max(map(len, kept.values())):
            return sorted(shared), left_out
        left_out.append(min(reversed(list(kept)), key=lambda label: len(kept[label])))
        del kept[left_out[-1]]
    return [], left_out
