"""What [privacy] did in the runs of a comparison, where that limits the answer."""

from __future__ import annotations

from collections.abc import Sequence

from descant.comparison.finished import FinishedRun
from descant.core.privacy.settings import idle_clip


def notes(finished: Sequence[FinishedRun]) -> list[str]:
    """Of methods whose clip did nothing, or everything, over all repetitions."""
    shares: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for run in finished:
        spent = run.summary.get("privacy")
        if spent is not None and spent["clipped"] is not None:
            shares.setdefault(run.label, []).append(spent["clipped"])
            units[run.label] = spent["unit"]
    means = {label: sum(of) / len(of) for label, of in shares.items()}
    return [f"{label}: {words}." for label, share in means.items()
            if (words := idle_clip(share, units[label])) is not None]
