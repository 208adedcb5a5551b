"""Wheels and sdists of the three packages: built twice under different circumstances, and judged.

Owns: building them with the environment's own hatchling, what must be in them and what must not, their one version.
Must not know: sessions, environments, or whether what is in them works once it is installed (`installs`).
"""

from __future__ import annotations

import argparse
import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from development.places import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Package", "build", "faults", "main", "packages", "version_faults", "versions", "wheel_metadata", "wheel_of"]

BUILD_S_MAX: Final = 120  # a second each on a quiet machine
SOURCES: Final = (".py", ".typed")  # all that a package is made of
LIBRARY: Final = "libxkv.so.2"  # of the package that has `native/`, where there is a C compiler
BUILD_PARTS: Final = ("hatch_build.py", "native/build.py", "native/xkv.c")  # what it is made of, in that one's sdist
ARCHIVE_TEXTS: Final = (".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml")
METADATA: Final = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")
PURE: Final = "py3-none-any.whl"
VERSION: Final = re.compile(r'(?m)^__version__ = "(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)"$')
ENTRY_POINTS: Final = re.compile(r"(?m)^\[project\.(scripts|entry-points\..+)\]$")
LICENCE: Final = "Apache-2.0"
OTHERS_UMASK, OTHERS_ZONE = 0o077, "Pacific/Kiritimati"  # of the second build; neither may be seen in its bytes


@dataclass(frozen=True, slots=True)
class Package:
    """One package: its folder in the tree, and the names that follow from its place."""

    folder: Path
    module: str
    entry_points: bool
    native: bool = False

    @property
    def source(self) -> Path:
        """Give the folder of the module."""
        return self.folder / "src" / self.module


def packages(root: Path = ROOT, folders: Sequence[str] = PACKAGES) -> tuple[Package, ...]:
    """Give the packages, in the order in which they can be installed one after the other."""
    found = []
    for folder in folders:
        (source,) = [path.parent for path in (root / folder / "src").glob("*/__init__.py")]
        text = (root / folder / "pyproject.toml").read_text()
        native = (root / folder / "native").is_dir()
        found.append(Package(root / folder, source.name, bool(ENTRY_POINTS.search(text)), native))
    return tuple(found)


# --- versions ---------------------------------------------------------------------------------------------


def versions(found: Sequence[Package]) -> dict[str, str]:
    """Give what each package says of itself, by module; nothing where it says nothing that can be read."""
    said = {package.module: VERSION.search((package.source / "__init__.py").read_text()) for package in found}
    return {module: match[1] if match else "" for module, match in said.items()}


def version_faults(found: Sequence[Package]) -> Iterator[str]:
    """Say where the packages are not of one version, or pin each other at another one."""
    said = versions(found)
    if len(set(said.values())) != 1 or not all(said.values()):
        yield "not one version: " + ", ".join(f"{module} {text or 'none'}" for module, text in said.items())
    names = {package.module.replace("_", "-"): said[package.module] for package in found}
    for package in found:
        text = (package.folder / "pyproject.toml").read_text()
        for name, pinned in re.findall(r'"(xkv-[a-z]+)==([^"]*)"', text):
            if names.get(name) != pinned:
                yield f"{package.folder.name}/pyproject.toml: {name}=={pinned}, and it is {names.get(name)}"


# --- building ---------------------------------------------------------------------------------------------


def _epoch(root: Path) -> dict[str, str]:
    """Give the time that stands in the archives: the caller's, else the last commit's, else hatchling's own."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return {}
    line = ("git", "-C", str(root), "log", "-1", "--format=%ct")
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=BUILD_S_MAX, check=False)
    except OSError:
        return {}
    return {"SOURCE_DATE_EPOCH": done.stdout.strip()} if done.returncode == 0 and done.stdout.strip() else {}


def _built(folder: Path, into: Path, env: Mapping[str, str], umask: int, *kinds: str) -> None:
    into.mkdir(parents=True, exist_ok=True)
    wanted = [word for kind in kinds for word in ("-t", kind)]
    done = subprocess.run(
        (sys.executable, "-m", "hatchling", "build", "-d", str(into), *wanted),
        cwd=folder,
        env={**os.environ, **env},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: {folder} cannot be built\n{done.stderr}")


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name for name in archive.namelist()}


def build(into: Path, root: Path = ROOT, folders: Sequence[str] = PACKAGES) -> list[str]:
    """Build all packages into a folder; what a second build, or one from the sdist, gives otherwise, as faults.

    The second build is of a copy elsewhere, with other times, modes, umask and time zone. Without a compiler, what
    holds a library here must come out as a wheel for any platform.
    """
    env = _epoch(root)
    with tempfile.TemporaryDirectory() as scratch:
        first, second, again = Path(scratch, "first"), Path(scratch, "second"), Path(scratch, "again")
        for folder in folders:
            _built(root / folder, first, env, 0o022, "sdist", "wheel")
            copy = Path(scratch, "tree", folder)
            shutil.copytree(root / folder, copy, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("tests"))
            shutil.copyfile(root / ".gitignore", Path(scratch, "tree", ".gitignore"))
            for path in copy.rglob("*"):
                path.chmod(0o700 if path.is_dir() else 0o640)
            _built(copy, second, {**env, "TZ": OTHERS_ZONE}, OTHERS_UMASK, "sdist", "wheel")
        for sdist in sorted(first.glob("*.tar.gz")):
            with tarfile.open(sdist) as archive:
                archive.extractall(again, filter="data")
            _built(again / sdist.name.removesuffix(".tar.gz"), again, env, OTHERS_UMASK, "wheel")
        names = sorted(path.name for path in first.iterdir())
        wrong = [] if names == sorted(path.name for path in second.iterdir()) else ["the second build has other files"]
        for name in names:
            others = [second, *([again] if name.endswith(".whl") else [])]
            wrong += [
                f"{name}: {'the build from the sdist' if other is again else 'a second build'} has other bytes"
                for other in others
                if not (other / name).is_file() or (other / name).read_bytes() != (first / name).read_bytes()
            ]
        for wheel in sorted(path for path in first.glob("*.whl") if not path.name.endswith(PURE)):
            (folder,) = [
                folder for folder in folders if Path(folder).name == wheel.name.split("-")[0].replace("_", "-")
            ]
            pure = Path(scratch, "pure")
            _built(root / folder, pure, {**env, "CC": "no-such-compiler"}, 0o022, "wheel")
            name = "-".join([*wheel.name.split("-")[:2], PURE])
            if [path.name for path in pure.iterdir()] != [name] or LIBRARY in _names(pure / name):
                wrong.append(f"{wheel.name}: without a compiler it is no wheel for any platform")
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(first, into)
    return wrong


# --- judging ----------------------------------------------------------------------------------------------


def wheel_metadata(wheel: Path) -> email.message.Message:
    """Give a wheel's own METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(archive.read(name).decode())


