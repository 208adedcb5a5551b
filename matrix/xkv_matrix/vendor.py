"""Copies of our packages for a fork's own tree: under another name, with relative imports and where they are from.

Owns: which files go, rewriting imports between our packages, and the provenance file.
Must not know: what the packages do, and how a copy is tested.
"""

from __future__ import annotations

import ast
import hashlib
import json
import keyword
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .findings import MatrixError

__all__ = ["PROVENANCE", "Sources", "dotted", "vendor", "vendor_tests"]

PROVENANCE = "PROVENANCE.json"
PROVENANCE_FORMAT = 1
LICENCE = "Apache-2.0"
GIT_SECONDS_MAX = 30  # asking for the commit; a tree on a slow disk answers in a few
_COPIED = {".py", ".typed"}
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Sources:
    """Where the originals lie; the defaults are this repository's."""

    root: Path = _ROOT
    compat: str = "compat/src/xkv_compat"
    others: tuple[str, ...] = ("packages/xkv-store/src/xkv_store", "packages/xkv-offload/src/xkv_offload")
    tests: str = "compat/tests"
    whole_tests: tuple[str, ...] = ("packages/xkv-offload/tests", "tests/stand", "tests/vendored")
    pages: tuple[str, ...] = ("docs/configuration.md",)  # what these tests compare with

    @property
    def names(self) -> frozenset[str]:
        """The packages' own names."""
        return frozenset(Path(place).name for place in (self.compat, *self.others))


def _git(root: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(root), *command), capture_output=True, text=True, timeout=GIT_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _relative(path: Path, text: bytes, within: Path, names: frozenset[str]) -> bytes:
    """The module's text with imports of our packages made relative; ``within``: its place below the new package."""
    lines = text.splitlines(keepends=True)
    dots = b"." * len(within.parts)
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.Import):
            if named := sorted(alias.name for alias in node.names if alias.name.partition(".")[0] in names):
                raise MatrixError(f"{path}:{node.lineno}: import {named[0]} cannot be made relative; use from … import")
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.partition(".")[0] not in names:
                continue
            line, start = lines[node.lineno - 1], node.col_offset
            old, new = f"from {node.module} ".encode(), b"from " + dots + f"{node.module} ".encode()
            if not line.startswith(old, start):
                raise MatrixError(f"{path}:{node.lineno}: the import is written in a way that cannot be rewritten")
            lines[node.lineno - 1] = line[:start] + new + line[start + len(old) :]
    return b"".join(lines)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in _COPIED and "__pycache__" not in path.parts)


def _texts(sources: Sources, whole: bool) -> dict[str, tuple[str, bytes]]:
    """Path below the new package → (the original's path, the copy's bytes)."""
    found: dict[str, tuple[str, bytes]] = {}
    for place in (sources.compat, *sources.others) if whole else (sources.compat,):
        folder = sources.root / place
        if not folder.is_dir():
            raise MatrixError(f"{folder}: no such folder; run this from the repository")
        for path in _files(folder):
            below = path.relative_to(folder.parent if whole else folder)
            text = path.read_bytes()
            if path.suffix == ".py":
                text = _relative(path, text, below, sources.names)
            found[below.as_posix()] = (path.relative_to(sources.root).as_posix(), text)
    if whole:
        opening = '"""xkv, vendored: the spec is in xkv_offload below this package; see PROVENANCE.json."""\n'
        found["__init__.py"] = ("", opening.encode())
    found["LICENSE"] = ("LICENSE", (sources.root / "LICENSE").read_bytes())
    return found


def _provenance(sources: Sources, name: str, whole: bool, texts: dict[str, tuple[str, bytes]]) -> str:
    originals = [original for original, _ in texts.values() if original]
    changed = _git(sources.root, "status", "--porcelain", "--", *originals)
    facts = {
        "format": PROVENANCE_FORMAT,
        "project": "xkv",
        "licence": LICENCE,
        "package": name,
        "whole": whole,
        "commit": _git(sources.root, "rev-parse", "HEAD") or "unknown",
        "changed_since_commit": None if changed is None else bool(changed),
        "files": {
            path: {"from": original, "sha256": hashlib.sha256(text).hexdigest()}
            for path, (original, text) in sorted(texts.items())
        },
    }
    return json.dumps(facts, indent=1) + "\n"


def _checked_name(name: str, sources: Sources) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise MatrixError(f"--as {name!r}: not a package's name; it must be one Python identifier")
    if name in sources.names:
        raise MatrixError(f"--as {name}: a copy must not bear the original's name")
    return name


def _untouched(place: Path) -> None:
    """Refuse to overwrite what is no copy of ours, or one that somebody has edited."""
    if not place.exists():
        return
    try:
        files = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))["files"]
        known = {str(path): str(facts["sha256"]) for path, facts in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MatrixError(f"{place} is there and is no copy of ours; remove it, or choose another name") from error
    there = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
    for path, file in sorted(there.items()):
        if path == PROVENANCE or "__pycache__" in file.parts:
            continue
        if path not in known or hashlib.sha256(file.read_bytes()).hexdigest() != known[path]:
            raise MatrixError(f"{file} was changed or added since it was copied; keep or remove it yourself first")


def vendor(into: Path, name: str, *, whole: bool = False, sources: Sources | None = None) -> Path:
    """Copy compat, or the whole stack, to ``into/name``; an older copy that nobody edited is replaced.

    Raises MatrixError where the name is none, the folder is not there or what would be replaced is not ours.
    """
    sources = sources or Sources()
    place = into / _checked_name(name, sources)
    if not into.is_dir():
        raise MatrixError(f"--into {into}: no such folder")
    _untouched(place)
    texts = _texts(sources, whole)
    with tempfile.TemporaryDirectory(dir=into) as folder:
        fresh = Path(folder) / name
        for path, (_, text) in texts.items():
            file = fresh / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        (fresh / PROVENANCE).write_text(_provenance(sources, name, whole, texts), encoding="utf-8")
        if place.is_dir():
            shutil.rmtree(place)
        fresh.replace(place)
    return place


def dotted(place: Path) -> str:
    """The name by which a package is imported: with the packages around it, up to the first folder that is none."""
    parts = [place.name]
    for folder in place.absolute().parents:
        if not (folder / "__init__.py").is_file():
            break
        parts.insert(0, folder.name)
    return ".".join(parts)


def vendor_tests(into: Path, name: str, *, whole: bool = False, sources: Sources | None = None) -> Path:
    """Copy the tests of what was copied into a folder, speaking of the copy by its (dotted) name.

    The originals are not needed by what speaks of the copy. Files keep their place below the repository.
    """
    sources = sources or Sources()
    room = re.compile(rf"\b({'|'.join(sorted(sources.names if whole else {Path(sources.compat).name}))})\b")
    copy = rf"{name}.\1" if whole else name
    for place in sources.whole_tests if whole else (sources.tests,):
        folder = sources.root / place
        if not folder.is_dir():
            raise MatrixError(f"{folder}: no such folder; run this from the repository")
        for path in _files(folder):
            file = into / path.relative_to(sources.root)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(room.sub(copy, path.read_text(encoding="utf-8")), encoding="utf-8")
    for page in sources.pages if whole else ():
        (into / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources.root / page, into / page)
    return into
