"""The picture of a benchmark: speed by model, and how cost grows."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

from descant.bench.contest import FLOOR, LEAN

# Okabe and Ito's colours, told apart by people with any colour vision; and markers, for those with none
STYLES = {
    LEAN: ("#666666", "s"), "loop": ("#E69F00", "v"), "vectorised": ("#0072B2", "o"),
    "processes": ("#009E73", "D"), "auto": ("#D55E00", "*"), FLOOR: ("#000000", "_"),
}


def draw(found: dict[str, Any]) -> bytes:
    """The picture as a PNG file."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()
