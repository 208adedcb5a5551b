"""The rows of ``targets.toml``: the releases that the product is judged on.

Owns: the row's format, and one clear line for whatever is wrong with a row.
Must not know: wheels, environments and checks.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .findings import MatrixError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "COMMITTED", "SHAPES", "STATUSES", "TARGETS_FILE", "TARGETS_VARIABLE", "CannotRun", "Target", "checked",
    "find_target", "load_targets", "row_text",
]  # fmt: skip

TARGETS_VARIABLE = "XKV_TARGETS"  # names another file of rows: a candidate's, for the tests that ask for their row
COMMITTED = Path(__file__).resolve().parents[1] / "targets.toml"
TARGETS_FILE = Path(os.environ.get(TARGETS_VARIABLE) or COMMITTED)
STATUSES = ("supported", "followed")
# What the real engines of a supported row are run with; a row says which of them its CPU engine cannot run.
SHAPES: Mapping[str, str] = {"llama": "Llama", "sliding": "Gemma 3 (sliding windows)", "mla": "MLA"}
_VERSION = re.compile(
    r"[0-9]{1,9}(\.[0-9]{1,9}){0,4}((a|b|rc)[0-9]{1,9})?(\.(post|dev)[0-9]{1,9}){0,2}(\+[a-z0-9.]{1,40})?"
)
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WHEEL = re.compile(r"[A-Za-z0-9_.]+-[A-Za-z0-9_.!+]+(-[0-9][A-Za-z0-9_.]*)?(-[A-Za-z0-9_.]+){3}\.whl")


@dataclass(frozen=True)
class CannotRun:
    """A model shape that a release's engine cannot run on a CPU, with its own words for it."""

    shape: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """One release.

    ``status``: supported rows block a release of the product, followed rows are reported. ``sha256`` is
    the wheel's. ``torch``: the version that the wheel is compiled against. ``imports``: modules that must
    be importable once it is installed. ``lacks``: features expected to be absent, by the names of the
    compat package's table. ``requirements``: file with the release's other requirements, relative to this
    folder; empty for a release whose engine is not run. ``engine``: False where only sources are judged.
    """

    release: str
    status: str
    package: str
    version: str
    wheel: str
    sha256: str
    torch: str
    requirements: str = ""
    engine: bool = True
    imports: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    cannot_run: tuple[CannotRun, ...] = field(default=())

    @property
    def order(self) -> tuple[int, ...]:
        """The release as numbers, so that 0.9 comes before 0.10."""
        return tuple(int(part) for part in re.findall(r"\d+", self.release))


def _bad(where: str, text: str) -> MatrixError:
    return MatrixError(f"{where}: {text}")


