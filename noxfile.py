"""The one entry of development and CI: every check, each target's stack, the demo and the benchmarks.

Owns: the environments (made by uv from hashed files under `.xkv/envs`, shared by the sessions that need the
same one) and the result that each session leaves in `results/`.
Must not know: a release's number (`matrix/targets.toml` has them), or what any check looks for.
`CONTRIBUTING.md` says how to run it; `python3 dev.py` brings nox itself.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import nox

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent
STATE = ROOT / ".xkv"
RESULTS = ROOT / "results"
WHEELS = STATE / "wheels"
TARGETS = ROOT / "matrix" / "targets.toml"
PACKAGES = ("packages/xkv-store", "compat", "packages/xkv-offload")
SOURCES = (*(f"{package}/src" for package in PACKAGES), "matrix/xkv_matrix")
# Checked in one mypy run each: conftest.py and test modules of different folders may bear the same name.
TEST_ROOTS = (*(f"{package}/tests" for package in PACKAGES), "matrix/tests")
# Tests in tests/ that need a release: real engines, and its scheduler and connector driven without a model.
STACK_TESTS = ("tests/test_stack_*.py", "tests/test_harness_*.py")
JUDGED = ("noxfile.py", "pyproject.toml", "packages", "compat", "matrix", "tests", "demo", "bench", "requirements")
MATRIX_ENV = {"PYTHONPATH": str(ROOT / "matrix")}  # the matrix is no package: it runs from the tree
RUN_ID = f"{os.getpid()}-{time.time_ns()}"  # tells this run's results from an earlier run's

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"  # environments are shared between sessions, see `environment`
nox.options.error_on_external_run = False
nox.options.stop_on_first_error = False


# --- targets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The fields of a row of matrix/targets.toml that installing needs; the matrix checks the rest."""

    release: str
    status: str
    package: str
    version: str
    sha256: str
    torch: str
    requirements: str
    engine: bool

    @property
    def order(self) -> tuple[int, ...]:
        """Give the release as numbers, so that 0.9 comes before 0.10."""
        return tuple(int(part) for part in re.findall(r"\d+", self.release))


def _read_targets() -> tuple[Target, ...]:
    rows = tomllib.loads(TARGETS.read_text())["target"] if TARGETS.is_file() else []
    defaults = {**dict.fromkeys(Target.__slots__, ""), "engine": True}
    found = [Target(**{name: row.get(name, default) for name, default in defaults.items()}) for row in rows]
    return tuple(sorted(found, key=lambda target: target.order))


ALL = _read_targets()
SUPPORTED = tuple(target for target in ALL if target.status == "supported")
RUNNABLE = tuple(target for target in ALL if target.engine and target.requirements)


def _params(targets: Sequence[Target]) -> list[nox.param]:
    return [nox.param(target, id=target.release) for target in targets]


def _target(session: nox.Session, release: str | None) -> Target:
    found = [target for target in RUNNABLE if release in (None, target.release)]
    if not found:
        session.error(f"no target {release}: there are {', '.join(target.release for target in RUNNABLE)}")
    return found[-1] if release else SUPPORTED[-1]


# --- environments -----------------------------------------------------------------------------------------


def _uv(session: nox.Session) -> str:
    """Give the pinned uv; dev.py has it already unless nox was started by other means."""
    folder = session.run(sys.executable, str(ROOT / "dev.py"), "--tools", silent=True, stderr=None, log=False)
    return str(Path(str(folder).strip()) / "bin" / "uv")


# What is set for pip holds for uv as well.
PIP_TO_UV = {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
    "PIP_DEFAULT_TIMEOUT": "UV_HTTP_TIMEOUT",
}


def _uv_env() -> dict[str, str | None]:
    env: dict[str, str | None] = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "VIRTUAL_ENV": None}
    for pip_name, uv_name in PIP_TO_UV.items():
        if pip_name in os.environ and uv_name not in os.environ:
            env[uv_name] = ",".join(os.environ[pip_name].split())
    return env


def environment(session: nox.Session, name: str, needs: Path, engine: str = "", ours: Sequence[str] = PACKAGES) -> Path:
    """Give the python of the environment called `name`, making it when what it `needs` has changed.

    `engine` is a hashed requirement line that is installed without its dependencies. Making is guarded by a
    lock that the kernel drops, and an environment is in place only when it is whole.
    """
    seed = [needs.read_bytes(), engine.encode(), sys.version.encode(), str(ROOT).encode()]
    seed += [(ROOT / package / "pyproject.toml").read_bytes() for package in ours]
    folder = STATE / "envs" / f"{name}-{hashlib.sha256(b'|'.join(seed)).hexdigest()[:12]}"
    done = folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_file():
            for stale in folder.parent.glob(f"{name}-*"):
                shutil.rmtree(stale)
            start = time.monotonic()
            session.log(f"making the environment {folder.name}")
            _fill(session, folder, needs, engine, ours)
            done.write_text("")
            session.log(f"made {folder.name} in {time.monotonic() - start:.0f} s")
    return folder / "bin" / "python"


