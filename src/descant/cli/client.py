"""`descant client`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from descant.cli.common import Allow, DataDir, Terminated, reporting_errors, terminable
from descant.cli.server import Insecure, refuse_both
from descant.deploy import require_flower
from descant.errors import UsageError
from descant.view.terminal import make_console

if TYPE_CHECKING:
    from descant.deploy.keys import ClientKeys


def client(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", show_default=False,
                                        help="The address of the server.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", show_default=False,
                                      help="The name of this client, as in the certificates.")],
    data: Annotated[str, typer.Option(
        "--data", metavar="FILE", show_default=False,
        help="The rows of this client: a CSV, Parquet or NPZ file. For trials: DATASET:CLIENT, such as "
             "heart_disease:va.")],
    keys: Annotated[Path | None, typer.Option(
        "--keys", metavar="DIR/NAME", show_default=False,
        help="This client's folder, made by `descant certificates`.")] = None,
    directory: Annotated[Path | None, typer.Option(
        "--dir", metavar="DIR", show_default=False,
        help="The client directory, for its state and model. Default: descant-NAME.")] = None,
    expect: Annotated[Path | None, typer.Option(
        "--expect", metavar="EXPERIMENT.toml", show_default=False,
        help="The agreed experiment: any other is refused, except for the number of rounds.")] = None,
    allow: Allow = None,
    stay: Annotated[bool, typer.Option(
        "--stay", help="Stay connected after the model is saved, until Ctrl-C.")] = False,
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
    with reporting_errors("stopped"):
        require_flower()
        from descant.core.files import locked
        from descant.deploy.client import Client
        from descant.deploy.export.client_data import require_source
        from descant.deploy.protocol import load_experiment
        from descant.deploy.transport.address import Address
        from descant.deploy.transport.flower_client import FlowerClient
        from descant.view.federation_client import ClientDisplay

        address = Address.parse(server)
        found = _client_keys(keys, insecure, name, address.is_loopback)
        require_source(data)
        expected = None if expect is None else load_experiment(expect, ())
        place = directory or Path(f"descant-{name}")
        place.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        with locked(place), terminable(stop.set), ClientDisplay(make_console(), name, stop, stay) as display:
            if insecure:
                display.say("WARNING: --insecure: nothing is encrypted. For trials only.")
            for note in () if found is None else found.notes:
                display.say(f"note: {note}")
            display.begin(str(address), data, place)
            client = Client(name, data, place, display, allow=allow or (), expected=expected)
            try:
                FlowerClient(address, found, place).serve(client.reply, display, stop)
            except KeyboardInterrupt as error:
                kind = Terminated if isinstance(error, Terminated) else KeyboardInterrupt
                raise kind(f"stopped; rerun the same command to continue with {place}") from None
        if display.code:
            raise typer.Exit(display.code)  # the display has shown why


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
