"""What a session leaves behind: outcome, counts and what it ran on, for the release gate.

Owns: the result's file, counting what tools and pytest did, and running them so that nothing is left uncounted.
Must not know: environments, releases, or what the gate makes of a result.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from development.places import RESULTS, ROOT, refuse, there
from xkv_matrix.findings import MatrixError
from xkv_matrix.page import placed
from xkv_matrix.targets import TARGETS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import nox

__all__ = ["Result", "check", "environ", "must_be_there", "pytest", "ready", "recorded", "sources"]

PROCESSES_MAX = 4  # of one run of pytest: each of them may have gateways and a real scheduler
# What running, building and editing leave in the tree; everything else is a source.
MADE = (".*", "__pycache__", "*.egg-info", "*.py[co]", "*.so.*", "build", "dist", "*.whl", "uv.lock")
MADE_AT_ROOT = ("results", "gate.json", "gate.json.new")
HIDDEN_SOURCES = (".ci",)
# What would make a session run other tests, or less of them, than it says.
NOT_INHERITED = ("PYTEST_*", "PYTHONOPTIMIZE", TARGETS_VARIABLE)


def environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give what a session's process is started with: the caller's environment, less what would narrow what runs."""
    own = {name: value for name, value in os.environ.items() if not _is_any(name, NOT_INHERITED)}
    return {**own, **(more or {})}


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_made(folder: Path, name: str) -> bool:
    own = name in MADE_AT_ROOT if folder == ROOT else False
    return own or (_is_any(name, MADE) and name not in HIDDEN_SOURCES) or (folder / name / "pyvenv.cfg").is_file()


def _source_files() -> list[Path]:
    found = []
    for place, folders, files in os.walk(ROOT):
        folder = Path(place)
        folders[:] = [name for name in folders if not _is_made(folder, name)]
        found += [folder / name for name in files if not _is_made(folder, name)]
    return sorted(path for path in found if path.is_file())


def _text(path: Path) -> bytes:
    """Give a file as it is judged: the page less its table, which the gate compares by itself and may have written."""
    text = path.read_bytes()
    if path != ROOT / "README.md":
        return text
    try:
        return placed(text.decode(), "").encode()
    except (MatrixError, UnicodeDecodeError):
        return text


def sources() -> str:
    """Give one hash of everything that a session may judge: a result of other sources is none of these."""
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(_text(path)).digest())
    return digest.hexdigest()


@dataclass(slots=True)
class Result:
    """What one session leaves behind."""

    name: str
    target: str | None
    outcome: str = "failed"
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)  # pytest's, where only some tests were asked for
    failures: list[str] = field(default_factory=list)  # by name: the gate's reasons
    sources: str = field(default_factory=sources)

    @property
    def file(self) -> Path:
        """Give where it is written: the session's name, with the target after a dash."""
        return RESULTS / (f"{self.name}-{self.target}.json" if self.target else f"{self.name}.json")

    def add(self, counts: Mapping[str, int]) -> None:
        """Add one tool's counts."""
        for outcome, count in counts.items():
            self.counts[outcome] = self.counts.get(outcome, 0) + count


def ready() -> None:
    """Make the folder of results; one that cannot be made ends nox with one line."""
    try:
        RESULTS.mkdir(exist_ok=True)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")


def _write(result: Result) -> None:
    """Write a result whole or not at all; a folder that takes none ends nox with one line."""
    ready()
    fresh = result.file.with_suffix(".new")
    try:
        fresh.write_text(json.dumps(asdict(result), indent=1) + "\n")
        fresh.replace(result.file)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")


@contextmanager
def recorded(session: nox.Session, name: str, target: str | None = None) -> Iterator[Result]:
    """Write the session's result however it ends, and end it as failed if anything in it failed."""
    result, start = Result(name, target), time.monotonic()
    _write(result)  # before anything runs, where it could not be written afterwards
    result.file.unlink()
    whole = False
    try:
        yield result
        whole = True
    finally:
        if not whole and not result.counts.get("failed"):
            result.add({"failed": 1})
        failed, passed = result.counts.get("failed", 0), result.counts.get("passed", 0)
        result.outcome = "passed" if whole and passed and not failed else "failed"
        result.seconds = round(time.monotonic() - start, 1)
        _write(result)
    if result.outcome == "failed":
        session.error(f"{failed} failed" if failed else "nothing ran")