def _fill(session: nox.Session, folder: Path, requirements: Path, engine: str, ours: Sequence[str]) -> None:
    uv, env, python = _uv(session), _uv_env(), str(folder / "bin" / "python")
    install = (uv, "pip", "install", "--quiet", "--no-config", "--python", python)

    def run(*command: str) -> None:
        session.run(*command, env=env, silent=True, log=False)

    run(uv, "venv", "--quiet", "--no-config", "--no-project", "--python", sys.executable, str(folder))
    run(*install, "--requirements", str(requirements))
    if engine:
        lines = folder / "engine.txt"
        lines.write_text(engine + "\n")
        # The matrix may have fetched the wheel already; the hash is the same wherever it comes from.
        here = ("--find-links", str(WHEELS)) if WHEELS.is_dir() else ()
        run(*install, *here, "--no-deps", "--require-hashes", "--requirements", str(lines))
    # Built anew by the pinned hatchling that stands in every requirement file: nothing is fetched here.
    editable = [part for package in ours for part in ("--editable", str(ROOT / package))]
    if editable:
        run(*install, "--no-cache", "--no-deps", "--no-build-isolation", *editable)


def _dev(session: nox.Session) -> str:
    return str(environment(session, "dev", ROOT / "requirements" / "dev.txt"))


def _stack(session: nox.Session, target: Target) -> str:
    engine = f"{target.package}=={target.version} --hash=sha256:{target.sha256}"
    return str(environment(session, target.release, ROOT / "matrix" / target.requirements, engine))


def _stack_env(target: Target) -> dict[str, str]:
    """Give what a process with an engine needs: no network, a fixed hash seed, a cache root of its own."""
    root = STATE / "vllm" / target.release  # vLLM's notes on model classes carry no release in their names
    root.mkdir(parents=True, exist_ok=True)
    return {
        "VLLM_CACHE_ROOT": str(root),
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XKV_TARGET": target.release,
    }


# --- results ----------------------------------------------------------------------------------------------


def _sources() -> str:
    """Give one hash of everything that a session may judge: a result of other sources is none of these."""
    digest = hashlib.sha256()
    for path in sorted(path for place in JUDGED for path in (ROOT / place, *(ROOT / place).rglob("*"))):
        name = path.relative_to(ROOT)
        made = any(part.startswith((".", "__pycache__")) or part.endswith(".egg-info") for part in name.parts)
        if path.is_file() and not made:
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@dataclass(slots=True)
class Result:
    """What one session leaves behind for the summary and for the release gate."""

    name: str
    target: str | None
    run: str = RUN_ID
    outcome: str = "failed"
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)  # pytest's, where only some tests were asked for
    failures: list[str] = field(default_factory=list)  # by name: the gate's reasons
    sources: str = field(default_factory=_sources)

    @property
    def file(self) -> Path:
        """Give where it is written: the session's name, with the target after a dash."""
        return RESULTS / (f"{self.name}-{self.target}.json" if self.target else f"{self.name}.json")

    def add(self, counts: Mapping[str, int]) -> None:
        """Add one tool's counts."""
        for outcome, count in counts.items():
            self.counts[outcome] = self.counts.get(outcome, 0) + count


@contextmanager
def recorded(session: nox.Session, name: str, target: str | None = None) -> Iterator[Result]:
    """Write the session's result however it ends, and end it as failed if anything in it failed."""
    result, start = Result(name, target), time.monotonic()
    RESULTS.mkdir(exist_ok=True)
    result.file.unlink(missing_ok=True)
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
        result.file.write_text(json.dumps(asdict(result), indent=1) + "\n")
    if result.outcome == "failed":
        session.error(f"{failed} failed" if failed else "nothing ran")


def check(session: nox.Session, result: Result, *command: str, env: Mapping[str, str] | None = None) -> None:
    """Run one tool that passes or fails as a whole; the session goes on, so that all faults are seen."""
    start = time.monotonic()
    session.log(" ".join(command[1:]))
    done = subprocess.run(command, env={**os.environ, **(env or {})}, check=False)
    result.add({"passed" if done.returncode == 0 else "failed": 1})
    result.failures += [" ".join(command[1:])] if done.returncode else []
    session.log(f"{'ok' if done.returncode == 0 else 'FAILED'} after {time.monotonic() - start:.0f} s")


