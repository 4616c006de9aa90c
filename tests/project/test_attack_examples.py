"""examples/attacks: what the page says of them is so, in small."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PLACE = Path(__file__).parents[2] / "examples" / "attacks"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Import one of the scripts, as it is run."""
    monkeypatch.syspath_prepend(str(PLACE))

    def found(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield found
    for name in ("observed", "inversion", "membership"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["digits", "patients"])
def test_a_single_row_is_read_off_an_upload_and_noise_hides_it(rows: str, example) -> None:
    inversion = example("inversion")
    found = getattr(inversion, rows)()
    alone = inversion.attack(inversion.Case("alone", 1), found, starts=2, steps=60)
    assert alone.identified == 1
    assert alone.error < 1e-6
    few = inversion.attack(inversion.Case("few", 4), found, starts=3, steps=200)
    assert few.identified >= 0.5
    noised = inversion.Case("noised", 4, privacy={"unit": "record", "clip": 1.0, "noise": 2.0})
    assert inversion.attack(noised, found, starts=1, steps=100).identified <= 0.25


@pytest.mark.slow
def test_members_are_told_from_others_and_a_sum_hides_them(example) -> None:
    membership = example("membership")
    found = membership.digits()
    own = membership.attack(membership.Case("own", rounds=3), found)
    summed = membership.attack(membership.Case("summed", rounds=3, summed=True), found)
    assert own["direction"][0] > 0.6
    assert summed["direction"][0] < own["direction"][0]


@pytest.mark.slow
def test_noise_on_the_sum_hides_members_from_others_but_not_from_its_server(example) -> None:
    membership = example("membership")
    found = membership.digits()
    others, server = (membership.attack(membership.Case(label, rounds=3, summed=summed,
                                                        privacy=membership.hidden(1.0)), found)
                      for label, summed in (("others", True), ("server", False)))
    assert server["direction"][0] > 0.6
    assert others["direction"][0] < 0.55


@pytest.mark.slow
@pytest.mark.pictures
def test_the_scripts_write_what_they_say(example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, options, files in (
            ("inversion", ["--cases", "1", "--seeds", "1"], ["inversion.csv", "inversion-digits.png"]),
            ("membership", ["--cases", "2", "--seeds", "1"], ["membership.csv", "membership.png"])):
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *options])
        example(name).main()
        assert all((tmp_path / file).stat().st_size > 100 for file in files)
