"""The commands of a federation of real nodes: `descant certificates`, `descant server`, `descant client`.

What they need from torch and Flower is imported inside them: help must be instant, and Flower is an extra.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from descant.cli.terminal import Allow, DataDir, Settings, Terminated, failures_told, make_console, terminable
from descant.deploy import require_flower
from descant.errors import DescantError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from descant.deploy.certificates import ClientKeys, ServerKeys
    from descant.deploy.nodes import Rules
    from descant.experiment.config import Experiment

PORT = 8443
EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"
Insecure = Annotated[bool, typer.Option(
    "--insecure", help="Without certificates: nothing is encrypted, and anybody may join. Only within this "
                       "machine, for trying.")]


def register(app: typer.Typer) -> None:
    for command in (certificates, server, client):
        app.command()(command)


# -- certificates ------------------------------------------------------------------------------------


def certificates(
    directory: Annotated[Path, typer.Argument(
        metavar="DIR", show_default=False, help="Where they are kept. What is there already stays.")],
    host: Annotated[str, typer.Option(
        "--host", metavar="HOST", show_default=False,
        help="The name or address at which clients reach the server.")],
    clients: Annotated[list[str] | None, typer.Option(
        "--client", metavar="NAME", show_default=False,
        help="A client; given once for each. Later calls add clients, or renew the server's certificate."
        )] = None,
    days: Annotated[int, typer.Option("--days", metavar="N", min=1,
                                      help="How long the server's certificate holds.")] = 365,
) -> None:
    """Make the keys of a federation: who may be its server, and who may be which client.

    Each organisation gets one folder of DIR. Whatever exists is kept: no key is ever replaced.

    \b
    Examples:
      descant certificates keys --host server.example.org --client north --client south
      descant certificates keys --host server.example.org --client east
    """
    with failures_told("stopped; the same command again makes what is missing"):
        require_flower()
        from descant.deploy.certificates import make_certificates

        made = make_certificates(directory, host, clients or [], days)
        everybody = sorted(path.stem for path in (directory / "server" / "clients").glob("*.pub"))
        console = make_console()

        def say(text: str = "") -> None:
            console.print(text, soft_wrap=True)

        say(f"{made.authority} {directory / 'ca.crt'} and ca.key, the authority of this federation")
        say(f"{made.server} {directory / 'server'}, for a server at {host}, until {made.ends:%Y-%m-%d}")
        for name in clients or []:
            say(f"{'made' if name in made.added else 'kept'} {directory / name}, for the client {name}")
        say()
        say("Who gets what:")
        say(f"  {directory / 'server'} is for the machine that runs the server")
        for name in made.added:
            say(f"  {directory / name} is for {name} and nobody else: it holds a private key")
        say(f"  {directory / 'ca.key'} stays here: who has it can pretend to be the server")
        if made.added and made.server == "kept":
            say("  a server that is running knows new clients after it was started again")
        say()
        if not everybody:
            say("There is no client yet: add some with --client NAME")
            return
        name = (clients or everybody)[0]
        address = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        say("Next, on the server's machine and on each client's:")
        say(f"  descant server EXPERIMENT.toml --clients {len(everybody)} --keys "
            f"{shlex.quote(str(directory / 'server'))} --out runs/federation")
        say(f"  descant client --server {address} --name {shlex.quote(name)} --data FILE --keys "
            f"{shlex.quote(name)}")


# -- the server --------------------------------------------------------------------------------------


def server(
    file: Annotated[Path, typer.Argument(
        metavar="EXPERIMENT.toml", show_default=False,
        help="The experiment. Where its dataset is a folder, its [schema] is what the clients' files must "
             "hold; the folder itself is not read.")],
    clients: Annotated[int, typer.Option("--clients", metavar="N", min=1, show_default=False,
                                         help="How many clients there are: it begins when all have come.")],
    out: Annotated[Path, typer.Option(
        "--out", metavar="DIR", show_default=False,
        help="Where the federation is kept. The same command again continues the one that is there.")],
    keys: Annotated[Path | None, typer.Option(
        "--keys", metavar="DIR/server", show_default=False,
        help="The server's folder of what `descant certificates` made.")] = None,
    host: Annotated[str | None, typer.Option(
        "--host", metavar="HOST", show_default=False,
        help=f"The address to listen on. Without it: {EVERYWHERE}, all that this machine has; with "
             f"--insecure: {HERE}.")] = None,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535,
                                      help="The port to listen on; 0 takes a free one.")] = PORT,
    settings: Settings = None,
    deadline: Annotated[float | None, typer.Option(
        "--deadline", metavar="SECONDS", show_default=False,
        help="How long a client has for the work of a round. Without it: 600.")] = None,
    at_least: Annotated[int | None, typer.Option(
        "--at-least", metavar="N", min=1, show_default=False,
        help="A round counts only if so many clients have answered. Without it: 2.")] = None,
    max_norm: Annotated[float | None, typer.Option(
        "--max-norm", metavar="X", show_default=False,
        help="Refuse updates with a larger norm. Without it: none are refused for that.")] = None,
    stay: Annotated[bool, typer.Option(
        "--stay", help="Afterwards, serve clients that come late or are new, until Ctrl-C.")] = False,
    no_alone: Annotated[bool, typer.Option(
        "--no-alone", help="Do not let the clients also see what they would have learned alone.")] = False,
    allow: Allow = None,
    insecure: Insecure = False,
) -> None:
    """Lead a federation: wait for the clients, play the rounds, hand out the personal models.

    The state is saved after every round: the same command continues after a stop or a crash.

    \b
    Examples:
      descant server experiment.toml --clients 4 --keys keys/server --out runs/hospitals
      descant server experiment.toml --clients 4 --keys keys/server --out runs/hospitals --at-least 3 --stay
    """
    with failures_told("stopped; the same command continues"):
        require_flower()
        from descant.deploy.exchange import Exchange
        from descant.deploy.lead import lead
        from descant.deploy.link import open_link
        from descant.view.federation import ServerDisplay

        rules = _rules(clients, deadline, at_least, max_norm)
        experiment = read_experiment(file, settings or (), allow or ())
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out} is a file: name a directory")
        found = _server_keys(keys, insecure, host, clients)
        console = make_console()
        listen = host or (HERE if insecure else EVERYWHERE)
        with terminable(), ServerDisplay(console, clients, out) as display:
            try:
                with open_link(listen, port, found, out / "superlink.log") as link:
                    _tell_address(display.say, listen, link.port, found)
                    exchange = Exchange(link.grid, link.forget, link.check)
                    lead(experiment, exchange, out, clients, rules, display, alone=not no_alone, stay=stay)
            except KeyboardInterrupt as error:
                display.close()
                if stay:
                    _show_outcome(console, out)
                is_terminated = isinstance(error, Terminated) or isinstance(error.__context__, Terminated)
                raise (Terminated if is_terminated else KeyboardInterrupt)(
                    f"{display.stands}; the same command continues") from None
        if missing := _show_outcome(console, out):
            raise DescantError(f"no model yet for {', '.join(missing)}: start the server again when "
                               f"{'it is' if len(missing) == 1 else 'they are'} there, or with --stay")


def read_experiment(file: Path, settings: Sequence[str], allow: Sequence[str] = ()) -> Experiment:
    """The experiment of a file, for clients that have the data: a folder in it need not be there."""
    from descant.core.permit import ran
    from descant.data import DATASETS
    from descant.data.folder import OnNodes
    from descant.data.spec import anchored
    from descant.experiment.config import Experiment, override, read_toml

    tables = override(read_toml(file), settings)
    data = tables.get("data")
    if isinstance(data, dict):
        name = anchored(data, Path.cwd()).get("dataset")
        if isinstance(name, str) and name not in DATASETS and "/" in name:
            tables["data"] = data | {"dataset": OnNodes.name}
    experiment = Experiment.parse(tables, ran(allow))
    spec = experiment.data
    if isinstance(spec.dataset, OnNodes) and spec.partition.name != "natural":
        raise UsageError(f"data.partition = {spec.partition.name!r} deals rows to clients, and here every "
                         "client has its own: leave it out")
    if spec.partition_file is not None:
        raise UsageError("data.partition_file says which rows a client has, and here every client has its "
                         "own: leave it out")
    if spec.unseen:
        raise UsageError("data.unseen is for simulations; here, whoever comes after the training is a "
                         "newcomer: leave it out, and see --stay")
    return experiment


def _rules(clients: int, deadline: float | None, at_least: int | None, max_norm: float | None) -> Rules:
    from descant.deploy.nodes import Rules

    for name, value in (("deadline", deadline), ("max-norm", max_norm)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} must be a number greater than 0, not {value:g}")
    if at_least is not None and at_least > clients:
        raise UsageError(f"--at-least {at_least} is more than --clients {clients}: no round would count")
    given: dict[str, Any] = {"deadline": deadline, "at_least": at_least, "max_norm": max_norm}
    rules = Rules(**{name: value for name, value in given.items() if value is not None})
    if rules.at_least > clients:
        raise UsageError(f"a round counts only if {rules.at_least} clients have answered (an average of one "
                         f"is its model), and there is {clients}: if you mean it, say --at-least {clients}")
    return rules


def _server_keys(place: Path | None, insecure: bool, host: str | None, clients: int) -> ServerKeys | None:
    from descant.deploy.certificates import ServerKeys

    if insecure:
        _refuse_both(place)
        return None
    if place is None:
        raise UsageError("--keys is missing: name the folder DIR/server that `descant certificates DIR` "
                         "made; or try it within this machine with --insecure")
    keys = ServerKeys.load(place)
    if host is not None and host not in (EVERYWHERE, "::"):
        keys.require_host(host)
    if len(keys.clients) < clients:
        raise UsageError(f"--clients {clients}, but {place / 'clients'} has the keys of {len(keys.clients)}: "
                         f"{', '.join(keys.clients)}; add the others with `descant certificates`")
    return keys


def _tell_address(say: Callable[[str], None], listen: str, port: int, keys: ServerKeys | None) -> None:
    if keys is None:
        say("WARNING: --insecure: nothing is encrypted, and any program on this machine can join under any "
            f"name. For trying only. Listening on {listen}:{port}")
        return
    say(f"listening on {listen}:{port}, encrypted; the certificate is for {', '.join(keys.hosts)}")
    say(f"clients with a key: {', '.join(keys.clients)}")
    for note in keys.notes:
        say(f"note: {note}")


def _show_outcome(console: Console, out: Path) -> list[str]:
    """Print what came of it, and return who has no model yet."""
    from descant.deploy.roster import read_members
    from descant.view.outcome import show_outcome

    if not (out / "federation.json").exists():
        return []
    names = [member.name for member in read_members(out / "federation.json")[2]]
    place = out / "clients.json"
    served = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    show_outcome(console, names, served, out)
    return [name for name in names if name not in served]


# -- a client ----------------------------------------------------------------------------------------


def client(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", show_default=False,
                                        help="Where the server is.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", show_default=False,
                                      help="Who this is, as in the certificates.")],
    data: Annotated[str, typer.Option(
        "--data", metavar="FILE", show_default=False,
        help="The rows of this client: a CSV, Parquet or NPZ file. For trying: DATASET:CLIENT, such as "
             "heart_disease:va.")],
    keys: Annotated[Path | None, typer.Option(
        "--keys", metavar="DIR/NAME", show_default=False,
        help="This client's folder of what `descant certificates` made.")] = None,
    directory: Annotated[Path | None, typer.Option(
        "--dir", metavar="DIR", show_default=False,
        help="Where this client keeps its state and its model. Without it: descant-NAME.")] = None,
    expect: Annotated[Path | None, typer.Option(
        "--expect", metavar="EXPERIMENT.toml", show_default=False,
        help="The experiment that was agreed on: any other that the server may send is refused, but for the "
             "number of rounds.")] = None,
    allow: Allow = None,
    stay: Annotated[bool, typer.Option("--stay", help="Stay when the model is there, until Ctrl-C.")] = False,
    insecure: Insecure = False,
    data_dir: DataDir = None,
) -> None:
    """Take part in a federation with the data of one organisation, which stay here.

    What leaves this machine is shown. Started again, it goes on where it was; it ends when it has its model.

    \b
    Examples:
      descant client --server server.example.org:8443 --name north --data patients.csv --keys north
      descant client --server 127.0.0.1:8443 --name va --data heart_disease:va --insecure
    """
    with failures_told("stopped"):
        require_flower()
        from descant.core.files import locked
        from descant.deploy.fleet import serve
        from descant.deploy.letters import Letter
        from descant.deploy.node import Node
        from descant.deploy.site import require_data
        from descant.deploy.wire import Address
        from descant.view.federation_client import ClientDisplay

        address = Address.parse(server)
        found = _client_keys(keys, insecure, name, address.is_loopback)
        require_data(data)
        expected = None if expect is None else read_experiment(expect, ())
        place = directory or Path(f"descant-{name}")
        place.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        with locked(place), terminable(stop.set), ClientDisplay(make_console(), name, stop, stay) as display:
            if insecure:
                display.say("WARNING: --insecure: nothing that is sent is encrypted. For trying only.")
            for note in () if found is None else found.notes:
                display.say(f"note: {note}")
            display.begin(str(address), data, place)
            node = Node(name, data, place, display, allow=allow or (), expected=expected)
            try:
                serve(str(address), found, lambda content: node.answer(Letter.read(content)).content(), place,
                      display, stop)
            except KeyboardInterrupt as error:
                kind = Terminated if isinstance(error, Terminated) else KeyboardInterrupt
                raise kind(f"stopped; the same command goes on with what is in {place}") from None
        if display.code:
            raise typer.Exit(display.code)  # it has said why


def _client_keys(place: Path | None, insecure: bool, name: str, is_loopback: bool) -> ClientKeys | None:
    from descant.deploy.certificates import ClientKeys, is_name

    if not is_name(name):
        raise UsageError(f"--name {name!r} cannot be the name of a client: use printable characters without "
                         "slashes")
    if insecure:
        _refuse_both(place)
        if not is_loopback:
            raise UsageError("--insecure is only for a server on this machine, such as 127.0.0.1: for any "
                             "other, use --keys")
        return None
    if place is None:
        raise UsageError("--keys is missing: name the folder that was made for this client by `descant "
                         "certificates`; or try it within this machine with --insecure")
    return ClientKeys.load(place, name)


def _refuse_both(keys: Path | None) -> None:
    if keys is not None:
        raise UsageError("--keys and --insecure exclude each other: leave one out")
