"""Certificates and keys: made once, kept, added to; and what is wrong with them is said."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from descant.deploy import certificates, keys
from descant.deploy.certificates import make_certificates
from descant.deploy.keys import ClientKeys, ServerKeys, hosts_of, public_pem
from descant.errors import DescantError, UsageError

HOST = "server.example.org"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "pki", HOST, ["north", "south"])
    return tmp_path / "pki"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*")) if path.is_file()}


def at(monkeypatch: pytest.MonkeyPatch, **later: float) -> None:
    """Another day."""
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(**later)
    for module in (certificates, keys):
        monkeypatch.setattr(module, "now", lambda: now)


def test_each_organisation_gets_one_folder(made):
    assert {*contents(made)} == {
        "ca.crt", "ca.key", "server/ca.crt", "server/server.pem", "server/server.key",
        "server/clients/north.pub", "server/clients/south.pub",
        "server/clients/north.pem", "server/clients/south.pem",
        "north/ca.crt", "north/north.key", "north/north.pub", "north/north.pem",
        "south/ca.crt", "south/south.key", "south/south.pub", "south/south.pem"}
    server, client = ServerKeys.load(made / "server"), ClientKeys.load(made / "north", "north")
    assert {*server.hosts} == {HOST, "localhost", "127.0.0.1", "::1"}
    assert [*server.clients] == ["north", "south"]
    assert server.clients["north"] == client.public_pem
    assert server.ca == client.ca == (made / "ca.crt").read_bytes()
    assert server.notes == client.notes == ()


def test_the_certificate_is_one_that_tls_accepts(made):
    """The two ends shake hands in memory."""
    server = ServerKeys.load(made / "server")
    there, here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    there.load_cert_chain(server.certificate, server.key)
    here.load_verify_locations(cadata=server.ca.decode())
    here.verify_flags |= ssl.VERIFY_X509_STRICT

    def shake(host: str) -> None:
        a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [here.wrap_bio(a, b, server_hostname=host), there.wrap_bio(b, a, server_side=True)]
        while ends:
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass

    for host in (HOST, "localhost", "127.0.0.1"):
        shake(host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake("other.example.org")


def test_keys_are_for_nobody_else(made, monkeypatch):
    for path in made.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600 if path.suffix == ".key" else mode), path


def test_keys_can_never_be_read_by_others(tmp_path, monkeypatch):
    """Not even under the name they are written to."""
    modes: list[int] = []
    rename, fdopen = Path.rename, os.fdopen
    monkeypatch.setattr(Path, "rename", lambda p, to: modes.append(p.stat().st_mode) or rename(p, to))
    monkeypatch.setattr(os, "fdopen", lambda fd, *a: modes.append(os.fstat(fd).st_mode) or fdopen(fd, *a))
    before = os.umask(0)
    try:
        make_certificates(tmp_path / "pki", HOST, ["north"])
    finally:
        os.umask(before)
    assert len(modes) == 6  # three keys, when they are opened and when they get their name
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


def test_again_keeps_everything_and_adds(made):
    before = contents(made)
    again = make_certificates(made, HOST, ["north", "south"])
    assert (again.authority, again.server) == ("kept", "kept")
    assert (again.added, again.kept) == ((), ("north", "south"))
    assert contents(made) == before
    more = make_certificates(made, HOST, ["north", "east"])
    assert (more.added, more.kept) == (("east",), ("north",))
    assert contents(made).items() > before.items()
    assert [*ServerKeys.load(made / "server").clients] == ["east", "north", "south"]


def test_another_host_renews_the_certificate_with_the_same_key(made):
    before = contents(made)
    assert make_certificates(made, "192.0.2.7", []).server == "renewed"
    after = contents(made)
    assert {name for name in before if before[name] != after[name]} == {"server/server.pem"}
    assert "192.0.2.7" in ServerKeys.load(made / "server").hosts


def test_a_certificate_that_ends_is_renewed(made, monkeypatch):
    at(monkeypatch, days=340)
    assert make_certificates(made, HOST, []).server == "renewed"
    assert make_certificates(made, HOST, []).server == "kept"
    at(monkeypatch, days=3651)
    with pytest.raises(UsageError, match=r"expired on .*in another directory"):
        make_certificates(made, HOST, [])


def test_a_folder_that_was_handed_over_is_not_made_again(made):
    for path in (made / "north").iterdir():
        path.unlink()
    (made / "north").rmdir()
    assert make_certificates(made, HOST, ["north"]).kept == ("north",)
    assert not (made / "north").exists()


def test_certificates_of_clients_are_renewed_with_the_same_key(made, monkeypatch):
    """Before they expire. A client that has its folder elsewhere is sent the new certificate alone."""
    for path in (made / "north").iterdir():
        path.unlink()
    before = contents(made)
    at(monkeypatch, days=340)
    notes = ServerKeys.load(made / "server").notes
    assert any("the certificate of north expires on" in note for note in notes)
    again = make_certificates(made, HOST, ["north", "south"])
    assert (again.added, again.renewed, again.kept) == ((), ("north", "south"), ())
    assert {path.name for path in (made / "north").iterdir()} == {"ca.crt", "north.pem"}
    after = contents(made)
    assert {name for name in before if before[name] != after[name]} == {
        "server/server.pem", "server/clients/north.pem", "server/clients/south.pem", "south/south.pem"}
    at(monkeypatch, days=400)
    assert ClientKeys.load(made / "south", "south").certificate == after["south/south.pem"]
    assert make_certificates(made, HOST, ["north", "south"]).kept == ("north", "south")


def test_a_client_with_its_own_key_gets_a_certificate(made):
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (made / "server" / "clients" / "east.pub").write_bytes(public)
    assert make_certificates(made, HOST, ["east"]).renewed == ("east",)
    (made / "east" / "east.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    assert ClientKeys.load(made / "east", "east").public == key.public_key()


def test_another_key_for_one_client(made):
    """Everybody else keeps theirs, and the authority stays."""
    before = contents(made)
    again = make_certificates(made, HOST, ["south"], rotate=["north"])
    assert (again.added, again.kept) == (("north",), ("south",))
    after = contents(made)
    assert {name for name in before if before[name] != after[name]} == {
        "server/clients/north.pub", "server/clients/north.pem", "north/north.key", "north/north.pub",
        "north/north.pem"}
    assert ClientKeys.load(made / "north", "north").public_pem == ServerKeys.load(
        made / "server").clients["north"] not in before.values()


def test_a_revoked_client(made):
    """Its key is not taken, and does not come back with the next call; a new one does."""
    before = contents(made)
    assert make_certificates(made, HOST, [], revoke=["north"]).revoked == ("north",)
    assert [*ServerKeys.load(made / "server").clients] == ["south"]
    assert contents(made)["ca.crt"] == before["ca.crt"]
    with pytest.raises(UsageError, match=r"the key of north was revoked: make another with --rotate north"):
        make_certificates(made, HOST, ["north"])
    make_certificates(made, HOST, [], rotate=["north"])
    assert [*ServerKeys.load(made / "server").clients] == ["north", "south"]
    assert ClientKeys.load(made / "north", "north").private is not None
    with pytest.raises(UsageError, match="there is no client nobody with a key"):
        make_certificates(made, HOST, [], revoke=["nobody"])


def test_a_certificate_of_somebody_else(made, tmp_path):
    make_certificates(tmp_path / "other", HOST, ["north"])
    place = made / "north" / "north.pem"
    for source, what in ((made / "south" / "south.pem", "is not for the key of this client"),
                         (None, "there is no .*north.pem: ask the server's operator for a new one")):
        place.unlink()
        if source is not None:
            place.write_bytes(source.read_bytes())
        with pytest.raises(UsageError, match=what):
            ClientKeys.load(made / "north", "north")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("survivors", range(17))
def test_a_kill_at_any_moment_is_made_good_by_the_next_call(tmp_path, monkeypatch, survivors):
    """Whatever file was the last, the next call keeps all keys and completes the rest."""
    count = 0

    def counted(write):
        def inner(path, data):
            nonlocal count
            count += 1
            if count > survivors:
                raise Killed
            write(path, data)
        return inner

    with monkeypatch.context() as patch:
        for name in ("write_atomic", "_write_private"):
            patch.setattr(certificates, name, counted(getattr(certificates, name)))
        with pytest.raises(Killed):
            make_certificates(tmp_path, HOST, ["north", "south"])
    before = contents(tmp_path)
    assert len(before) == survivors
    make_certificates(tmp_path, HOST, ["north", "south"])
    assert contents(tmp_path).items() >= before.items()
    assert [*ServerKeys.load(tmp_path / "server").clients] == ["north", "south"]
    for name in ("north", "south"):
        ClientKeys.load(tmp_path / name, name)


@pytest.mark.parametrize("name", ["", "server", "Server", "a/b", "a\\b", "..", ".hidden", "-x", "a\nb", " a",
                                  "x" * 101, "ca.key"])
def test_names_that_no_client_can_have(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be the name of a client"):
        make_certificates(tmp_path, HOST, ["good", name])
    assert not any(tmp_path.iterdir())


def test_names_are_given_once(tmp_path):
    with pytest.raises(UsageError, match="several clients are called 'north'"):
        make_certificates(tmp_path, HOST, ["north", "south", "north"])


def test_names_may_be_in_any_script(tmp_path):
    make_certificates(tmp_path, HOST, ["Zürich", "北"])
    assert {*ServerKeys.load(tmp_path / "server").clients} == {"Zürich", "北"}
    assert ClientKeys.load(tmp_path / "北", "北").name == "北"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "a b", "https://x.org", "x.org:8443", "10.0.0",
                                  "-a.org", "ü.org"])
def test_hosts_that_no_server_can_have(tmp_path, host):
    with pytest.raises(UsageError, match=r"neither a host name|address to listen on"):
        make_certificates(tmp_path, host, ["north"])


@pytest.mark.parametrize("days", [0, -1, 4000])
def test_days(tmp_path, days):
    with pytest.raises(UsageError, match="--days must be from 1 to 3650"):
        make_certificates(tmp_path, HOST, ["north"], days)


def test_days_count(tmp_path):
    ends = make_certificates(tmp_path, HOST, ["north"], days=2).expires
    left = ends - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=1.9) < left < datetime.timedelta(days=2.1)
    assert make_certificates(tmp_path, HOST, [], days=2).server == "kept"


def test_the_authority_without_its_key_adds_nothing(made):
    (made / "ca.key").unlink()
    with pytest.raises(UsageError, match=r"ca\.key is missing"):
        make_certificates(made, HOST, ["east"])


@pytest.mark.parametrize("file", ["ca.crt", "server.pem", "server.key"])
def test_the_server_misses_a_file(made, file):
    (made / "server" / file).unlink()
    with pytest.raises(UsageError, match=f"no .*server/{file}: make it with: descant certificates .*pki"):
        ServerKeys.load(made / "server")


@pytest.mark.parametrize("file", ["ca.crt", "north.key"])
def test_a_client_misses_a_file(made, file):
    (made / "north" / file).unlink()
    with pytest.raises(UsageError, match=f"there is no .*north/{file}: make it with: descant certificates"):
        ClientKeys.load(made / "north", "north")


def test_a_client_with_another_name(made):
    with pytest.raises(UsageError, match=r"has the key of north: is the name right\?"):
        ClientKeys.load(made / "north", "south")


@pytest.mark.parametrize(("file", "what"), [
    ("ca.crt", "not a certificate"), ("server.pem", "not a certificate"), ("server.key", "not a private key"),
    ("clients/north.pub", "not a public key")])
def test_files_that_are_something_else(made, file, what):
    (made / "server" / file).write_text("nothing\n")
    with pytest.raises(UsageError, match=f"{file} is {what}"):
        ServerKeys.load(made / "server")


def test_keys_of_another_kind(made):
    other = ed25519.Ed25519PrivateKey.generate()
    private = other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (made / "north" / "north.key").write_bytes(private)
    with pytest.raises(UsageError, match=r"north\.key is not a key on one of the curves"):
        ClientKeys.load(made / "north", "north")
    public = other.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (made / "server" / "clients" / "north.pub").write_bytes(public)
    with pytest.raises(UsageError, match=r"north\.pub is not a key on one of the curves"):
        ServerKeys.load(made / "server")


def test_a_clients_own_key(made):
    """A client may hand over its public key only, on any of the curves."""
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    public = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (made / "server" / "clients" / "east.pub").write_bytes(public)
    assert ServerKeys.load(made / "server").clients["east"] == public_pem(key)


def test_files_that_do_not_belong_together(made, tmp_path):
    make_certificates(tmp_path / "other", HOST, ["north"])
    for file, what in [("server.key", "is not the key of"), ("ca.crt", "was not issued by the authority in")]:
        path = made / "server" / file
        before = path.read_bytes()
        path.write_bytes((tmp_path / "other" / "server" / file).read_bytes())
        with pytest.raises(UsageError, match=what):
            ServerKeys.load(made / "server")
        path.write_bytes(before)
    (made / "north" / "north.pub").write_bytes((made / "south" / "south.pub").read_bytes())
    with pytest.raises(UsageError, match=r"north\.pub does not belong to .*north\.key"):
        ClientKeys.load(made / "north", "north")


def test_two_clients_with_one_key(made):
    clients = made / "server" / "clients"
    (clients / "copy.pub").write_bytes((clients / "north.pub").read_bytes())
    with pytest.raises(UsageError, match="copy and north have the same key"):
        ServerKeys.load(made / "server")


def test_a_server_without_clients(tmp_path):
    make_certificates(tmp_path, HOST, [])
    with pytest.raises(UsageError, match="has no keys: add clients with"):
        ServerKeys.load(tmp_path / "server")


def test_dates(made, monkeypatch):
    ends = x509.load_pem_x509_certificate((made / "server" / "server.pem").read_bytes()).not_valid_after_utc
    at(monkeypatch, days=366)
    with pytest.raises(UsageError, match=f"server.pem expired on {ends:%Y-%m-%d}: renew it with: descant"):
        ServerKeys.load(made / "server")
    with pytest.raises(UsageError, match=r"north\.pem expired on .*: ask the server's operator"):
        ClientKeys.load(made / "north", "north")
    at(monkeypatch, days=-3)
    with pytest.raises(UsageError, match=r"the clock of this machine says .*: set it"):
        ClientKeys.load(made / "north", "north")


def test_another_host_than_the_certificates(made):
    server = ServerKeys.load(made / "server")
    server.require_host(HOST)
    server.require_host("127.0.0.1")
    with pytest.raises(UsageError, match=r"is for server\.example\.org, .*not for x\.org: .* --host x\.org"):
        server.require_host("x.org")


def test_a_key_that_others_can_read_is_noted(made):
    path = made / "north" / "north.key"
    path.chmod(0o640)
    (note,) = ClientKeys.load(made / "north", "north").notes
    assert note == f"{path} is readable by other users of this machine: chmod 600 {path}"


def test_a_key_with_a_password(made):
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption

    key = ec.generate_private_key(ec.SECP384R1())
    path = made / "server" / "server.key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(UsageError, match="protected by a password"):
        ServerKeys.load(made / "server")


def test_only_one_at_a_time(made):
    with certificates.locked(made), pytest.raises(DescantError, match="another process is working in"):
        make_certificates(made, HOST, ["east"])


def test_a_certificate_without_hosts(made):
    assert hosts_of(x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())) == ()
