"""Methods that descant does not have: by their place, and from installed packages."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import descant
from cli_helpers import Result, call
from descant.algorithms import ALGORITHMS, FedAvg
from descant.comparison import plan as planning
from descant.comparison.make import make
from descant.core import fields
from descant.core.permit import ran
from descant.errors import UsageError
from descant.experiment import methods
from descant.experiment.config import DEMO, Experiment, override, parse_algorithm
from helpers import assert_same

pytestmark = pytest.mark.thorough

OWN = '''
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from descant.algorithms import Ditto, FedAvg
from descant.core.algorithm import Algorithm
from descant.core.fields import hyper

Path("marker").touch()  # to import it is to run it


@dataclass(frozen=True)
class MyMethod(Ditto):
    """Ditto under another name."""

    name: ClassVar[str] = "mine"
    citation: ClassVar[str] = "an example"
    presets: ClassVar = {"strong": {"lam": 30.0}}

    extra: float = hyper(1.0, "nothing", ge=0)

    def cautions(self) -> list[str]:
        return ["it is only an example"]


@dataclass(frozen=True, kw_only=True)
class Needy(MyMethod):
    """A field without a default."""

    name: ClassVar[str] = "needy"
    more: float


class Nameless(Ditto):
    """Ditto itself."""


class Abstract(Algorithm):
    name: ClassVar[str] = "abstract"
    citation: ClassVar[str] = "an example"


class Uncited(MyMethod):
    name: ClassVar[str] = "uncited"
    citation: ClassVar[str] = " "


class Spaced(MyMethod):
    name: ClassVar[str] = "my method"


class Undecorated(MyMethod):
    name: ClassVar[str] = "undecorated"
    mu: float = hyper(1.0, "not read")


class Unread(MyMethod):
    name: ClassVar[str] = "unread"
    mu: "NoSuchType"


made, number = MyMethod(), 3


def function() -> None: ...
'''
PLACE = "own_package_of_a_test.methods:MyMethod"
PACKAGE = PLACE.partition(".")[0]
DATA = {"dataset": "logistic", "clients": 3, "dim": 4}
TRAIN = {"rounds": 2, "cohort": 2, "local": {"steps": 1}, "backend": "vectorised"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a package of the user's in it, who has no settings."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").touch()
    (tmp_path / PACKAGE / "methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr("sys.path", [place for place in sys.path if place])
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.fixture
def file(here: Path) -> Path:
    tables = {"data": DATA, "train": TRAIN, "algorithm": {"name": PLACE, "lam": 3.0}}
    (here / "e.toml").write_text(tomli_w.dumps(tables))
    return here / "e.toml"


def imported(here: Path) -> bool:
    """Whether the user's module was run since it was last asked."""
    found = (here / "marker").exists()
    (here / "marker").unlink(missing_ok=True)
    sys.modules.pop(PLACE.partition(":")[0], None)
    return found


def refused(done: Result, *words: str) -> None:
    assert done.code == 2, done
    assert done.err.count("error: ") == 1
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.out + done.err


# -- by its place ----------------------------------------------------------------------------------------


def test_a_run_is_made_resumed_exported_and_handed_to_a_newcomer(file: Path, here: Path) -> None:
    done = call("run", file, "--out", "run", "--set", "algorithm.extra=2")
    assert done.code == 0, done
    assert f"imports {PACKAGE}.methods (./{PACKAGE}/methods.py) for algorithm.name\n" in done.err
    assert "it is only an example" in done.out + done.err  # its cautions
    config = tomllib.loads((here / "run" / "config.toml").read_text())
    assert {key: config["algorithm"][key] for key in ("name", "lam", "extra")} == {
        "name": PLACE, "lam": 3.0, "extra": 2.0}
    assert json.loads((here / "run" / "summary.json").read_text())["algorithm"] == "mine"
    imported(here)
    for command in (["resume", "run", "--rounds", 3], ["export", "run", "--client", 0, "--to", "models"]):
        refused(call(*command), f"run/config.toml: algorithm.name {PLACE} is code that a file names",
                f"add --allow {PACKAGE} to the command")
        assert not imported(here)
        assert call(*command, "--allow", PACKAGE).code == 0
        assert imported(here)
    assert f"`descant resume run --allow {PACKAGE}`" in call("run", file, "--out", "run").err
    about = json.loads(next((here / "models").rglob("model.json")).read_text())
    assert about["algorithm"]["name"] == PLACE
    again = descant.load("run", allow=[PACKAGE])
    assert again.setup.algorithm.name == "mine"
    assert again.rounds == 3
    with pytest.raises(UsageError, match="imported only if you allow it"):
        descant.load("run")