def _texts(where: str, name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _bad(where, f"{name} must be a list of strings, not {value!r}")
    if len(set(value)) != len(value):
        raise _bad(where, f"{name} names something twice")
    return tuple(value)


def _cannot_run(where: str, value: Any) -> tuple[CannotRun, ...]:
    wanted = {"shape", "error"}
    if not isinstance(value, list) or not all(isinstance(item, dict) and set(item) == wanted for item in value):
        raise _bad(where, "cannot_run must be tables with exactly shape and error")
    for item in value:
        if not all(isinstance(text, str) and text for text in item.values()):
            raise _bad(where, "shape and error of cannot_run must be strings with something in them")
        if item["shape"] not in SHAPES:
            raise _bad(where, f"cannot_run names {item['shape']!r}; known are {', '.join(SHAPES)}")
    return tuple(CannotRun(shape=item["shape"], error=item["error"]) for item in value)


def _row(where: str, row: Any) -> Target:
    if not isinstance(row, dict):
        raise _bad(where, "a target must be a table ([[target]])")
    known = {item.name: item for item in fields(Target)}
    release = row.get("release")
    where = f"{where} ({release})" if isinstance(release, str) and _VERSION.fullmatch(release) else where
    if unknown := sorted(set(row) - set(known)):
        raise _bad(where, f"unknown key {unknown[0]!r}; known are {', '.join(known)}")
    needed = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    if missing := [name for name in needed if name not in row]:
        raise _bad(where, f"{', '.join(missing)} missing")
    values: dict[str, Any] = dict(row)
    for name in ("imports", "lacks"):
        values[name] = _texts(where, name, row.get(name, []))
    values["cannot_run"] = _cannot_run(where, row.get("cannot_run", []))
    if not isinstance(row.get("engine", True), bool):
        raise _bad(where, f"engine must be true or false, not {row['engine']!r}")
    for name in (*needed, "requirements"):
        if not isinstance(values.get(name, ""), str):
            raise _bad(where, f"{name} must be a string, not {values[name]!r}")
    return checked(where, Target(**values))


def checked(where: str, target: Target) -> Target:
    """The row, if its parts go together; MatrixError that begins with where it stands."""
    if target.status not in STATUSES:
        raise _bad(where, f"status {target.status!r} is none of {', '.join(STATUSES)}")
    for name, version in (("release", target.release), ("version", target.version), ("torch", target.torch)):
        unsaid = name == "torch" and not version and target.status == "followed"  # a candidate's may not say it
        if not _VERSION.fullmatch(version) and not unsaid:
            raise _bad(where, f"{name} {version!r} is no version")
    if not _PACKAGE.fullmatch(target.package):
        raise _bad(where, f"package {target.package!r} is no package's name")
    if odd := [name for name in target.imports if not _MODULE.fullmatch(name)]:
        raise _bad(where, f"imports names {odd[0]!r}, which is no module's name")
    if not _SHA256.fullmatch(target.sha256):
        raise _bad(where, "sha256 must be 64 lower-case hexadecimal digits")
    if not _WHEEL.fullmatch(target.wheel):
        raise _bad(where, f"wheel {target.wheel!r} is no wheel's file name")
    if f"-{target.version}-" not in target.wheel:
        raise _bad(where, f"wheel {target.wheel!r} is not of version {target.version}")
    if target.status == "supported" and not target.requirements:
        raise _bad(where, "a supported row needs requirements")
    place = PurePosixPath(target.requirements)
    if place.is_absolute() or ".." in place.parts or "\0" in target.requirements:
        raise _bad(where, f"requirements {target.requirements!r} must lie below the folder of the rows")
    return target


def load_targets(path: Path = TARGETS_FILE) -> tuple[Target, ...]:
    """Every row, in the file's order; MatrixError with one line for the first thing that is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path}: {error}") from error
    except RecursionError as error:
        raise MatrixError(f"{path}: nested too deeply") from error
    rows = data.get("target")
    if set(data) != {"target"} or not isinstance(rows, list) or not rows:
        raise MatrixError(f"{path}: there must be [[target]] tables and nothing else")
    targets = tuple(_row(f"{path}: target {index}", row) for index, row in enumerate(rows, start=1))
    releases = [target.release for target in targets]
    for release in releases:
        if releases.count(release) > 1:
            raise MatrixError(f"{path}: release {release} stands there twice")
    for target in targets:
        places = [folder / target.requirements for folder in (path.parent, COMMITTED.parent)]
        if target.requirements and not any(place.is_file() for place in places):
            raise MatrixError(f"{path}: {target.release}: there is no {target.requirements} beside the rows")
    return targets


def find_target(release: str, path: Path = TARGETS_FILE) -> Target:
    """The row of a release; MatrixError that lists the rows there are."""
    targets = load_targets(path)
    for target in targets:
        if target.release == release:
            return target
    raise MatrixError(f"no target {release!r}; there are {', '.join(target.release for target in targets)}")


def row_text(target: Target) -> str:
    """A row as the file has it; strings and lists of TOML are written as those of JSON."""
    lines = ["[[target]]"]
    for item in fields(Target):
        value = getattr(target, item.name)
        if item.name != "cannot_run" and (item.default is MISSING or value not in ("", ())):
            lines.append(f"{item.name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    for row in target.cannot_run:
        lines += ["", "[[target.cannot_run]]", f"shape = {json.dumps(row.shape)}", f"error = {json.dumps(row.error)}"]
    return "\n".join(lines) + "\n"
