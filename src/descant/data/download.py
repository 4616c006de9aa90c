"""Fetching official files: whole and as published, or not at all."""

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

TIMEOUT = 30.0  # seconds without an answer or without a byte
ATTEMPTS = 4  # per address; each one continues where the last one broke off
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
    """A file could not be had from any of its addresses."""


class _Unfit(Exception):
    """This address does not have the file: another one may."""


def fetch(remote: Remote, folder: Path) -> Path:
    """The official file, downloaded into `folder`.

    What arrives is collected in `NAME.part`, which the next call continues; it gets its name only when
    its size and checksum are right, and is removed when they are wrong.
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
        part.replace(target)
        sync_directory(folder)
        return target
    raise DownloadError("; ".join(reasons))


def mismatch(path: Path, remote: Remote) -> str | None:
    """What tells a file from the official one, if anything does."""
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
    if wrong and continued:  # what was there may have been the start of something else
        part.unlink()
        _transfer(remote, url, part)
        wrong = mismatch(part, remote)
    if wrong:
        part.unlink()
        raise _Unfit(wrong)


def _transfer(remote: Remote, url: str, part: Path) -> None:
    """Fill `part` up to the official size, in as many attempts as are allowed."""
    reason = ""
    with _shown(remote, url) as show:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE)
            try:
                _receive(remote, url, part, show)
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:  # it will not get better by asking again
                    raise _Unfit(f"the server answers {error.code} {error.reason}") from None
                reason = f"the server answers {error.code} {error.reason}"
            except TimeoutError:
                reason = f"no answer within {TIMEOUT:g} s"
            except urllib.error.URLError as error:
                timed_out = isinstance(error.reason, TimeoutError)
                reason = f"no answer within {TIMEOUT:g} s" if timed_out else str(error.reason)
            except (http.client.HTTPException, ConnectionError) as error:
                reason = f"the connection broke ({error or type(error).__name__})"
            else:
                if part.stat().st_size >= remote.size:
                    return
                reason = f"the connection broke after {part.stat().st_size} of {remote.size} bytes"
    raise _Unfit(reason)


def _receive(remote: Remote, url: str, part: Path, show: Callable[[int], None]) -> None:
    """Append what one request brings."""
    start = part.stat().st_size if part.exists() else 0
    if start >= remote.size:
        return  # complete, or too long: its checksum will tell
    request = urllib.request.Request(url, headers={"User-Agent": f"descant/{__version__}"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        ranged = str(response.headers.get("Content-Range", "")).startswith(f"bytes {start}-")
        if response.status != 206 or not ranged:
            start = 0  # the server sends the whole file whatever was asked for
        length = response.headers.get("Content-Length")
        if length is not None and start + int(length) != remote.size:
            raise _Unfit(f"the server offers {start + int(length)} bytes, not the {remote.size} of the "
                         "official file")
        with _writing(part, start) as write:
            show(start)
            # a byte more than there should be is enough to know that it is something else
            while start <= remote.size and (block := response.read(CHUNK)):
                write(block)
                start += len(block)
                show(start)


@contextlib.contextmanager
def _writing(part: Path, start: int) -> Iterator[Callable[[bytes], None]]:
    """Write from byte `start` on. A disk that fails is not a network that fails: it ends the download."""
    def write(block: bytes) -> None:
        try:
            file.write(block)
        except OSError as error:
            raise DescantError(f"cannot write {part}: {error.strerror}") from None

    try:
        file = part.open("r+b" if start else "wb", buffering=0)
    except OSError as error:
        raise DescantError(f"cannot write {part}: {error.strerror}") from None
    with file:
        file.truncate(start)
        file.seek(start)
        try:
            yield write
        finally:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _shown(remote: Remote, url: str) -> Iterator[Callable[[int], None]]:
    """Tell how far a download is: a bar on a terminal, one line anywhere else."""
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
