"""Downloads, against a server on this machine that misbehaves on demand."""

from __future__ import annotations

import hashlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from descant.data import download
from descant.data.download import DownloadError, Remote, fetch
from descant.errors import DescantError

CONTENT = bytes(range(256)) * 4000  # about a megabyte


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT under every path; `answer` decides how."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []  # what was asked for
        self.answer: Callable[[Handler], None] = Handler.ranged

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def handle_error(self, *_: object) -> None:
        """Whoever was kept waiting has hung up: a thread that outlives its test says so in the next one."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers["Range"])
        self.server.answer(self)

    def log_message(self, *_: object) -> None:
        pass

    def ranged(self) -> None:
        start = int((self.headers["Range"] or "bytes=0-")[len("bytes="):-1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start:])

    def whole(self) -> None:
        """As a server does that knows nothing of ranges."""
        self.body(CONTENT)

    def body(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def cut(self) -> None:
        """Promises everything, and hangs up half way."""
        start = int((self.headers["Range"] or "bytes=0-")[len("bytes="):-1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : (start + len(CONTENT) + 1) // 2])

    def silent(self) -> None:
        time.sleep(1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def remote(server: Server) -> Remote:
    return Remote("file.gz", (server.url("file.gz"),), len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole(server: Server, remote: Remote, tmp_path: Path, capfd: pytest.CaptureFixture):
    path = fetch(remote, tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["file.gz"]
    assert capfd.readouterr().err == f"downloading file.gz (1.0 MB) from {remote.urls[0]}\n"  # one line


def test_a_terminal_gets_a_bar(server, remote, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    fetch(remote, tmp_path)
    assert "1.0/1.0 MB" in capfd.readouterr().err


def test_a_broken_connection_is_continued(server, remote, tmp_path):
    answers = [Handler.cut, Handler.cut, Handler.ranged]
    server.answer = lambda handler: answers.pop(0)(handler)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    half = (len(CONTENT) + 1) // 2
    assert server.ranges == [None, f"bytes={half}-", f"bytes={(half + len(CONTENT) + 1) // 2}-"]


def test_a_later_call_continues_where_an_earlier_one_gave_up(server, remote, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.answer = Handler.cut
    half = len(CONTENT) // 2
    with pytest.raises(DownloadError, match=f"the connection broke after {half} of {len(CONTENT)} bytes"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == ["file.gz.part"]
    server.answer = Handler.ranged
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={half}-"]
    assert names(tmp_path) == ["file.gz"]


def test_a_server_without_ranges_starts_again(server, remote, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.answer = Handler.whole
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_the_start_of_something_else_is_thrown_away(server, remote, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(b"an old version")
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=14-", None]


def test_a_complete_part_needs_no_request(server, remote, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(CONTENT)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.ranges == []


def test_a_wrong_checksum_leaves_nothing(server, remote, tmp_path):
    server.answer = lambda handler: handler.body(CONTENT[::-1])
    with pytest.raises(DownloadError, match=f"its SHA-256 is .*, that of the official file {remote.sha256}"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_size_is_refused_before_it_is_downloaded(server, remote, tmp_path):
    server.answer = lambda handler: handler.body(b"<html>log in first</html>")
    with pytest.raises(DownloadError, match=f"offers 25 bytes, not the {len(CONTENT)} of the official file"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == []


def test_more_than_promised_is_noticed(server, remote, tmp_path):
    def endless(handler: Handler) -> None:
        handler.send_response(200)  # without a length
        handler.end_headers()
        handler.wfile.write(CONTENT + CONTENT)

    server.answer = endless
    with pytest.raises(DownloadError, match=f"bytes, the official file {len(CONTENT)}"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == []


def test_not_found_is_said_at_once_and_the_mirror_is_tried(server, remote, tmp_path):
    def missing(handler: Handler) -> None:
        return handler.send_error(404) if "mirror" not in handler.path else handler.ranged()

    server.answer = missing
    with pytest.raises(DownloadError, match=r"file\.gz: the server answers 404 Not Found"):
        fetch(remote, tmp_path)
    assert len(server.ranges) == 1  # asking again does not help
    mirrored = Remote("file.gz", (*remote.urls, server.url("mirror")), remote.size, remote.sha256)
    assert fetch(mirrored, tmp_path).read_bytes() == CONTENT


def test_a_busy_server_is_asked_again(server, remote, tmp_path):
    def busy(handler: Handler) -> None:
        return handler.send_error(503) if len(server.ranges) < 3 else handler.ranged()

    server.answer = busy
    assert fetch(remote, tmp_path).read_bytes() == CONTENT


def test_time_out(server, remote, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.05)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    server.answer = Handler.silent
    with pytest.raises(DownloadError, match=r"no answer within 0\.05 s"):
        fetch(remote, tmp_path)
    assert len(server.ranges) == 2


def test_nobody_there(remote, tmp_path, server):
    nowhere = Remote("file.gz", ("http://127.0.0.1:9/file.gz",), remote.size, remote.sha256)
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9/file\.gz: .*refused"):
        fetch(nowhere, tmp_path)


def test_a_disk_that_fails_is_no_network_that_fails(server, remote, tmp_path):
    (tmp_path / "file.gz.part").mkdir()
    with pytest.raises(DescantError, match=r"cannot write .*file\.gz\.part: Is a directory"):
        fetch(remote, tmp_path)
