"""What `descant advise` says of federations that were studied: only what they show, and only near them."""

from __future__ import annotations

import math

import pytest

from descant.experiment.evidence import APART, LEAST, ROWS_APART, Cell, answer, study


def seen(together: float, verdict: str = "gains", *, n: float = 100.0, transfer: float = 0.0,
         family: str = "one", best: str = "Ditto", over: float = 0.0, behind: bool = False) -> Cell:
    return Cell(family, "level", n, transfer, 20, together, verdict, best, over,
                "behind" if behind else "as good")


EDGES = [seen(9.0, n=10, transfer=0.9), seen(9.0, n=1000, transfer=0.9)]  # of what was studied


def said(cells: list[Cell], n: float = 100.0, transfer: float = 0.0) -> tuple[str, str]:
    found = answer(n, transfer, 40, cells + EDGES)
    return found.together, " ".join(found.words)


def test_a_gain_that_most_show_is_told_with_its_range() -> None:
    cells = [seen(3.0), seen(5.04, family="two"), seen(4.0, family="two"), seen(1.0, "open")]
    verdict, text = said(cells)
    assert verdict == "gains"
    assert "With about 100 rows a client and a transfer of about +0 points," in text
    assert "gained 3.0 to 5.0 points over training alone in 3 of 4 studied federations" in text
    assert "none of them was any method significantly better than FedAvg with fine-tuning" in text
    assert "one (2), two (2), with 20 clients" in text
    assert "this one has 40 clients" in text


def test_a_loss_and_no_difference_are_told() -> None:
    verdict, text = said([seen(-3.0, "loses"), seen(-2.0, "loses", family="two"), seen(0.1, "open")])
    assert verdict == "loses"
    assert "worse than training alone in 2 of 3 studied federations, by 2.0 to 3.0 points" in text
    verdict, text = said([seen(-0.5, "open"), seen(0.5, "open", family="two"), seen(3.0)])
    assert verdict == "open"
    assert "no significant difference to training alone in 2 of 3 studied federations" in text


@pytest.mark.parametrize("cells", [
    [seen(3.0), seen(4.0, family="two"), seen(4.0), seen(-2.0, "loses")],  # one speaks against it
    [seen(3.0), seen(4.0, family="two"), seen(0.0, "open"), seen(0.0, "open")],  # as many as not
])
def test_where_cells_disagree_it_is_not_known(cells: list[Cell]) -> None:
    verdict, text = said(cells)
    assert verdict == "unknown"
    assert "it is not known whether learning together pays: in 4 studied federations" in text


def test_who_is_ahead_of_fine_tuning_is_named() -> None:
    cells = [seen(3.0), seen(4.0, family="two", best="FedMAP", over=1.5, behind=True),
             seen(4.0, best="FedMAP", over=2.5, behind=True)]
    assert ("better than FedAvg with fine-tuning in 1 of them; in 2 the best one was, by 1.5 to 2.5 points "
            "(FedMAP 2 times)") in said(cells)[1]


def test_only_federations_nearby_count() -> None:
    """Within a factor of two of the rows, and 8 points of transfer; three at least, of two families."""
    near = [seen(3.0, n=100 * ROWS_APART), seen(3.0, n=100 / ROWS_APART, family="two"),
            seen(3.0, transfer=APART - 1e-9)]
    far = [seen(-9.0, "loses", n=201.0), seen(-9.0, "loses", transfer=-APART - 1e-6)]
    assert said(near + far)[0] == "gains"
    verdict, text = said(near[:LEAST - 1] + far)
    assert verdict == "unknown"
    assert "2 studied federations have about 100 rows a client" in text
    assert said([cell._replace(family="one") for cell in near])[0] == "unknown"
    assert "0 studied federations have" in said(far)[1]


def test_beyond_what_was_studied_nothing_is_said() -> None:
    cells = [seen(3.0, n=n, transfer=each, family=family) for n in (10, 1000) for each in (0.0, 0.05)
             for family in ("one", "two")]
    for n, known in ((10, True), (9.9, False), (1000, True), (1001, False)):
        verdict, text = said(cells, n)
        assert (verdict == "gains") == known
        assert ("10 to 1,000 training rows a client" in text) != known
    found = answer(100, None, 20, cells)
    assert found.together == "unknown"
    assert "needs classes and validation rows" in found.words[0]


def test_the_study_is_in_the_package_and_answers() -> None:
    cells = study()
    assert cells
    assert all(abs(cell.transfer) <= 1 and cell.n > 0 and math.isfinite(cell.together) for cell in cells)
    assert {cell.together_verdict for cell in cells} <= {"gains", "loses", "open"}
    for cell in cells:
        found = answer(cell.n, cell.transfer, 20)
        assert bool(found.near) == (cell in found.near)
        assert found.words[0].startswith("With about" if found.near else "Not known")