def wheel_of(folder: Path, module: str, version: str) -> Path:
    """Give the one wheel of this module in a folder, whatever its platform; the one for any where there is none."""
    found = [*folder.glob(f"{module}-{version}-py3-none-*.whl")]
    return found[0] if len(found) == 1 else folder / f"{module}-{version}-{PURE}"


def _sources(package: Package) -> list[str]:
    files = [path for path in package.source.rglob("*") if path.suffix in SOURCES]
    return [str(path.relative_to(package.source.parent)) for path in files if "__pycache__" not in path.parts]


def _differences(where: str, there: Sequence[str], wanted: Sequence[str]) -> Iterator[str]:
    yield from (f"{where}: lacks {name}" for name in sorted(set(wanted) - set(there)))
    yield from (f"{where}: holds {name}" for name in sorted(set(there) - set(wanted)))
    yield from (f"{where}: holds {name} twice" for name in sorted({name for name in there if there.count(name) > 1}))


def _wheel_faults(package: Package, wheel: Path, version: str) -> Iterator[str]:
    info = f"{package.module}-{version}.dist-info"
    wanted = [*_sources(package), *(f"{info}/{name}" for name in METADATA)]
    wanted += [f"{info}/entry_points.txt"] if package.entry_points else []
    wanted += [] if wheel.name.endswith(PURE) else [f"{package.module}/{LIBRARY}"]
    with zipfile.ZipFile(wheel) as archive:
        yield from _differences(wheel.name, archive.namelist(), wanted)
        if f"{package.module}/py.typed" not in archive.namelist():
            yield f"{wheel.name}: has no py.typed"
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        if any(archive.read(name) != (ROOT / "LICENSE").read_bytes() for name in licences):
            yield f"{wheel.name}: its licence is not the one of this repository"
    said = wheel_metadata(wheel)
    for name, value in (("License-Expression", LICENCE), ("Version", version), ("Requires-Python", ">=3.10")):
        if said[name] != value:
            yield f"{wheel.name}: {name} is {said[name]}, and not {value}"
    for name in ("Summary", "Description-Content-Type"):
        if not said[name]:
            yield f"{wheel.name}: has no {name}"


def _sdist_faults(package: Package, sdist: Path, version: str) -> Iterator[str]:
    top = f"{package.module}-{version}"
    wanted = [f"{top}/{name}" for name in ARCHIVE_TEXTS] + [f"{top}/src/{name}" for name in _sources(package)]
    wanted += [f"{top}/{name}" for name in BUILD_PARTS] if package.native else []
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    yield from _differences(sdist.name, [member.name for member in members if not member.isdir()], wanted)
    yield from (f"{sdist.name}: {one.name} is no plain file" for one in members if not (one.isfile() or one.isdir()))


def faults(folder: Path, found: Sequence[Package]) -> Iterator[str]:
    """Say what is wrong with the archives in a folder: what lacks, what is too much, what they say of themselves."""
    yield from version_faults(found)
    expected: list[str] = []
    for package in found:
        version = versions(found)[package.module]
        pure = folder / f"{package.module}-{version}-{PURE}"
        wheel = wheel_of(folder, package.module, version) if package.native else pure
        sdist = folder / f"{package.module}-{version}.tar.gz"
        expected += [wheel.name, sdist.name]
        yield from _wheel_faults(package, wheel, version) if wheel.is_file() else ()
        yield from _sdist_faults(package, sdist, version) if sdist.is_file() else ()
    yield from _differences(folder.name, [path.name for path in folder.iterdir()], expected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build into a folder, judge what is there, and say each fault in a line; the exit code: 1 where there is one."""
    parser = argparse.ArgumentParser(prog="python -m development.distributions")
    parser.add_argument("into", type=Path)
    options = parser.parse_args(arguments)
    wrong = [*build(options.into), *faults(options.into, packages())]
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    if not wrong:
        names = sorted(path.name for path in options.into.iterdir())
        sys.stdout.write(f"built twice, the same bytes, and what must be there is: {', '.join(names)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
