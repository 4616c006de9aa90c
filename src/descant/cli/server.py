"""`descant server`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from descant.cli.certificates import PORT
from descant.cli.common import Allow, Settings, Terminated, reporting_errors, terminable
from descant.deploy import require_flower
from descant.errors import DescantError, UsageError
from descant.view.terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from descant.deploy.backend import Rules
    from descant.deploy.keys import ServerKeys

EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"
Insecure = Annotated[bool, typer.Option(
    "--insecure", help="Without certificates: nothing is encrypted, and anybody may join. Only within this "
                       "machine, for trials.")]


def server(
    file: Annotated[Path, typer.Argument(
        metavar="EXPERIMENT.toml", show_default=False,
        help="The experiment. If its dataset is a folder, the clients' files must fit its [schema]; the "
             "folder itself is not read.")],
    clients: Annotated[int, typer.Option("--clients", metavar="N", min=1, show_default=False,
                                         help="The number of clients; training begins when all are there.")],
    out: Annotated[Path, typer.Option(
        "--out", metavar="DIR", show_default=False,
        help="The directory of the federation. The same command continues an existing one.")],
    keys: Annotated[Path | None, typer.Option(
        "--keys", metavar="DIR/server", show_default=False,
        help="The server's folder, made by `descant certificates`.")] = None,
    host: Annotated[str | None, typer.Option(
        "--host", metavar="HOST", show_default=False,
        help=f"The address to listen on. Default: {EVERYWHERE}, all addresses of this machine; with "
             f"--insecure: {HERE}.")] = None,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535,
                                      help="The port to listen on; 0 takes a free one.")] = PORT,
    settings: Settings = None,
    deadline: Annotated[float | None, typer.Option(
        "--deadline", metavar="SECONDS", show_default=False,
        help="The time a client has for the work of a round. Default: 600.")] = None,
    at_least: Annotated[int | None, typer.Option(
        "--at-least", metavar="N", min=1, show_default=False,
        help="The fewest replies for a round to count. Default: 2.")] = None,
    max_norm: Annotated[float | None, typer.Option(
        "--max-norm", metavar="X", show_default=False,
        help="Reject updates with a larger norm. Default: no limit.")] = None,
    stay: Annotated[bool, typer.Option(
        "--stay", help="After the training, serve late clients and newcomers until Ctrl-C.")] = False,
    no_alone: Annotated[bool, typer.Option(
        "--no-alone", help="Do not compare with what each client learns alone.")] = False,
    allow: Allow = None,
    insecure: Insecure = False,
) -> None:
    """Run the server of a remote federation: wait for the clients, run the rounds, send the models.

    The state is saved after every round: the same command continues after a stop or a crash.

    \b
    Examples:
      descant server experiment.toml --clients 4 --keys keys/server --out runs/hospitals
      descant server experiment.toml --clients 4 --keys keys/server --out runs/hospitals --at-least 3 --stay
    """
    with reporting_errors("stopped; rerun the same command to continue"):
        require_flower()
        from descant.deploy.protocol import load_experiment
        from descant.deploy.server import run_server
        from descant.deploy.transport import flower_server
        from descant.view.federation import ServerDisplay

        rules = _rules(clients, deadline, at_least, max_norm)
        experiment = load_experiment(file, settings or (), allow or ())
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out} is a file: name a directory")
        found = _server_keys(keys, insecure, host, clients)
        console = make_console()
        listen = host or (HERE if insecure else EVERYWHERE)
        with terminable(), ServerDisplay(console, clients) as display:
            try:
                with flower_server.open_server(listen, port, found, out / "superlink.log") as transport:
                    _say_address(display.say, listen, transport.port, found)
                    run_server(experiment, transport, out, clients, rules, display, alone=not no_alone,
                               stay=stay)
            except KeyboardInterrupt as error:
                display.close()
                if stay:
                    _show_outcome(console, out)
                is_terminated = isinstance(error, Terminated) or isinstance(error.__context__, Terminated)
                raise (Terminated if is_terminated else KeyboardInterrupt)(
                    f"{display.stands}; rerun the same command to continue") from None
        if missing := _show_outcome(console, out):
            raise DescantError(f"no model yet for {', '.join(missing)}: start the server again when "
                               f"{'it is' if len(missing) == 1 else 'they are'} connected, or with --stay")


def _rules(clients: int, deadline: float | None, at_least: int | None, max_norm: float | None) -> Rules:
    from descant.deploy.backend import Rules

    for name, value in (("deadline", deadline), ("max-norm", max_norm)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} must be a number greater than 0, not {value:g}")
    if at_least is not None and at_least > clients:
        raise UsageError(f"--at-least {at_least} is more than --clients {clients}: no round would count")
    given: dict[str, Any] = {"deadline": deadline, "at_least": at_least, "max_norm": max_norm}
    rules = Rules(**{name: value for name, value in given.items() if value is not None})
    if rules.at_least > clients:
        raise UsageError(f"a round needs {rules.at_least} replies (the average of one upload is that "
                         f"client's model), but --clients is {clients}: to allow it, add --at-least "
                         f"{clients}")
    return rules


def _server_keys(place: Path | None, insecure: bool, host: str | None, clients: int) -> ServerKeys | None:
    from descant.deploy.keys import ServerKeys

    if insecure:
        refuse_both(place)
        return None
    if place is None:
        raise UsageError("--keys is missing: name the folder DIR/server that `descant certificates DIR` "
                         "made, or use --insecure for a trial on this machine")
    keys = ServerKeys.load(place)
    if host is not None and host not in (EVERYWHERE, "::"):
        keys.require_host(host)
    if len(keys.clients) < clients:
        raise UsageError(f"--clients {clients}, but {place / 'clients'} has the keys of {len(keys.clients)}: "
                         f"{', '.join(keys.clients)}; add the others with `descant certificates`")
    return keys


def _say_address(say: Callable[[str], None], listen: str, port: int, keys: ServerKeys | None) -> None:
    if keys is None:
        say("WARNING: --insecure: nothing is encrypted, and any program on this machine can join under any "
            f"name. For trials only. Listening on {listen}:{port}")
        return
    say(f"listening on {listen}:{port}, encrypted; the certificate is for {', '.join(keys.hosts)}")
    say(f"clients with a key: {', '.join(keys.clients)}")
    for note in keys.notes:
        say(f"note: {note}")


def _show_outcome(console: Console, out: Path) -> list[str]:
    """Show the results, and return the clients without a model."""
    from descant.deploy.protocol import read_clients
    from descant.view.outcome import show_outcome

    if not (out / "federation.json").exists():
        return []
    names = [client.name for client in read_clients(out / "federation.json")[2]]
    path = out / "clients.json"
    served = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    show_outcome(console, names, served, out)
    return [name for name in names if name not in served]


def refuse_both(keys: Path | None) -> None:
    if keys is not None:
        raise UsageError("--keys and --insecure exclude each other: leave one out")
