"""`descant certificates`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from descant.cli.common import reporting
from descant.cli.options import argument, option
from descant.deploy import require_flower

if TYPE_CHECKING:
    from rich.console import Console

    from descant.deploy.certificates import Certificates

PORT = 8443


def certificates(
    directory: Annotated[Path, argument("DIR", "Where they are kept. Existing files stay.")],
    host: Annotated[str, option("--host", "HOST", "The name or address at which clients reach the server.")],
    clients: Annotated[list[str] | None, option(
        "--client", "NAME",
        "A client's name; once for each. Later calls add clients, or renew certificates that expire "
        "within 30 days.")] = None,
    rotate: Annotated[list[str] | None, option(
        "--rotate", "NAME", "Give this client another key: the old one is not taken any more.")] = None,
    revoke: Annotated[list[str] | None, option(
        "--revoke", "NAME", "Do not admit this client any more. A running server closes its connection "
                            "within seconds.")] = None,
    days: Annotated[int, typer.Option("--days", metavar="N", min=1,
                                      help="How long new certificates are valid.")] = 365,
) -> None:
    """Make the certificates and keys of a remote federation.

    Each organisation gets one folder of DIR. No existing key is replaced but by --rotate.

    \b
    Examples:
      descant certificates keys --host server.example.org --client north --client south
      descant certificates keys --host server.example.org --client east
      descant certificates keys --host server.example.org --revoke south
    """
    with reporting("stopped; rerun the same command to finish") as console:
        require_flower()
        from descant.deploy.certificates import make_certificates

        made = make_certificates(directory, host, clients or [], days, rotate=rotate or [],
                                 revoke=revoke or [])
        show_certificates(console, made, host, clients or [])


def show_certificates(console: Console, made: Certificates, host: str, asked: list[str]) -> None:
    """What was made, whom each folder is for, and the commands that come next."""
    directory = made.directory

    def say(text: str = "") -> None:
        console.print(text, soft_wrap=True)

    say(f"{made.authority} {directory / 'ca.crt'} and ca.key, the certificate authority")
    say(f"{made.server} {directory / 'server'}, for a server at {host}, until {made.expires:%Y-%m-%d}")
    for what, names in (("made", made.added), ("renewed", made.renewed), ("kept", made.kept)):
        for name in names:
            say(f"{what} {directory / name}, for the client {name}")
    for name in made.revoked:
        say(f"revoked the key of the client {name}; {directory / name} can be deleted")
    say()
    say("Distribute the folders:")
    say(f"  {directory / 'server'} is for the server's machine")
    for name in made.added:
        say(f"  {directory / name} is for {name} only: it holds a private key")
    for name in made.renewed:
        say(f"  {directory / name / name}.pem is for {name}: it goes beside its key")
    say(f"  {directory / 'ca.key'} stays here: with it anybody can pose as the server")
    if made.server == "kept" and (made.added or made.revoked):
        whom = "the new clients" if made.added else "that"
        say(f"  a running server knows {whom} within seconds, if its folder is this one")
    if made.server == "renewed":
        say("  restart a running server so that it uses its new certificate")
    say()
    everyone = sorted(path.stem for path in (directory / "server" / "clients").glob("*.pub"))
    if not everyone:
        say("No clients yet: add some with --client NAME")
        return
    name = (asked or everyone)[0]
    address = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
    say("Next, on the server's machine and on each client's:")
    say(f"  descant server EXPERIMENT.toml --clients {len(everyone)} --keys "
        f"{shlex.quote(str(directory / 'server'))} --out runs/federation")
    say(f"  descant client --server {address} --name {shlex.quote(name)} --data FILE --keys "
        f"{shlex.quote(name)}")
