"""A client's data where its rows are not at hand, such as of a run whose training folder is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from descant.core.splits import SplitName
from descant.engine.batches import View
from descant.errors import DescantError


class ClosedView(View):
    """Says how many rows there are, and shows none: what is made without them is made as ever, and a method
    that looks at one is stopped."""

    def scan(self, step: Callable[..., Any], carry: Any) -> Any:
        if self._plan.widths:
            raise _absent()
        return super().scan(step, carry)

    def together(self, work: Callable[..., tuple[Tensor, ...]], *own: Tensor | None, which: int = 0
                 ) -> tuple[Tensor, ...] | None:
        if self._plan.widths:
            raise _absent()
        return super().together(work, *own, which=which)

    def _split(self, split: SplitName) -> tuple[Tensor, Tensor]:
        raise _absent()


def _absent() -> DescantError:
    return DescantError("its model is made with its rows, and the files that the run was trained on are not "
                        "there as they were: bring them back")