@pytest.mark.slow
def test_python_names_it_and_the_directory_knows_its_place(here: Path) -> None:
    federation = descant.federation("logistic", clients=3, dim=4)
    with pytest.warns(UserWarning, match="only an example"):
        by_name = descant.run(PLACE, federation=federation, out="a", rounds=1)
    method = type(by_name.setup.algorithm)(lam=0.5)
    with pytest.warns(UserWarning, match="only an example"):
        by_object = descant.run(method, federation=federation, out="b", rounds=1)
    assert by_object.setup.algorithm is method
    for out, lam in (("a", ALGORITHMS["ditto"]().lam), ("b", 0.5)):  # type: ignore[attr-defined]
        table = tomllib.loads((here / out / "config.toml").read_text())["algorithm"]
        assert (table["name"], table["lam"]) == (PLACE, lam)
        with pytest.warns(UserWarning, match="only an example"):
            assert descant.resume(out, rounds=2, allow=[PACKAGE]).rounds == 2


def test_a_run_goes_on_when_its_class_has_moved(here: Path) -> None:
    (here / PACKAGE / "moved.py").write_text(OWN)
    places = (PLACE, PLACE, PLACE.replace("methods", "moved"))
    for rounds, place in enumerate(places, 1):  # with the same call each time
        method = methods.find(place, "algorithm.name")(lam=0.5)  # type: ignore[call-arg]
        with pytest.warns(UserWarning, match="only an example"):
            run = descant.run(method, federation=descant.federation("logistic", clients=3, dim=4), out="run",
                              rounds=rounds, backend="loop", resume=rounds > 1)
        assert run.rounds == rounds


def test_a_class_that_cannot_be_imported_has_only_its_name(tmp_path: Path) -> None:
    class Local(FedAvg):
        name = "local"

    federation = descant.federation("logistic", clients=3, dim=4)
    descant.run(Local(), federation=federation, out=tmp_path / "run", rounds=1)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["algorithm"]["name"] == "local"
    with pytest.raises(UsageError, match="'local' is not one of descant's or of an installed package: resume "
                                         "with the same call"):
        descant.load(tmp_path / "run")


def test_presets_fields_and_other_methods_of_a_file(here: Path) -> None:
    table = {"name": PLACE, "preset": "strong", "extra": 4}
    method = parse_algorithm(table, allow=ran())
    assert (method.lam, method.extra) == (30.0, 4.0)  # type: ignore[attr-defined]
    assert parse_algorithm(fields.dump(method), allow=ran()) == method
    with pytest.raises(UsageError, match=r"unknown algorithm field 'lamb': did you mean 'lam'"):
        parse_algorithm({"name": PLACE, "lamb": 1}, allow=ran())
    with pytest.raises(UsageError, match=r"unknown algorithm\.preset 'paper': known are strong"):
        parse_algorithm({"name": PLACE, "preset": "paper"}, allow=ran())
    tables = override(DEMO, [f"algorithm.name={PLACE}", "algorithm.extra=3"])
    assert tables["algorithm"] == {"name": PLACE, "extra": 3}  # without pFedMe's lam
    assert override(tables, ["algorithm.name=fedavg"])["algorithm"] == {"name": "fedavg"}
    assert override(tables, ["algorithm.extra=5"])["algorithm"] == {"name": PLACE, "extra": 5}


def test_show(here: Path) -> None:
    done = call("show", PLACE)
    assert done.code == 0, done
    for words in ("mine (algorithm)", "Ditto under another name.", f"--set algorithm.name={PLACE}", "nothing",
                  "strong: lam = 30.0", "an example"):
        assert words in done.out
    assert json.loads(call("show", PLACE, "--json").out)[0]["name"] == "mine"
    refused(call("show", "torch.nn:Linear"), "add --allow torch to the command")
    refused(call("show", "torch.nn:Linear", "--allow", "torch"),
            "algorithm.name torch.nn:Linear: it must be a class derived from descant.Algorithm")


