"""`descant server`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from descant.cli.certificates import PORT
from descant.cli.common import reporting, restated, terminable, warn
from descant.cli.options import Allow, Settings, Track, argument, option
from descant.deploy import require_flower
from descant.errors import DescantError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from descant.deploy.backend import Rules
    from descant.deploy.keys import ServerKeys
    from descant.view.federation import ServerDisplay

EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"
Insecure = Annotated[bool, typer.Option(
    "--insecure", help="Without certificates: nothing is encrypted, and anybody may join. Only within this "
                       "machine, for trials.")]


class TransportName(StrEnum):
    """Those of `descant.deploy.transport.choose`, which needs Flower."""

    grpc = "grpc"
    flower = "flower"


Transport = Annotated[TransportName, typer.Option(
    "--transport", help="How messages travel, the same for the server and all clients: grpc holds a stream "
                        "for each client, flower uses Flower's SuperLink and is slower.")]


def server(
    file: Annotated[Path, argument(
        "EXPERIMENT.toml", "The experiment. If its dataset is a folder, the clients' files must fit its "
                           "[schema]; the folder itself is not read.")],
    clients: Annotated[int, option(
        "--clients", "N", "The number of clients; training begins when all are there.", min=1)],
    out: Annotated[Path, option(
        "--out", "DIR", "The directory of the federation. The same command continues an existing one.")],
    keys: Annotated[Path | None, option(
        "--keys", "DIR/server", "The server's folder, made by `descant certificates`.")] = None,
    host: Annotated[str | None, option(
        "--host", "HOST", f"The address to listen on. Default: {EVERYWHERE}, all addresses of this machine; "
                          f"with --insecure: {HERE}.")] = None,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535,
                                      help="The port to listen on; 0 takes a free one.")] = PORT,
    settings: Settings = None,
    deadline: Annotated[float | None, option(
        "--deadline", "SECONDS", "The time a client has for the work of a round. Default: 600.")] = None,
    at_least: Annotated[int | None, option(
        "--at-least", "N", "The fewest uploads that a round aggregates. Default: 2.", min=1)] = None,
    clip: Annotated[float | None, option(
        "--clip", "X", "Shorten updates to X times the median of the round. Default: 3; 0: never.")] = None,
    max_share: Annotated[float | None, option(
        "--max-share", "X", "The largest share of one client in an average, whatever number of rows it "
                            "claims. Default: 0.5; 1: no limit.")] = None,
    max_norm: Annotated[float | None, option(
        "--max-norm", "X", "Reject updates with a larger norm. Default: no limit.")] = None,
    secure_aggregation: Annotated[bool, typer.Option(
        "--secure-aggregation", help="Learn only sums of uploads, of methods that need no more. Every client "
                                     "must have its certificate (NAME.pem).")] = False,
    threshold: Annotated[int | None, option(
        "--threshold", "N", "With --secure-aggregation: the fewest uploads in a sum; more than half of a "
                            "round's clients, and at least 3. Default: two thirds and one.", min=1)] = None,
    stay: Annotated[bool, typer.Option(
        "--stay", help="After the training, serve late clients and newcomers until Ctrl-C.")] = False,
    no_alone: Annotated[bool, typer.Option(
        "--no-alone", help="Do not compare with what each client learns alone.")] = False,
    track: Track = None,
    allow: Allow = None,
    transport: Transport = TransportName.grpc,
    insecure: Insecure = False,
) -> None:
    """Run the server of a remote federation: wait for the clients, run the rounds, send the models.

    The state is saved after every round: the same command continues after a stop or a crash.

    \b
    Examples:
      descant server experiment.toml --clients 4 --keys keys/server --out runs/hospitals
      descant server experiment.toml --clients 4 --keys keys/server --out runs/hospitals --at-least 3 --stay
    """
    with reporting("stopped; rerun the same command to continue") as console:
        require_flower()
        from descant.deploy.protocol import load_experiment
        from descant.deploy.server import run_server
        from descant.deploy.transport.choose import Name, open_server
        from descant.engine.backends.memory import return_freed_memory
        from descant.experiment.trackers import named

        trackers = named(track or (), warn)
        rules = _rules(clients, deadline=deadline, at_least=at_least, clip=clip, max_share=max_share,
                       max_norm=max_norm, secure=secure_aggregation, threshold=threshold)
        experiment = load_experiment(file, settings or (), allow or ())
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out} is a file: name a directory")
        found = _server_keys(keys, insecure, host, clients)
        listen = host or (HERE if insecure else EVERYWHERE)
        return_freed_memory()
        with (_display(console, clients, out if stay else None) as display,
              open_server(Name(transport), listen, port, found, out / "superlink.log") as link):
            _say_address(display.say, listen, link.port, found)
            run_server(experiment, link, out, clients, rules, display, alone=not no_alone, stay=stay,
                       authority=None if found is None else found.ca, trackers=trackers)
        if missing := _show_outcome(console, out):
            raise DescantError(f"no model yet for {', '.join(missing)}: start the server again when "
                               f"{'it is' if len(missing) == 1 else 'they are'} connected, or with --stay")


@contextmanager
def _display(console: Console, clients: int, stays: Path | None) -> Iterator[ServerDisplay]:
    """Show what happens until the user ends it; then, of a server that stays, its results."""
    from descant.view.federation import ServerDisplay

    with terminable(), ServerDisplay(console, clients) as display:
        try:
            yield display
        except KeyboardInterrupt as error:
            display.close()
            if stays is not None:
                _show_outcome(console, stays)
            raise restated(error, f"{display.stands}; rerun the same command to continue") from None


def _rules(clients: int, **given: Any) -> Rules:
    from descant.deploy.backend import Rules

    for name in ("deadline", "max_norm"):
        value = given[name]
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be a number greater than 0, not {value:g}")
    if (share := given["max_share"]) is not None and not 0 < share <= 1:
        raise UsageError(f"--max-share must be a share above 0 and at most 1, not {share:g}")
    if (clip := given["clip"]) is not None and clip != 0 and not 1 <= clip < float("inf"):
        raise UsageError(f"--clip must be at least 1, or 0 to shorten nothing, not {clip:g}")
    if (at_least := given["at_least"]) is not None and at_least > clients:
        raise UsageError(f"--at-least {at_least} is more than --clients {clients}: no round would count")
    if given["threshold"] is not None and not given["secure"]:
        raise UsageError("--threshold is for --secure-aggregation: add that, or leave --threshold out")
    chosen: dict[str, Any] = {name: value if isinstance(value, bool) else value or None
                              for name, value in given.items() if value is not None}
    rules = Rules(**chosen)
    if rules.at_least > clients:
        raise UsageError(f"a round needs {rules.at_least} uploads (the average of one upload is that "
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
    from descant.deploy.server import read_served
    from descant.view.outcome import show_outcome

    if not (out / "federation.json").exists():
        return []
    names = [client.name for client in read_clients(out / "federation.json")[2]]
    served = read_served(out / "clients.json")
    show_outcome(console, names, served, out)
    return [name for name in names if name not in served]


def refuse_both(keys: Path | None) -> None:
    if keys is not None:
        raise UsageError("--keys and --insecure exclude each other: leave one out")
