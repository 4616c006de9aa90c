"""`descant certificates`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import reporting
from descant.cli.options import argument, option
from descant.deploy import require_flower

PORT = 8443


def certificates(
    directory: Annotated[Path, argument("DIR", "Where they are kept. Existing files stay.")],
    host: Annotated[str, option("--host", "HOST", "The name or address at which clients reach the server.")],
    clients: Annotated[list[str] | None, option(
        "--client", "NAME",
        "A client's name; once for each. Later calls add clients, or renew the server's certificate."
        )] = None,
    days: Annotated[int, typer.Option("--days", metavar="N", min=1,
                                      help="How long the server's certificate is valid.")] = 365,
) -> None:
    """Make the certificates and keys of a remote federation.

    Each organisation gets one folder of DIR. No existing key is ever replaced.

    \b
    Examples:
      descant certificates keys --host server.example.org --client north --client south
      descant certificates keys --host server.example.org --client east
    """
    with reporting("stopped; rerun the same command to finish") as console:
        require_flower()
        from descant.deploy.certificates import make_certificates

        made = make_certificates(directory, host, clients or [], days)
        everyone = sorted(path.stem for path in (directory / "server" / "clients").glob("*.pub"))

        def say(text: str = "") -> None:
            console.print(text, soft_wrap=True)

        say(f"{made.authority} {directory / 'ca.crt'} and ca.key, the certificate authority")
        say(f"{made.server} {directory / 'server'}, for a server at {host}, until {made.expires:%Y-%m-%d}")
        for name in clients or []:
            say(f"{'made' if name in made.added else 'kept'} {directory / name}, for the client {name}")
        say()
        say("Distribute the folders:")
        say(f"  {directory / 'server'} is for the server's machine")
        for name in made.added:
            say(f"  {directory / name} is for {name} only: it holds a private key")
        say(f"  {directory / 'ca.key'} stays here: with it anybody can pose as the server")
        if made.added and made.server == "kept":
            say("  restart a running server so that it knows the new clients")
        say()
        if not everyone:
            say("No clients yet: add some with --client NAME")
            return
        name = (clients or everyone)[0]
        address = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        say("Next, on the server's machine and on each client's:")
        say(f"  descant server EXPERIMENT.toml --clients {len(everyone)} --keys "
            f"{shlex.quote(str(directory / 'server'))} --out runs/federation")
        say(f"  descant client --server {address} --name {shlex.quote(name)} --data FILE --keys "
            f"{shlex.quote(name)}")