def test_what_is_merely_opened_imports_nothing(here: Path) -> None:
    """It can be shown, and is refused where it is to run; a user's own file is refused at once."""
    tables = {"data": DATA, "train": TRAIN, "algorithm": {"name": PLACE, "lam": 3.0}}
    read = Experiment.parse(tables)
    assert read.dump()["algorithm"] == tables["algorithm"]
    with pytest.raises(UsageError, match=f"algorithm.name {PLACE} is code that a file names"):
        descant.experiment.run.start(descant.experiment.run.Setup.of(read))
    with pytest.raises(UsageError, match=r"torch\.nn:Linear is code that a file names"):
        Experiment.parse(tables | {"algorithm": {"name": "torch.nn:Linear"}}, ran())
    with pytest.raises(UsageError, match="a module of Python itself, which is refused"):
        Experiment.parse(tables | {"algorithm": {"name": "os:system"}}, ran())
    assert not (here / "marker").exists()
    assert Experiment.parse(tables, [PACKAGE]).algorithm.name == "mine"


@pytest.mark.parametrize(("name", "words"), [
    ("no_such_package.methods:X", "there is no module 'no_such_package' in this Python or in the current"),
    (f"{PACKAGE}.method:MyMethod", f"there is no module '{PACKAGE}.method'"),
    (f"{PACKAGE}.methods:MyMethot", "did you mean 'MyMethod'"),
    (f"{PACKAGE}.methods:function", "class derived from descant.Algorithm, not an object of type function"),
    (f"{PACKAGE}.methods:number", "class derived from descant.Algorithm, not an object of type int"),
    (f"{PACKAGE}.methods:made", "the class of a method, not an object of it: name MyMethod"),
    (f"{PACKAGE}.methods:Nameless", "its name 'ditto' is that of one of descant's methods"),
    (f"{PACKAGE}.methods:Abstract", "it lacks the functions adapt, broadcast, init_server, local, "),
    (f"{PACKAGE}.methods:Uncited", "it lacks a citation: write citation: ClassVar[str]"),
    (f"{PACKAGE}.methods:Spaced", "its name 'my method' must be one word"),
    (f"{PACKAGE}.methods:Undecorated", "write @dataclass(frozen=True) above it"),
    (f"{PACKAGE}.methods:Unread", "the type of one of its fields cannot be read: name 'NoSuchType'"),
    (f"{PACKAGE}.methods:Needy", "algorithm.more is missing: it has no default"),
    ("mine", "unknown algorithm.name 'mine'"),
    (3, "unknown algorithm.name 3"),
])
def test_what_is_no_method_is_told_in_one_sentence(name: Any, words: str, here: Path) -> None:
    (here / "e.toml").write_text(tomli_w.dumps({"data": DATA, "train": TRAIN, "algorithm": {"name": name}}))
    refused(call("run", "e.toml", "--out", "run"), words)
    assert not (here / "run").exists()
    with pytest.raises(UsageError) as told:
        parse_algorithm({"name": name}, allow=ran())
    assert words in str(told.value)


# -- comparisons -----------------------------------------------------------------------------------------


def test_lists_on_the_command_line_name_places(file: Path, here: Path) -> None:
    tables = tomllib.loads(file.read_text())

    def listed(text: str) -> dict[str, Any]:
        with planning.held(here / "out"):
            plan, labels = make(tables, here / "out", [0], algorithms=text, permit=ran(), baselines=False)
        (here / "out" / "comparison.json").unlink()
        (here / "out" / "federation.json").unlink()
        return {label: plan.methods[label].algorithm for label in labels}

    found = listed(f"{PLACE}:lam=7,extra=2,ditto")
    assert [*found] == ["mine", "ditto"]
    assert (found["mine"].lam, found["mine"].extra) == (7.0, 2.0)
    assert [*listed(f"ditto:lam=2,{PLACE}")] == ["ditto", "mine"]
    assert [*listed(f"{PLACE}:lam=[1,2]")] == ["mine lam=1", "mine lam=2"]
    assert [*listed(f"{PLACE}:label=x:y")] == ["x:y"]
    assert [*listed("ditto")] == ["ditto"]
    for text, words in (("ditto:lam", "must read name:field=value"), ("torch.nn:Linear", "--allow torch"),
                        (f"{PACKAGE}.methods:Nope", "known are Abstract"),
                        (f"{PLACE}=3", "unknown algorithm"), (f"{PLACE}:lamb=3", "unknown --algorithms")):
        with pytest.raises(UsageError, match=words):
            listed(text)


