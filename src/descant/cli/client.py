"""`descant client`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from descant.cli.common import reporting, restated, terminable
from descant.cli.options import Allow, DataDir, option
from descant.cli.server import Insecure, Transport, TransportName, refuse_both
from descant.core.files import locked
from descant.deploy import require_flower
from descant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from descant.deploy.keys import ClientKeys
    from descant.view.federation_client import ClientDisplay


def client(
    server: Annotated[str, option("--server", "HOST:PORT", "The address of the server.")],
    name: Annotated[str, option("--name", "NAME", "The name of this client, as in the certificates.")],
    data: Annotated[str, option(
        "--data", "FILE", "The rows of this client: a CSV, Parquet or NPZ file. For trials: DATASET:CLIENT, "
                          "such as heart_disease:va.")],
    keys: Annotated[Path | None, option(
        "--keys", "DIR/NAME", "This client's folder, made by `descant certificates`.")] = None,
    directory: Annotated[Path | None, option(
        "--dir", "DIR", "The client directory, for its state and model. Default: descant-NAME.")] = None,
    expect: Annotated[Path | None, option(
        "--expect", "EXPERIMENT.toml",
        "The agreed experiment: any other is refused, and one of more rounds.")] = None,
    secure_aggregation: Annotated[bool, typer.Option(
        "--secure-aggregation", help="Take part only if the server learns no more than sums of uploads: "
                                     "nothing is uploaded in the clear.")] = False,
    threshold: Annotated[int | None, option(
        "--threshold", "N", "With --secure-aggregation: take part only in sums of so many clients or more. "
                            "Default: 3.", min=3)] = None,
    allow: Allow = None,
    stay: Annotated[bool, typer.Option(
        "--stay", help="Stay connected after the model is saved, until Ctrl-C.")] = False,
    transport: Transport = TransportName.grpc,
    insecure: Insecure = False,
    data_dir: DataDir = None,
) -> None:
    """Take part in a remote federation with the data of one organisation, which stay on this machine.

    What leaves this machine is shown. The client ends when it has its model; started again, it continues.

    \b
    Examples:
      descant client --server server.example.org:8443 --name north --data patients.csv --keys north
      descant client --server 127.0.0.1:8443 --name va --data heart_disease:va --insecure
    """
    with reporting("stopped") as console:
        require_flower()
        from descant.deploy.client import Client
        from descant.deploy.export.client_data import require_source
        from descant.deploy.protocol import load_experiment
        from descant.deploy.secure.parts import LEAST, Identity
        from descant.deploy.transport.address import Address
        from descant.deploy.transport.choose import Name, make_client

        address = Address.parse(server)
        found = _client_keys(keys, insecure, name, address.is_loopback)
        require_source(data)
        if threshold is not None and not secure_aggregation:
            raise UsageError("--threshold is for --secure-aggregation: add that, or leave --threshold out")
        expected = None if expect is None else load_experiment(expect, ())
        with _display(console, name, directory or Path(f"descant-{name}"), stay) as (display, place, stop):
            _say_keys(display.say, found)
            display.begin(str(address), data, place)
            client = Client(name, data, place, display, allow=allow or (), expected=expected,
                            identity=found and Identity(found.private, found.certificate, found.ca),
                            secure=(threshold or LEAST) if secure_aggregation else None)
            make_client(Name(transport), address, found, place).serve(client.reply, display, stop)
        if display.code:
            raise typer.Exit(display.code)  # the display has shown why


@contextmanager
def _display(console: Console, name: str, place: Path, stay: bool
             ) -> Iterator[tuple[ClientDisplay, Path, threading.Event]]:
    """Hold the client directory, and show what happens until the event is set, or the user ends it."""
    from descant.deploy.client_directory import open_directory
    from descant.view.federation_client import ClientDisplay

    open_directory(place)
    stop = threading.Event()
    with locked(place), terminable(stop.set), ClientDisplay(console, name, stop, stay) as display:
        try:
            yield display, place, stop
        except KeyboardInterrupt as error:
            raise restated(error, f"stopped; rerun the same command to continue with {place}") from None


def _say_keys(say: Callable[[str], None], keys: ClientKeys | None) -> None:
    if keys is None:
        say("WARNING: --insecure: nothing is encrypted. For trials only.")
        return
    for note in keys.notes:
        say(f"note: {note}")


def _client_keys(place: Path | None, insecure: bool, name: str, is_loopback: bool) -> ClientKeys | None:
    from descant.deploy.keys import ClientKeys, is_name

    if not is_name(name):
        raise UsageError(f"--name {name!r} cannot be the name of a client: use printable characters without "
                         "slashes")
    if insecure:
        refuse_both(place)
        if not is_loopback:
            raise UsageError("--insecure is only for a server on this machine, such as 127.0.0.1: for any "
                             "other, use --keys")
        return None
    if place is None:
        raise UsageError("--keys is missing: name the folder that `descant certificates` made for this "
                         "client, or use --insecure for a trial on this machine")
    return ClientKeys.load(place, name)
