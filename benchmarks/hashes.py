"""The deployment extra, pinned by hash: `python -m benchmarks.hashes > deployment.txt`.

Which packages `descant[flower]` needs on Linux and macOS follows from the metadata of those that are
installed, their versions from constraints.txt, and the hashes from the index that pip is set to: those of all
wheels for these systems and CPython 3.11 to 3.13; of what has none, of the source. torch is a special case.
For Linux the usual index has the build for CUDA, with packages of NVIDIA. Pinned is the build for processors,
whose version ends in +cpu and which has an index of its own; its hash is taken from where pip finds it here,
for the interpreter and the system on which this runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[1]
SYSTEMS = ({"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"},
           {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix"})
PYTHONS = ("3.11", "3.12", "3.13")
CPYTHONS = tuple(f"cp{python.replace('.', '')}" for python in PYTHONS)
PLATFORM = re.compile(r"(many)?linux.*_(x86_64|aarch64)|macosx_.*")
NOT_PINNED = re.compile("nvidia-.*|cuda-.*|triton")  # what torch for CUDA brings
HEAD = """\
# descant[flower] on Linux and macOS, every file by its hash:
#
#     pip install --require-hashes -r deployment.txt && pip install --no-deps descant
#
# Made by `python -m benchmarks.hashes` from constraints.txt. On Linux torch is the build for processors
# (+cpu, here for CPython 3.11 on x86_64), which has an index of its own (PIP_EXTRA_INDEX_URL or
# PIP_FIND_LINKS). For another build, such as that for CUDA, install torch first and leave its lines out.
"""


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def needed() -> dict[str, str]:
    """The packages of the extra with their versions."""
    versions, found, todo = pinned(), set(), [("descant", "flower")]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        for text in requires(name) or ():
            wanted = Requirement(text)
            if not _applies(wanted, extra) or NOT_PINNED.fullmatch(inner := canonicalize_name(wanted.name)):
                continue
            found.add(inner)
            fresh = {(inner, each) for each in ("", *wanted.extras)} - seen
            seen |= fresh
            todo += sorted(fresh)
    return {name: versions[name] for name in sorted(found)}


def _applies(wanted: Requirement, extra: str) -> bool:
    return wanted.marker is None or any(
        wanted.marker.evaluate(system | {"python_version": python, "python_full_version": f"{python}.9",
                                         "extra": extra})
        for system in SYSTEMS for python in PYTHONS)


def files(name: str, version: str) -> Iterator[tuple[str, str]]:
    """The files of a version, each with its SHA-256. pip tells of one file only, its inner parts of all."""
    from pip._internal.commands import create_command
    from pip._internal.commands.install import InstallCommand
    from pip._internal.index.collector import LinkCollector

    command = create_command("install")
    assert isinstance(command, InstallCommand)
    options, _ = command.parse_args([name])
    with command.main_context():
        collector = LinkCollector.create(command.get_default_session(options), options=options)
        yield from _listed(collector, name, version)


def _listed(collector: Any, name: str, version: str) -> Iterator[tuple[str, str]]:
    from pip._internal.index.collector import parse_links
    from pip._internal.models.link import Link
    from pip._internal.utils.hashes import FAVORITE_HASH
    from pip._internal.utils.misc import hash_file

    for place in collector.search_scope.get_index_urls_locations(name):
        for link in () if (page := collector.fetch_response(Link(place))) is None else parse_links(page):
            if _version(link.filename) == version and link.hash_name == FAVORITE_HASH:
                yield link.filename, str(link.hash)
    for place in collector.find_links:  # folders of the user's own, such as one with torch for processors
        for path in Path(place).glob("*.whl") if Path(place).is_dir() else ():
            own = _version(path.name) or ""
            if own.split("+")[0] == version and canonicalize_name(path.name.split("-")[0]) == name:
                yield path.name, hash_file(str(path))[0].hexdigest()


def _version(filename: str) -> str | None:
    try:
        parse = parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename
        return str(parse(filename)[1])
    except ValueError:
        return None  # a file of an older kind


def _fits(filename: str) -> bool:
    return filename.endswith(".whl") and any(
        (tag.interpreter in ("py3", *CPYTHONS) or tag.abi == "abi3")
        and (tag.platform == "any" or PLATFORM.fullmatch(tag.platform)) and not tag.abi.endswith("t")
        for tag in parse_wheel_filename(filename)[3])


def main() -> None:
    print(HEAD, end="")
    for name, version in needed().items():
        every = dict(sorted(files(name, version)))
        every = {file: every[file] for file in every if _fits(file)} or every
        if not every:
            sys.exit(f"the index has no file of {name} {version}")
        if name == "torch":
            show(f'{name}=={version}+cpu ; sys_platform == "linux"',
                 [every[file] for file in every if "+cpu" in file])
            show(f'{name}=={version} ; sys_platform != "linux"',
                 [every[file] for file in every if "macosx" in file])
        else:
            show(f"{name}=={version}", sorted(every.values()))


def show(pin: str, digests: list[str]) -> None:
    print(pin, *(f"    --hash=sha256:{digest}" for digest in digests), sep=" \\\n")


if __name__ == "__main__":
    main()