@pytest.mark.slow
def test_a_comparison_in_processes(file: Path, here: Path) -> None:
    """Nothing must be allowed; runs that were stopped go on; the report of the directory imports nothing."""
    command = ("compare", file, "--out", "out", "--seeds", "0", "--jobs", 2)
    done = call(*command, "--algorithms", f"{PLACE}:lam=2,ditto")
    assert done.code == 0, done
    for run in (here / "out" / "runs").glob("*/seed-0"):
        (run / "summary.json").unlink()
    assert call(*command, "--algorithms", f"{PLACE}:lam=2,ditto").code == 0
    assert call("compare", file, "--out", "out", "--seeds", "0", "--algorithms", "scaffold").code == 0
    rows = (here / "out" / "results.csv").read_text()
    assert "mine,mine,1" in rows
    imported(here)
    assert call("report", "out").code == 0
    assert not imported(here)
    refused(call("resume", "out/runs/mine/seed-0"), f"--allow {PACKAGE}")


def test_the_plan_of_a_directory_names_it_and_imports_nothing(file: Path, here: Path) -> None:
    tables = tomllib.loads(file.read_text())
    with planning.held(here / "out"):
        plan, _ = make(tables, here / "out", [0], permit=ran())
    plan = plan.tuned("mine", {"lam": 9.0, "solver.lr": 0.25}, None)
    plan.write()
    table = fields.dump(plan.methods["mine"].algorithm)
    assert (table["name"], table["lam"], table["solver"]["lr"]) == (PLACE, 9.0, 0.25)
    imported(here)
    read = planning.read(here / "out")
    assert fields.dump(read.methods["mine"].algorithm) == table
    assert read.methods["mine"].algorithm.name == "mine"
    assert read.methods["mine"].algorithm.cautions() == []
    assert call("report", "out").code == 0
    assert not imported(here)
    with planning.held(here / "out"):  # the user's file names it: the directory may, too
        again, labels = make(tables, here / "out", [0, 1], permit=ran())
    assert labels[0] == "mine"
    assert type(again.methods["mine"].asked).__name__ == "MyMethod"
    with planning.held(here / "out"), pytest.raises(UsageError, match=f"--allow {PACKAGE}"):
        make({"data": DATA, "train": TRAIN}, here / "out", [0], algorithms="scaffold", permit=ran())


# -- real federations ------------------------------------------------------------------------------------


def test_server_and_clients_both_need_it(file: Path, here: Path) -> None:
    pytest.importorskip("flwr")
    import flower_helpers as flower
    from descant.deploy.protocol import received_experiment, tables_of
    from descant.experiment import run as runs

    (here / "e.toml").write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | {
        "data": DATA,
        "train": TRAIN | {"dtype": "float64", "backend": "loop"}}))
    wanted = Experiment.load(here / "e.toml")
    data = {str(k): f"logistic:{k}" for k in range(3)}
    server = flower.MemoryServer(flower.make_clients(data, here / "clients", allow=[PACKAGE]))
    found = flower.federate(wanted, server, here / "server", alone=False)
    expected = runs.start(runs.Setup.of(wanted), observer=flower.Quiet())
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-10)
    tables = tables_of(wanted)
    assert tables["algorithm"]["name"] == PLACE
    with pytest.raises(UsageError, match=f"the server's experiment: algorithm.name .*--allow {PACKAGE}"):
        received_experiment(tables)
    tables["algorithm"] = {"name": "no_such_package:Method"}
    with pytest.raises(UsageError, match=r"the server's experiment: .*there is no module 'no_such_p.*; "
                                         "the method no_such_package:Method must be installed here"):
        received_experiment(tables, ["no_such_package"])
    tables["algorithm"] = {"name": "theirs"}
    with pytest.raises(UsageError, match=r"unknown algorithm\.name 'theirs'.*must be installed here"):
        received_experiment(tables)


# -- installed packages ----------------------------------------------------------------------------------


Install = Callable[..., Path]