def check(
    session: nox.Session, result: Result, *command: str, env: Mapping[str, str] | None = None, quoted: bool = False
) -> None:
    """Run one tool that passes or fails as a whole; the session goes on, so that all faults are seen.

    `quoted`: each line that a failed tool says is a reason for the gate.
    """
    start = time.monotonic()
    session.log(" ".join(command[1:]))
    pipe = subprocess.PIPE if quoted else None
    done = subprocess.run(
        command,
        env=environ(env),
        stdout=pipe,
        stderr=pipe and subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = (done.stdout or "").splitlines()
    sys.stdout.writelines(f"{line}\n" for line in said)
    sys.stdout.flush()
    result.add({"passed" if done.returncode == 0 else "failed": 1})
    result.failures += (said or [" ".join(command[1:])]) if done.returncode else []
    session.log(f"{'ok' if done.returncode == 0 else 'FAILED'} after {time.monotonic() - start:.0f} s")


def pytest(
    session: nox.Session,
    result: Result,
    python: str,
    *paths: str,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    at_once: bool = False,
) -> None:
    """Run pytest and add what it counted. A skipped test is a failed one: collect only what can run.

    `quiet`: what pytest says goes to stderr, where stdout is one line of JSON. `at_once`: files side by side in a few
    processes, which suits all that starts no engine of its own.
    """
    if not paths:
        session.error("no tests found")
    result.arguments = list(session.posargs)
    junit = result.file.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    options = ["--durations=10", "--continue-on-collection-errors", f"--junitxml={junit}"]
    # Hypothesis's own profile: the same examples each time, and slow draws are no fault. The first one reads the source
    # of every module that is not installed, for its constants: in a copy's tree that is all of vLLM.
    options.append("--hypothesis-profile=ci")
    folder = None
    if at_once:
        folder = tempfile.mkdtemp(prefix="xkv-")  # by default a long one, and a socket's path has 107 bytes
        processes = min(os.cpu_count() or 1, PROCESSES_MAX)
        options += [f"--numprocesses={processes}", "--dist=loadfile", f"--basetemp={folder}"]
    command = (python, "-m", "pytest", *options, *paths)
    session.log(" ".join(command[1:]))
    done = subprocess.run(command, env=environ(env), stdout=sys.stderr if quiet else None, check=False)
    if folder and done.returncode == 0:  # else it is left to be looked at
        shutil.rmtree(folder)
    counts = _counted(junit) if junit.is_file() else {}
    result.failures += _failures(junit) if junit.is_file() else []
    if counts.get("skipped"):
        session.warn(f"{counts['skipped']} tests were skipped: that counts as failed")
        counts["failed"] = counts.get("failed", 0) + counts["skipped"]
    if done.returncode != 0 and not counts.get("failed"):
        counts["failed"] = 1
        result.failures.append(f"pytest ended with {done.returncode}, and says of no test that it failed")
    result.add(counts)


def _counted(junit: Path) -> dict[str, int]:
    """Count outcomes in pytest's JUnit file, where an xfail is a kind of skip."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "xfailed": 0}
    for case in ET.parse(junit).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skipped is not None:
            counts["xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def _failures(junit: Path) -> list[str]:
    """Name the tests that failed."""
    cases = ET.parse(junit).getroot().iter("testcase")
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return [f"{case.get('classname')}::{case.get('name')}" for case in bad]


def must_be_there(session: nox.Session, result: Result, *patterns: str) -> list[str]:
    """Give what of these paths exists; a pattern that nothing matches is a failure, not silence."""
    for pattern in patterns:
        if not there(pattern):
            session.warn(f"there is no {pattern}")
            result.add({"failed": 1})
    return there(*patterns)
