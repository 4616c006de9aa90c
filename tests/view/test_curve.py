"""The picture of a run: what it says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from descant.experiment.plots import draw_curve

pytestmark = pytest.mark.pictures


def history(losses: list[float | None], accuracy: float | None = 0.5) -> list[dict[str, Any]]:
    def figures(mean: float | None) -> dict[str, Any]:
        return {"mean": mean, "worst_decile": None if mean is None else mean * 0.9}

    return [{"round": k, "loss": loss, "personal": {"test": {
        "accuracy": figures(accuracy), "loss": figures(loss)}}} for k, loss in enumerate(losses, 1)]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def draw(*given: Any) -> Any:
        figures = []
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: (
            figures.append(figure), file.write(b"a picture")))
        rows, best, *others = given
        draw_curve(rows, best, tmp_path / "curve.png", *others)
        return figures[0]

    return draw


def test_it_says_what_was_trained_on_what_and_which_round_is_best(drawn: Any) -> None:
    figure = drawn(history([0.7, 0.6, 0.65]), 2, "accuracy", "ditto on digits, partition iid")
    assert figure.get_suptitle() == "ditto on digits, partition iid: test accuracy"
    left, right = figure.axes
    assert left.get_ylabel() == "test accuracy"
    assert (left.get_xlabel(), right.get_xlabel()) == ("round", "round")
    legend = [text.get_text() for text in left.get_legend().get_texts()]
    assert "best on validation: round 2, 0.5000" in legend
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "linear")


def test_a_loss_that_explodes_is_on_a_log_scale(drawn: Any) -> None:
    left, right = drawn(history([0.7, 5e3, 5e19]), 1, "loss", "fedavg").axes
    assert (left.get_yscale(), right.get_yscale()) == ("log", "log")
    assert left.get_ylabel() == "test loss (log scale)"
    left, right = drawn(history([0.7, 5e3, 5e19]), 1, "accuracy", "fedavg").axes
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")


def test_what_rounds_do_not_record_has_the_loss_in_its_place(drawn: Any) -> None:
    figure = drawn(history([0.7, 0.6]), None, "auroc", "fedavg")
    assert figure.get_suptitle() == "fedavg: test loss"
    assert len(figure.axes[0].lines) == 2


@pytest.mark.parametrize("rows", [history([None, None], None), []])
def test_a_run_without_a_finite_value_says_so(drawn: Any, rows: list[dict[str, Any]]) -> None:
    figure = drawn(rows, None, "accuracy", "fedavg")
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["no finite value"]] * 2
