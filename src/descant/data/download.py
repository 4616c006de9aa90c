"""Downloads of official files, complete and as published. A broken download is continued."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import progress as bars
from rich.console import Console

from descant import __version__
from descant.core.files import sync_directory
from descant.core.units import size as bytes_for_people
from descant.errors import DescantError

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 4  # per address; each continues where the last one stopped
PAUSE = 2.0  # seconds between two attempts
CHUNK = 1 << 18


@dataclass(frozen=True)
class Remote:
    """An official file: its name, the addresses it is published at, its size in bytes and its SHA-256."""

    name: str
    urls: tuple[str, ...]
    size: int
    sha256: str


class DownloadError(DescantError):
    """No address of a file has delivered it."""


class _Unfit(Exception):
    """This address does not deliver the file; another one may."""


def fetch(remote: Remote, folder: Path) -> Path:
    """Download the official file into `folder`.

    Bytes go to `NAME.part`, which the next call continues. It is renamed if size and checksum are right, and
    removed if they are wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / remote.name
    part = target.with_name(f"{remote.name}.part")
    reasons = []
    for url in remote.urls:
        try:
            _download(remote, url, part)
        except _Unfit as reason:
            reasons.append(f"{url}: {reason}")
            continue
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
        sync_directory(folder)
        return target
    raise DownloadError("; ".join(reasons))


def mismatch(path: Path, remote: Remote) -> str | None:
    """How a file differs from the official one, if it does."""
    size = path.stat().st_size
    if size != remote.size:
        return f"it has {size} bytes, the official file {remote.size}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != remote.sha256:
        return f"its SHA-256 is {found}, that of the official file {remote.sha256}"
    return None


def _download(remote: Remote, url: str, part: Path) -> None:
    """Complete `part` from one address."""
    continued = part.exists()
    _transfer(remote, url, part)
    wrong = mismatch(part, remote)
    if wrong and continued:  # it may have begun as another file
        part.unlink()
        return _download(remote, url, part)
    if wrong:
        part.unlink()
        raise _Unfit(wrong)


def _transfer(remote: Remote, url: str, part: Path) -> None:
    """Fill `part` up to the official size, in at most `ATTEMPTS` attempts."""
    reason = ""
    with _shown(remote, url) as show:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE)
            try:
                _receive(remote, url, part, show)
            except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
                reason = _reason(error)
                code = getattr(error, "code", 500)
                if code < 500 and code != 429:  # a retry cannot help
                    break
            else:
                if part.stat().st_size >= remote.size:
                    return
                reason = f"the connection broke after {part.stat().st_size} of {remote.size} bytes"
    raise _Unfit(reason)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    return str(cause) if cause is not error else f"the connection broke ({error or type(error).__name__})"


def _receive(remote: Remote, url: str, part: Path, show: Callable[[int], None]) -> None:
    """Append the response to one request."""
    start = part.stat().st_size if part.exists() else 0
    if start >= remote.size:
        return  # complete or too long: the checksum decides
    request = urllib.request.Request(url, headers={"User-Agent": f"descant/{__version__}"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        ranged = str(response.headers.get("Content-Range", "")).startswith(f"bytes {start}-")
        if response.status != 206 or not ranged:
            start = 0  # the server ignores ranges and sends the whole file
        length = response.headers.get("Content-Length")
        if length is not None and start + int(length) != remote.size:
            raise _Unfit(f"the server offers {start + int(length)} bytes, not the {remote.size} of the "
                         "official file")
        with _disk(part):
            file = part.open("r+b" if start else "wb", buffering=0)
        with file:
            file.truncate(start)
            file.seek(start)
            show(start)
            # one byte too many proves that it is another file
            while start <= remote.size and (block := response.read(CHUNK)):
                with _disk(part):
                    file.write(block)
                start += len(block)
                show(start)


@contextlib.contextmanager
def _disk(part: Path) -> Iterator[None]:
    """A failing disk, unlike a failing network, ends the download."""
    try:
        yield
    except OSError as error:
        raise DescantError(f"cannot write {part}: {error.strerror}") from None


@contextlib.contextmanager
def _shown(remote: Remote, url: str) -> Iterator[Callable[[int], None]]:
    """Show the progress: a bar on a terminal, one line anywhere else."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"downloading {remote.name} ({bytes_for_people(remote.size)}) from {url}",
                      soft_wrap=True, markup=False, highlight=False)
        yield lambda done: None
        return
    columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.DownloadColumn(),
               bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task(f"downloading {remote.name}", total=remote.size)
        yield lambda done: bar.update(task, completed=done)
