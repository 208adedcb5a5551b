"""Copies of our packages for a fork's own tree: under another name, with relative imports and where they are from.

Owns: which files go, rewriting imports between our packages, and the provenance file.
Must not know: what the packages do, and how a copy is tested.
"""

from __future__ import annotations

import ast
import hashlib
import json
import keyword
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .findings import MatrixError

__all__ = ["PROVENANCE", "Sources", "dotted", "planned_tests", "vendor", "vendor_tests"]

PROVENANCE = "PROVENANCE.json"
PROVENANCE_FORMAT = 1
PROJECT, PROJECT_TESTS = "xkv", "xkv's tests"
LICENCE = "Apache-2.0"
GIT_SECONDS_MAX = 30  # asking for the commit; a tree on a slow disk answers in a few
_TAKEN = frozenset({"test", "vllm"})
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
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's, of its own
    line = ("git", "-C", str(root), *command)
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=GIT_SECONDS_MAX, check=False, env=env)
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


def _commit(root: Path, originals: list[str]) -> tuple[str, bool | None]:
    """The commit that the originals are of, and whether they were changed since; none of a repository around them."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return "unknown", None
    if _git(root, "ls-files", "--error-unmatch", "--", *originals[:1]) is None:
        return "unknown", None
    changed = _git(root, "status", "--porcelain", "--", *originals)
    return _git(root, "rev-parse", "HEAD") or "unknown", None if changed is None else bool(changed)


def _files_with_hashes(texts: dict[str, tuple[str, bytes]]) -> dict[str, Any]:
    return {
        path: {"from": original, "sha256": hashlib.sha256(text).hexdigest()}
        for path, (original, text) in sorted(texts.items())
    }


def _provenance(sources: Sources, name: str, whole: bool, texts: dict[str, tuple[str, bytes]]) -> str:
    originals = [original for original, _ in texts.values() if original]
    commit, changed = _commit(sources.root, originals)
    facts = {
        "format": PROVENANCE_FORMAT,
        "project": PROJECT,
        "licence": LICENCE,
        "package": name,
        "whole": whole,
        "commit": commit,
        "changed_since_commit": changed,
        "files": _files_with_hashes(texts),
    }
    return json.dumps(facts, indent=1) + "\n"


def _checked_name(name: str, sources: Sources) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise MatrixError(f"--as {name!r}: not a package's name; it must be one Python identifier")
    if unicodedata.normalize("NFKC", name) != name:
        raise MatrixError(f"--as {name!r}: Python reads this name as {unicodedata.normalize('NFKC', name)!r}")
    if name.startswith("__") and name.endswith("__"):
        raise MatrixError(f"--as {name}: Python has a meaning of its own for this name")
    if name in sys.stdlib_module_names or name in _TAKEN:
        raise MatrixError(f"--as {name}: a module of the standard library, or vLLM, bears this name")
    if name in sources.names:
        raise MatrixError(f"--as {name}: a copy must not bear the original's name")
    return name


def _known_files(place: Path, project: str) -> dict[str, str] | None:
    """Path → hash of every file that was put there by us, as the provenance there says; None where it says no such."""
    try:
        facts = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
        if (facts["format"], facts["project"]) != (PROVENANCE_FORMAT, project):
            return None
        return {str(path): str(file["sha256"]) for path, file in facts["files"].items()} or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_compiled(path: Path, place: Path, known: dict[str, str]) -> bool:
    """Whether Python made this file of one that is known."""
    source = path.parent.parent / f"{path.name.partition('.')[0]}.py"
    return (
        (path.parent.name, path.suffix) == ("__pycache__", ".pyc")
        and not path.is_symlink()
        and source.relative_to(place).as_posix() in known
    )


def _untouched(place: Path) -> None:
    """Refuse to overwrite what is no copy of ours, whole, or one that somebody has edited."""
    if not os.path.lexists(place):
        return
    known = None if place.is_symlink() else _known_files(place, PROJECT)
    if known is None or "LICENSE" not in known:
        raise MatrixError(f"{place} is there and is no copy of ours; remove it, or choose another name")
    there = {path.relative_to(place).as_posix(): path for path in place.rglob("*")}
    for path, file in sorted(there.items()):
        if path == PROVENANCE and not file.is_symlink():
            continue
        if file.is_symlink() or not file.is_dir():
            same = path in known and not file.is_symlink() and _hash(file) == known[path]
            if not same and not _is_compiled(file, place, known):
                raise MatrixError(f"{file} was changed or added since it was copied; keep or remove it yourself first")
    if gone := sorted(set(known) - {path for path, file in there.items() if file.is_file()}):
        raise MatrixError(f"{place / gone[0]} was removed since it was copied; remove the rest yourself first")


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


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
            place.replace(Path(folder) / "old")
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


def planned_tests(
    into: Path, name: str, *, whole: bool = False, sources: Sources | None = None
) -> dict[str, tuple[str, bytes]]:
    """The tests of what is copied, speaking of the copy by its (dotted) name: path below `into` → original and bytes.

    MatrixError where one of them would overwrite what was not put there by us, or was edited since.
    """
    sources = sources or Sources()
    room = re.compile(rf"\b({'|'.join(sorted(sources.names if whole else {Path(sources.compat).name}))})\b")
    copy = rf"{name}.\1" if whole else name
    texts = {}
    for place in sources.whole_tests if whole else (sources.tests,):
        folder = sources.root / place
        if not folder.is_dir():
            raise MatrixError(f"{folder}: no such folder; run this from the repository")
        for path in _files(folder):
            original = path.relative_to(sources.root).as_posix()
            texts[original] = (original, room.sub(copy, path.read_text(encoding="utf-8")).encode())
    for page in sources.pages if whole else ():
        texts[page] = (page, (sources.root / page).read_bytes())
    known = _known_files(into, PROJECT_TESTS)
    if known is None and os.path.lexists(into / PROVENANCE):
        raise MatrixError(f"--tests {into}: there is a {PROVENANCE} that is none of our tests'")
    for name_there, (_, text) in texts.items():
        file = into / name_there
        ours = {(known or {}).get(name_there, ""), hashlib.sha256(text).hexdigest()}
        if os.path.lexists(file) and (file.is_symlink() or _hash(file) not in ours):
            raise MatrixError(f"{file} is there and is no copy of ours, or was changed since it was copied")
    return texts


def vendor_tests(into: Path, name: str, *, whole: bool = False, sources: Sources | None = None) -> Path:
    """Copy the tests of what was copied into a folder; the originals are not needed by what speaks of the copy.

    Files keep their place below the repository. An older copy's files are replaced unless somebody edited them.
    """
    texts = planned_tests(into, name, whole=whole, sources=sources)
    for path, (_, text) in texts.items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_bytes(text)
    facts = {"format": PROVENANCE_FORMAT, "project": PROJECT_TESTS, "files": _files_with_hashes(texts)}
    (into / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return into