@pytest.fixture
def install(here: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package of one module that offers methods: entry points by name."""
    site = here / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(package: str, points: dict[str, str], code: str = "", where: Path = site) -> Path:
        module = package.replace("-", "_")
        (where / f"{module}.py").write_text(code)
        about = where / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[descant.algorithms]\n" + "".join(
            f"{name} = {place}\n" for name, place in points.items()))
        from descant.core import plugins
        plugins._offers.cache_clear()
        return where / f"{module}.py"

    return put


def code(name: str, of: str = "FedAvg") -> str:
    return (f'from descant.algorithms import {of}\n\n\nclass Theirs({of}):\n    """A method of theirs."""\n'
            f'    name = "{name}"\n    citation = "them"\n')


def test_a_package_offers_methods(install: Install, here: Path) -> None:
    install("their-package-1", {"theirs": "their_package_1:Theirs"}, code("theirs"))
    assert methods.names() == [*ALGORITHMS, "theirs"]
    done = call("list", "algorithms")
    last = done.out.rstrip().splitlines()[-1]
    assert last.split(maxsplit=1) == ["theirs", "A method of theirs. (their-package-1)"]
    assert done.err == ""
    entry = json.loads(call("list", "algorithms", "--json").out)[-1]
    assert (entry["name"], entry["package"]) == ("theirs", "their-package-1")
    assert "A method of theirs." in call("show", "theirs").out
    tables = {"data": DATA, "train": TRAIN, "algorithm": {"name": "theirs", "beta": 2.0}}
    (here / "e.toml").write_text(tomli_w.dumps(tables))
    assert call("run", "e.toml", "--out", "run").code == 0
    assert tomllib.loads((here / "run" / "config.toml").read_text())["algorithm"]["name"] == "theirs"
    assert call("resume", "run", "--rounds", 3).code == 0  # who installs a package allows its methods
    assert descant.load("run").setup.algorithm.beta == 2.0  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"unknown algorithm\.name 'their': did you mean 'theirs'"):
        descant.run("their", federation=descant.federation("logistic", clients=3, dim=4))


@pytest.mark.parametrize(("text", "place", "words"), [pytest.param(*case, marks=(
    pytest.mark.slow if k else ())) for k, case in enumerate([
    ("import no_such_module", "Theirs", "its import fails with ModuleNotFoundError: No module named"),
    ("1 / 0", "Theirs", "its import fails with ZeroDivisionError: division by zero; update the package"),
    (code("theirs"), "Nothing", "its import fails with AttributeError"),
    ("class Theirs: ...", "Theirs", "it must be a class derived from descant.Algorithm, not the class"),
    (code("theirs"), "no place!", "its import fails with"),
    (code("other"), "Theirs", "the class calls itself other: its entry point must have that name"),
    (code("theirs", "Algorithm").replace(".algorithms", ""), "Theirs", "it lacks the functions adapt"),
])])
def test_a_broken_package_is_named_and_breaks_nothing_else(text: str, place: str, words: str, here: Path,
                                                           install: Install, request: Any) -> None:
    package = f"broken-{abs(hash(request.node.name))}"
    install(package, {"theirs": f"{package.replace('-', '_')}:{place}"}, text)
    done = call("list", "algorithms")
    assert done.code == 0
    assert done.err.startswith(f"note: the package {package} offers the algorithm theirs, but ")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert len(done.out.splitlines()) == len(ALGORITHMS)
    refused(call("show", "theirs"), f"the package {package} offers", words)
    assert call("show", "fedavg").code == 0
    with pytest.raises(UsageError, match=package):
        parse_algorithm({"name": "theirs"})
    with pytest.raises(UsageError, match=r"unknown algorithm\.name 'nobody'"):
        parse_algorithm({"name": "nobody"})


def test_a_name_that_is_taken_is_refused(install: Install) -> None:
    install("taker", {"fedavg": "taker:Theirs"}, code("fedavg"))
    install("first", {"theirs": "first:Theirs"}, code("theirs"))
    install("second", {"theirs": "second:Theirs"}, code("theirs"))
    assert methods.names() == [*ALGORITHMS, "theirs"]
    assert methods.find("fedavg", "algorithm.name") is FedAvg
    said = call("list", "algorithms").err.splitlines()
    assert len(said) == 3
    assert "first offers the algorithm theirs, a name that second offers, too: it is left out" in said[0]
    assert said[0].endswith("use it by its place, first:Theirs")
    assert "taker offers the algorithm fedavg, a name that descant itself has" in said[2]
    with pytest.raises(UsageError, match="the package first offers the algorithm theirs, a name that second"):
        parse_algorithm({"name": "theirs"})
    assert methods.find("second:Theirs", "algorithm.name").__module__ == "second"


def test_the_current_directory_is_no_installation(install: Install, here: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's directory that one stands in offers nothing, even where Python looks there."""
    install("stranger", {"theirs": "stranger:Theirs"}, 'open("marker", "w")', here)
    monkeypatch.syspath_prepend(str(here))
    assert methods.names() == [*ALGORITHMS]
    with pytest.raises(UsageError, match=r"unknown algorithm\.name 'theirs'"):
        parse_algorithm({"name": "theirs"})
    assert not (here / "marker").exists()