def pytest(
    session: nox.Session, result: Result, python: str, *paths: str, env: Mapping[str, str] | None = None
) -> None:
    """Run pytest and add what it counted. A skipped test is a failed one: collect only what can run."""
    if not paths:
        session.error("no tests found")
    result.arguments = list(session.posargs)
    junit = result.file.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    options = ("--durations=10", "--continue-on-collection-errors", f"--junitxml={junit}")
    command = (python, "-m", "pytest", *options, *paths)
    session.log(" ".join(command[1:]))
    done = subprocess.run(command, env={**os.environ, **(env or {})}, check=False)
    counts = _counted(junit) if junit.is_file() else {}
    result.failures += _failures(junit) if junit.is_file() else []
    if counts.get("skipped"):
        session.warn(f"{counts['skipped']} tests were skipped: that counts as failed")
        counts["failed"] = counts.get("failed", 0) + counts["skipped"]
    if done.returncode != 0 and not counts.get("failed"):
        counts["failed"] = 1
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


def _must_be_there(session: nox.Session, result: Result, *patterns: str) -> list[str]:
    """Give what of these paths exists; a pattern that nothing matches is a failure, not silence."""
    for pattern in patterns:
        if not _there(pattern):
            session.warn(f"there is no {pattern}")
            result.add({"failed": 1})
    return _there(*patterns)


def _there(*patterns: str) -> list[str]:
    """Give what of these paths exists, relative to the root; patterns are globs."""
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


