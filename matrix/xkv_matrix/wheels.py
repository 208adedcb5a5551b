"""The releases' wheels: fetched by name, checked by hash, what they say of themselves, and their trees.

Owns: the folder of wheels and the trees unpacked beside them. Must not know: what is read from the trees.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email import message_from_string
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from .findings import MatrixError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .targets import Target

__all__ = [
    "FOLDER_VARIABLE", "Wheel", "fetch", "fetch_version", "pip_download", "read_wheel", "unpack", "unpack_whole",
    "wheels_folder",
]  # fmt: skip

FOLDER_VARIABLE = "XKV_WHEELS"
FETCH_SECONDS_MAX = 900  # the largest wheel is some 340 MB; a slow line still gets it in this time
_READ_BYTES = 1 << 20
_DONE = "complete"
_EXTRA = re.compile(r";.*\bextra\s*==")
# What zipfile lets through of a broken archive: RuntimeError is an encrypted member, or a compression that is unknown.
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)


def wheels_folder() -> Path:
    """Where wheels lie: the folder that XKV_WHEELS names, else ``.xkv/wheels`` of the repository."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parents[2] / ".xkv" / "wheels"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _pip() -> list[str]:
    """The command that runs a pip: this interpreter's, or one on the path, or the one that uv brings."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise MatrixError("neither pip nor uv is there to fetch a wheel; install one, or put the wheel into the folder")


def pip_download(target: Target, folder: Path) -> None:
    """Fetch the target's wheel into a folder by pip, whatever Python runs this; MatrixError when that fails."""
    if target.version.startswith("-") or not target.version.isascii():  # never an option of pip's
        raise MatrixError(f"{target.version!r} is no version")
    tag, abi, platform = target.wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    command = [
        *_pip(), "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder),
        "--python-version", "3.11", "--implementation", tag[:2], "--abi", abi,
        *(part for name in platform.split(".") for part in ("--platform", name)),
        f"{target.package}=={target.version}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise MatrixError(f"{target.wheel}: not fetched within {FETCH_SECONDS_MAX} s") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise MatrixError(f"{target.wheel}: cannot be fetched: {' '.join(errors or done.stderr.splitlines()[-1:])}")


def fetch(target: Target, download: Callable[[Target, Path], None] = pip_download) -> Path:
    """The target's wheel, fetched where it is not there yet, its hash checked either way."""
    folder = wheels_folder()
    path = folder / target.wheel
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            download(target, Path(fresh))
            fetched = Path(fresh) / target.wheel
            if not fetched.is_file():
                names = ", ".join(sorted(item.name for item in Path(fresh).iterdir())) or "nothing"
                raise MatrixError(f"{target.wheel}: the index gave {names} instead")
            fetched.replace(path)
    digest = _digest(path)
    if digest != target.sha256:
        raise MatrixError(f"{path}: its sha256 is {digest}, the row of {target.release} says {target.sha256}")
    return path


def _checked_version(version: str) -> str:
    try:
        Version(version)
    except InvalidVersion as error:
        raise MatrixError(f"{version!r} is no version") from error
    if not version.isascii() or version != version.strip() or "!" in version:
        raise MatrixError(f"{version!r} is no version")
    return version


def fetch_version(like: Target, version: str, download: Callable[[Target, Path], None] = pip_download) -> Path:
    """A version's wheel, for the platform of a known row's; fetched where it is not there yet, of any hash."""
    folder = wheels_folder()
    version = _checked_version(version)
    name = f"{like.package.replace('-', '_')}-{version}-*.whl"
    if found := sorted(folder.glob(name)):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        asked = replace(like, version=version, wheel=like.wheel.replace(like.version, version))
        download(asked, Path(fresh))
        found = sorted(Path(fresh).glob(name))
        if not found:
            raise MatrixError(f"{like.package} {version}: the index gave no such wheel")
        return found[0].replace(folder / found[0].name)


@contextmanager
def _opened(path: Path, broken: str) -> Iterator[zipfile.ZipFile]:
    """The archive; MatrixError with one line for whatever is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        raise MatrixError(f"{path}: {broken}: {error.strerror or error}") from error
    except _BROKEN as error:
        raise MatrixError(f"{path}: {broken}: {error}") from error


@dataclass(frozen=True)
class Wheel:
    """A wheel's file, and what it says of itself. ``requires``: what it needs beside its extras."""

    path: Path
    sha256: str
    package: str
    version: str
    requires: tuple[str, ...]


def read_wheel(path: Path) -> Wheel:
    """What a wheel's own metadata says; MatrixError where the file is none, or has no vllm in it."""
    with _opened(path, "not a wheel") as archive:
        names = archive.namelist()
        found = [name for name in names if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
        text = archive.read(found[0]).decode() if len(found) == 1 else ""
    facts = message_from_string(text)
    package, version = str(facts.get("Name", "")), str(facts.get("Version", ""))
    if not package or not version or not path.name.endswith(".whl"):
        raise MatrixError(f"{path}: not a wheel: it does not say what it is a wheel of")
    try:
        canonicalize_name(package, validate=True)
        _checked_version(version)
    except (InvalidName, MatrixError) as error:
        raise MatrixError(f"{path}: not a wheel: {error}") from error
    if "vllm/__init__.py" not in names:
        raise MatrixError(f"{path}: there is no vllm in it")
    requires = [_requirement(path, " ".join(str(line).split())) for line in facts.get_all("Requires-Dist", [])]
    return Wheel(path, _digest(path), package, version, tuple(line for line in requires if not _EXTRA.search(line)))


def _requirement(path: Path, line: str) -> str:
    """A requirement as it stands there: it becomes a line of a requirements file, where others would be options."""
    try:
        Requirement(line)
    except InvalidRequirement as error:
        raise MatrixError(f"{path}: not a wheel: {line!r} is no requirement") from error
    return line


def unpack_whole(wheel: Path, into: Path) -> None:
    """Unpack everything that would be installed, as a fork's own tree would have it after building."""
    into.mkdir(parents=True)
    with _opened(wheel, "not a wheel that can be unpacked") as archive:
        archive.extractall(into)


def _python_members(archive: zipfile.ZipFile) -> Sequence[zipfile.ZipInfo]:
    return [
        member
        for member in archive.infolist()
        if member.filename.endswith(".py")
        and member.filename.startswith("vllm/")
        and ".." not in PurePosixPath(member.filename).parts
    ]


def unpack(wheel: Path, sha256: str) -> Path:
    """The folder that holds the wheel's ``vllm/**/*.py``, unpacked among the wheels the first time."""
    tree = wheels_folder() / f"{wheel.name.split('-', 2)[1]}-{sha256[:12]}"
    if (tree / _DONE).is_file():
        return tree
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
        fresh = Path(folder) / "tree"
        with _opened(wheel, "not a wheel that can be unpacked") as archive:
            members = _python_members(archive)
            archive.extractall(fresh, members)
        if not members:
            raise MatrixError(f"{wheel}: there is no vllm in it")
        (fresh / _DONE).touch()
        if tree.is_dir():
            shutil.rmtree(tree)
        fresh.replace(tree)
    return tree