# --- sessions ---------------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    with recorded(session, "lint") as result:
        python = _dev(session)
        check(session, result, python, "-m", "ruff", "check", ".")
        check(session, result, python, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over everything that is Python."""
    with recorded(session, "types") as result:
        python = _dev(session)
        sources = (*SOURCES, "noxfile.py", "dev.py", "tests", "demo", "bench")
        check(session, result, python, "-m", "mypy", *_there(*sources))
        for root in _there(*TEST_ROOTS):
            paths = [str(ROOT / path) for path in (*_there(*SOURCES[:-1], "matrix"), root)]
            check(session, result, python, "-m", "mypy", root, env={"MYPYPATH": ":".join(paths)})


@nox.session
def architecture(session: nox.Session) -> None:
    """Directions of imports, and the rules of the house that no linter knows."""
    with recorded(session, "architecture") as result:
        python = _dev(session)
        lint_imports = str(Path(python).with_name("lint-imports"))
        check(session, result, lint_imports, "--no-cache", env=MATRIX_ENV)
        pytest(session, result, python, "tests/test_architecture.py")


@nox.session
def test(session: nox.Session) -> None:
    """Tests of core, compat and matrix, in an environment that holds neither torch nor vLLM."""
    with recorded(session, "test") as result:
        python = _dev(session)
        elsewhere = _there("tests/test_architecture.py", *STACK_TESTS)
        crossing = [path for path in _there("tests/test_*.py") if path not in elsewhere]
        own = ("packages/xkv-store/tests", "compat/tests", "matrix/tests")
        paths = session.posargs or [*_must_be_there(session, result, *own), *crossing]
        pytest(session, result, python, *paths, env=MATRIX_ENV)


@nox.session
@nox.parametrize("target", _params(ALL))
def contracts(session: nox.Session, target: Target) -> None:
    """Judge the release's wheel by its sources, without importing it."""
    with recorded(session, "contracts", target.release) as result:
        python = _dev(session)
        check(
            session,
            result,
            python,
            "-m",
            "xkv_matrix",
            "contracts",
            target.release,
            env={"PYTHONPATH": "matrix"},
        )


@nox.session
@nox.parametrize("target", _params(RUNNABLE))
def stack(session: nox.Session, target: Target) -> None:
    """Tests of the backend and real engines, with the release installed."""
    with recorded(session, "stack", target.release) as result:
        python = _stack(session, target)
        paths = session.posargs or _must_be_there(session, result, "packages/xkv-offload/tests", *STACK_TESTS)
        pytest(session, result, python, *paths, env=_stack_env(target))


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: serve a prompt, stop, start again, restore it. Options: --json, --target RELEASE."""
    parser = argparse.ArgumentParser(prog="nox -s demo --", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    parser.add_argument("--target", metavar="RELEASE", help="which release (the newest supported)")
    options = parser.parse_args(session.posargs)
    target = _target(session, options.target)
    with recorded(session, "demo", target.release) as result:
        python = _stack(session, target)
        command = [python, "demo/run.py", "--target", target.release, *(["--json"] if options.json else [])]
        done = subprocess.run(command, env={**os.environ, **_stack_env(target)}, check=False)
        result.add({"passed" if done.returncode == 0 else "failed": 1})


@nox.session
def bench(session: nox.Session) -> None:
    """Ratios against fio and the lookup's time; figures, not tests."""
    if shutil.which("fio") is None:
        session.error("fio is missing: apt-get install fio")
    with recorded(session, "bench") as result:
        python = _dev(session)
        check(session, result, python, "bench/run.py", *session.posargs)


EXPECTED = (
    ("lint", None),
    ("types", None),
    ("architecture", None),
    ("test", None),
    *(("contracts", target.release) for target in ALL),  # a second each once the wheels are there
    *(("stack", target.release) for target in SUPPORTED),
    *(("demo", target.release) for target in SUPPORTED[-1:]),
    ("bench", None),
)


def _title(name: str, target: str | None) -> str:
    return f"{name}({target})" if target else name


@nox.session
def summary(session: nox.Session) -> None:
    """Count what the sessions of this run left; one that should have run and did not is a failure."""
    passed, failed = 0, 0 if SUPPORTED else 1
    for name, target in EXPECTED:
        file = Result(name, target, sources="").file
        found = json.loads(file.read_text()) if file.is_file() else {}
        title = _title(name, target)
        if found.get("run") != RUN_ID or found["arguments"]:
            print(f"{title:24} did not run, or not all of it")
            failed += 1
            continue
        passed += found["counts"].get("passed", 0)
        failed += found["counts"].get("failed", 0)
        print(f"{title:24} {found['outcome']:8} {found['seconds']:7.1f} s  {found['counts']}")
    print(f"{passed} passed, {failed} failed", flush=True)
    if failed:
        session.error("not everything passed")


def _matrix(session: nox.Session, *command: str) -> None:
    """Run one of the matrix's commands where nox was called, and end nox with its exit code: 2 is bad input."""
    line = (_dev(session), "-m", "xkv_matrix", *command, *session.posargs)
    done = subprocess.run(line, env={**os.environ, **MATRIX_ENV}, cwd=session.invoked_from, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # session.error would make every code a 1


@nox.session(default=False)
def fork(session: nox.Session) -> None:
    """Judge a fork's checkout by its sources, importing nothing of it: -- --source TREE [--json]."""
    _matrix(session, "fork")


@nox.session(default=False)
def gate(session: nox.Session) -> None:
    """Go or no-go, from the results that lie there: -- [--json]. Figures decide nothing."""
    needed = [f"--need={_title(name, target)}" for name, target in EXPECTED if name != "bench"]
    _matrix(session, "gate", "--results", str(RESULTS), "--sources", _sources(), *needed)


@nox.session(default=False)
def vendor(session: nox.Session) -> None:
    """Copy compat, or the whole stack, into a fork's tree: -- --into DIR --as PACKAGE [--whole]."""
    _matrix(session, "vendor")


@nox.session(default=False)
def vendored(session: nox.Session) -> None:
    """Tests of a copy of compat under another name, in an environment that has no original."""
    with recorded(session, "vendored") as result, tempfile.TemporaryDirectory() as folder:
        dev, python = _dev(session), environment(session, "bare", ROOT / "requirements" / "dev.txt", ours=())
        source, tests = Path(folder, "src"), Path(folder, "tests")
        source.mkdir()
        command = ("-m", "xkv_matrix", "vendor", "--into", str(source), "--as", "renamed_copy", "--tests", str(tests))
        check(session, result, dev, *command, env=MATRIX_ENV)
        settings = f"-c={ROOT / 'pyproject.toml'}"
        pytest(session, result, str(python), settings, str(tests), env={"PYTHONPATH": str(source)})


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Compile the hashed requirement files again (needs the network); `-- --upgrade` takes newer versions."""
    uv, env = _uv(session), {**_uv_env(), "UV_FIND_LINKS": None, "PIP_FIND_LINKS": None}
    sources = [ROOT / "requirements" / "tools.in", ROOT / "requirements" / "dev.in"]
    for source in (*sources, *sorted((ROOT / "matrix" / "requirements").glob("*.in"))):
        compiled = source.with_suffix(".txt")
        session.run(
            *(uv, "pip", "compile", "--quiet", "--config-file", str(ROOT / "requirements" / "lock.toml")),
            *("--universal", "--python-version", "3.10", "--generate-hashes", "--no-header", "--no-annotate"),
            *("--output-file", str(compiled), str(source), *session.posargs),
            env=env,
        )
        compiled.write_text(without_torch_hashes(compiled.read_text()))


def without_torch_hashes(text: str) -> str:
    """Take torch's hashes out of a compiled file: they would shut out every build but the registry's own."""
    return re.sub(r"(?m)^(torch==\S+)(?: \\\n(?:    --hash=\S+(?: \\)?\n)+)", r"\1\n", text)


nox.options.sessions = [
    *(f"{name}({target})" if name in ("contracts", "stack") else name for name, target in EXPECTED),
    "summary",
]
