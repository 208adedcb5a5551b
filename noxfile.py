"""The one entry of development and CI: every check, each target's stack, the demo, the gate and the benchmarks.

Owns: the sessions, and which of them a bare run has. Must not know: how environments are made and results are
counted (`development/`), a release's number (`matrix/targets.toml` has them), or what any check looks for.
`CONTRIBUTING.md` says how to run it; `python3 dev.py` brings nox itself.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))  # nox may have been started from anywhere
sys.path.insert(1, str(Path(__file__).resolve().parent / "matrix"))

from development import environments
from development.environments import DOCUMENTS_ENV, MATRIX_ENV, Engine, dev, engine_env, of_target, policies
from development.places import GATE, PACKAGES, RESULTS, ROOT, STATE, targets, there, title
from development.results import Result, check, environ, must_be_there, pytest, ready, recorded, sources
from xkv_matrix.outcomes import Outcome, read_outcome
from xkv_matrix.targets import TARGETS_VARIABLE, Target

SOURCES = (*(f"{package}/src" for package in PACKAGES), "matrix/xkv_matrix")
BUILDS = tuple(f"{package}/{part}" for package in PACKAGES for part in ("hatch_build.py", "native"))
# Checked in one mypy run each: conftest.py and test modules of different folders may bear the same name.
TEST_ROOTS = (*(f"{package}/tests" for package in PACKAGES), "matrix/tests")
# Tests that need a release: the backend's, its scheduler and connector driven without a model, and real engines.
BACKEND_TESTS = "packages/xkv-offload/tests"
HARNESS_TESTS = "tests/test_harness_*.py"
CALLS_TEST = "tests/test_harness_calls.py"  # last: it judges what all others have called
ENGINE_TESTS = "tests/test_stack_*.py"
# Those that take long for one thing, at which every release's harness looks.
NEWEST_TESTS = ("tests/test_stack_adaptive.py", "tests/test_stack_eviction.py", "tests/test_stack_serve.py")
SOAK_TESTS = "tests/test_soak.py"  # two minutes, in the session `soak`
IMPORT_TESTS = "tests/test_stack_imports.py"  # the one of them that needs no engine
PORT_TESTS = "tests/test_tp_ports.py"  # the one of the next that needs no engine
RANKS_TESTS = "tests/test_tp_*.py"  # real engines of two ranks, in a session of their own: each start takes long
RUN_S = 40  # of requests, for each release of a run without arguments
COPY = "vllm_renamed_copy"  # a fork's name for the stack; vLLM's own packaging takes what is called vllm…

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"  # environments are shared between sessions, see `development.environments`
nox.options.error_on_external_run = False
nox.options.stop_on_first_error = False

ALL = targets()
SUPPORTED = tuple(target for target in ALL if target.status == "supported")
INSTALLED = tuple(target for target in ALL if target.requirements)
RUNNABLE = tuple(target for target in INSTALLED if target.engine)


def _params(rows: Sequence[Target]) -> list[nox.param]:
    return [nox.param(target, id=target.release) for target in rows]


def _target(session: nox.Session, release: str | None) -> Target:
    found = [target for target in RUNNABLE if release in (None, target.release)]
    if not found:
        session.error(f"no target {release}: there are {', '.join(target.release for target in RUNNABLE)}")
    if not release and not SUPPORTED:
        session.error("there is no supported row; name another one: -- --target RELEASE")
    return found[-1] if release else SUPPORTED[-1]


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    with recorded(session, "lint") as result:
        python = dev(session)
        check(session, result, python, "-m", "ruff", "check", ".")
        check(session, result, python, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over everything that is Python."""
    with recorded(session, "types") as result:
        python = dev(session)
        places = (*SOURCES, *BUILDS, "noxfile.py", "dev.py", "development", "tests", "demo", "bench")
        check(session, result, python, "-m", "mypy", *there(*places))
        for root in there(*TEST_ROOTS):
            paths = [str(ROOT / path) for path in (*there(*SOURCES[:-1], "matrix"), root)]
            check(session, result, python, "-m", "mypy", root, env={"MYPYPATH": ":".join(paths)})


@nox.session
def architecture(session: nox.Session) -> None:
    """Directions of imports, and the rules of the house that no linter knows."""
    with recorded(session, "architecture") as result:
        python = dev(session)
        lint_imports = str(Path(python).with_name("lint-imports"))
        check(session, result, lint_imports, "--no-cache", env=MATRIX_ENV)
        pytest(session, result, python, "tests/test_architecture.py")


@nox.session
def test(session: nox.Session) -> None:
    """Tests of core, compat and matrix, in an environment that holds neither torch nor vLLM."""
    with recorded(session, "test") as result:
        python = dev(session)
        elsewhere = there("tests/test_architecture.py", HARNESS_TESTS, ENGINE_TESTS, RANKS_TESTS, SOAK_TESTS)
        crossing = [path for path in there("tests/test_*.py") if path not in elsewhere]
        own = ("packages/xkv-store/tests", "compat/tests", "matrix/tests")
        paths = session.posargs or [*must_be_there(session, result, *own), *crossing]
        pytest(session, result, python, *paths, env=MATRIX_ENV, at_once=True)


@nox.session
@nox.parametrize("target", _params(ALL))
def contracts(session: nox.Session, target: Target) -> None:
    """Judge the release's wheel by its sources, without importing it."""
    with recorded(session, "contracts", target.release) as result:
        command = (dev(session), "-m", "xkv_matrix", "contracts", target.release)
        check(session, result, *command, env=MATRIX_ENV, quoted=True)


@nox.session
@nox.parametrize("target", _params(INSTALLED))
def stack(session: nox.Session, target: Target) -> None:
    """Tests of the backend, and real engines where they run on a CPU, with the release installed."""
    with recorded(session, "stack", target.release) as result:
        python = of_target(session, target)
        env = engine_env(target.release)
        if session.posargs:
            pytest(session, result, python, *session.posargs, env=env)
            return
        wanted = (BACKEND_TESTS, HARNESS_TESTS, *(() if target.engine else (IMPORT_TESTS, PORT_TESTS)))
        left_out = (CALLS_TEST, *(() if target in SUPPORTED[-1:] else there(*NEWEST_TESTS)))
        paths = [one for one in must_be_there(session, result, *wanted) if one not in left_out]
        with tempfile.TemporaryDirectory(prefix="xkv-") as made:
            env["XKV_CALLS"] = made
            pytest(session, result, python, *paths, env=env, at_once=True)
            last = (CALLS_TEST, *((ENGINE_TESTS,) if target.engine else ()))
            paths = [one for one in must_be_there(session, result, *last) if one not in left_out[1:]]
            pytest(session, result, python, *paths, env=env)


@nox.session
@nox.parametrize("target", _params(RUNNABLE))
def stack_tp(session: nox.Session, target: Target) -> None:
    """Two ranks, with the release installed: real engines, and without a model a gateway for each rank."""
    with recorded(session, "stack_tp", target.release) as result:
        python = of_target(session, target)
        paths = session.posargs or must_be_there(session, result, RANKS_TESTS)
        pytest(session, result, python, *paths, env=engine_env(target.release))


def _test_copy(
    session: nox.Session, result: Result, tree: Path, python: str, env: Mapping[str, str], *what: str
) -> None:
    """Vendor into `tree`, and run the copy's tests over what `python` has, without the originals."""
    tests = tree.with_name("tests")
    command = ("-m", "xkv_matrix", "vendor", "--into", str(tree), "--as", COPY, "--tests", str(tests), *what)
    check(session, result, dev(session), *command, env=MATRIX_ENV)
    alone = environments.over(session, f"over-{tree.parent.name}", python, tree)
    settings = (
        f"--config-file={ROOT / 'pyproject.toml'}",
        f"--override-ini=pythonpath={tests / 'tests'} {ROOT / 'matrix'}",
    )
    pytest(session, result, alone, *settings, str(tests), env=env)
    if not result.counts.get("failed"):  # else it is left to be looked at
        shutil.rmtree(tree.parent)


@nox.session
@nox.parametrize("target", _params(SUPPORTED))
def vendored(session: nox.Session, target: Target) -> None:
    """The whole stack as a copy in the release's own tree, where none of its originals can be imported."""
    folder = STATE / "vendored" / target.release
    with recorded(session, "vendored", target.release) as result:
        shutil.rmtree(folder, ignore_errors=True)
        tree = folder / "tree"
        command = ("-m", "xkv_matrix", "unpack", target.release, "--into", str(tree))
        check(session, result, dev(session), *command, env=MATRIX_ENV)
        _test_copy(session, result, tree, of_target(session, target), engine_env(target.release), "--whole")


@nox.session
def vendored_compat(session: nox.Session) -> None:
    """Tests of a copy of compat alone, where no original can be imported."""
    folder = STATE / "vendored" / "compat"
    with recorded(session, "vendored_compat") as result:
        shutil.rmtree(folder, ignore_errors=True)
        tree = folder / "tree"
        tree.mkdir(parents=True)
        _test_copy(session, result, tree, dev(session), {})


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: serve a prompt, stop, start again, restore it. Options: --json, --target RELEASE."""
    parser = argparse.ArgumentParser(prog="nox -s demo --", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the closing line of JSON alone")
    parser.add_argument("--target", metavar="RELEASE", help="which release (the newest supported)")
    options = parser.parse_args(session.posargs)
    target = _target(session, options.target)
    with recorded(session, "demo", target.release) as result:
        python = of_target(session, target)
        command = [python, "demo/run.py", "--target", target.release, *(["--json"] if options.json else [])]
        done = subprocess.run(command, env=environ(engine_env(target.release)), check=False)
        result.add({"passed" if done.returncode == 0 else "failed": 1})


@nox.session
def faults(session: nox.Session) -> None:
    """Real engines while all beneath them fails: -- --target RELEASE --seconds N --seed S [--canary] [--json].

    Without arguments: a short campaign on every supported release, and a canary on the newest.
    """
    if not session.posargs:
        for target in SUPPORTED:
            with recorded(session, "faults", target.release) as result:
                _run(session, result, target, "campaign", f"--seconds={RUN_S}")
                if target is SUPPORTED[-1]:
                    _run(session, result, target, "campaign", f"--seconds={RUN_S}", "--canary")
        return
    _run_as_asked(session, "faults", "campaign")


@nox.session(default=False)
def engines(session: nox.Session) -> None:
    """Four real engines on one gateway, some killed: -- --target RELEASE --seconds N --seed S [--canary] [--json].

    Without arguments: a short run on the newest supported release, and a canary.
    """
    _run_or_both(session, "engines", RUN_S)


@nox.session
def remote(session: nox.Session) -> None:
    """Two hosts with an engine each, and a real remote; options and what is run without are those of `engines`."""
    site = environments.remote(session)
    if site is not None:
        _run_or_both(session, "remote", 10, XKV_REMOTE_SITE=str(site))
        return
    with recorded(session, "remote", _target(session, None).release) as result:
        pytest(session, result, dev(session), *map(str, ROOT.glob("packages/xkv-store/tests/test_remote*.py")))


def _run_or_both(session: nox.Session, name: str, seconds: int, **env: str) -> None:
    """A run as the session's arguments ask for, else a short one and a canary."""
    if session.posargs:
        _run_as_asked(session, name, name, **env)
        return
    target = _target(session, None)
    with recorded(session, name, target.release) as result:
        for more in ((), ("--canary",)):
            _run(session, result, target, name, f"--seconds={seconds}", *more, **env)


def _run_as_asked(session: nox.Session, name: str, module: str, **env: str) -> None:
    """One run on the release that the session's arguments name, and with the others of them."""
    others = "and, for the run: --seconds N (60) --seed S (0) --canary --json"
    parser = argparse.ArgumentParser(prog=f"nox -s {name} --", allow_abbrev=False, epilog=others)
    parser.add_argument("--target", metavar="RELEASE", help="which release (the newest supported)")
    options, rest = parser.parse_known_args(session.posargs)
    target = _target(session, options.target)
    with recorded(session, name, target.release) as result:
        result.arguments = list(session.posargs)
        _run(session, result, target, module, *rest, **env)


def _run(session: nox.Session, result: Result, target: Target, module: str, *options: str, **env: str) -> None:
    """Run real engines for a while with the release installed; its last line is the outcome's."""
    line = [of_target(session, target), "-m", module, *options]
    paths = os.pathsep.join(str(ROOT / path) for path in ("tests", "matrix"))
    own = environ({**engine_env(target.release), "PYTHONPATH": paths, **env})
    done = subprocess.run(line, env=own, cwd=ROOT, check=False)
    result.add({"passed" if done.returncode == 0 else "failed": 1})


@nox.session(default=False)
def ranks(session: nox.Session) -> None:
    """Many ranks of one engine load the same in any order: -- --ranks 8 --seconds N --seed S [--canary] [--json].

    Without arguments: a short run, one with a broken rule, which must be found, and two engines of which one floods.
    """
    runs = [("ranks", *session.posargs)]
    if not session.posargs:
        runs = [("ranks", "--seconds=40"), ("ranks", "--seconds=10", "--canary"), ("ranks.shares",)]
    with recorded(session, "ranks") as result:
        result.arguments = list(session.posargs)
        python = dev(session)
        env = environ({"PYTHONPATH": str(ROOT / "tests")})
        for run in runs:
            done = subprocess.run([python, "-m", *run], env=env, cwd=ROOT, check=False)
            result.add({"passed" if done.returncode == 0 else "failed": 1})


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """A full card under a flood of puts: -- --puts N --capacity MIB --grace-ms N [--canary FAULT] [--json].

    Without arguments: its tests, among them that planted faults are found, and a run of 100,000 puts.
    """
    with recorded(session, "soak") as result:
        result.arguments = list(session.posargs)
        python = dev(session)
        if not session.posargs:
            pytest(session, result, python, *must_be_there(session, result, SOAK_TESTS))
        run = session.posargs or ("--puts=100000",)
        check(session, result, python, "-m", "soak", *run, env={"PYTHONPATH": str(ROOT / "tests")})


@nox.session(default=False)
def eviction(session: nox.Session) -> None:
    """Replay block-hash traces through policies of a library and ours; figures, not tests: -- --traces DIR [--json]."""
    with recorded(session, "eviction") as result:
        check(session, result, policies(session), "bench/eviction", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Ratios to what the medium, memory and the release itself give, and times: -- [--json] [--quick]; no tests."""
    if shutil.which("fio") is None:
        session.error("fio is missing: apt-get install fio")
    target = _target(session, None)
    with recorded(session, "bench") as result:
        python = dev(session)
        command = (python, "bench/run.py", "--release-python", of_target(session, target), *session.posargs)
        check(session, result, *command, env=engine_env(target.release))


EXPECTED = (
    ("lint", None),
    ("types", None),
    ("architecture", None),
    ("test", None),
    ("vendored_compat", None),
    ("docs", None),
    ("package", None),
    *(("contracts", target.release) for target in ALL),  # some two seconds each once the wheels are there
    *(("stack", target.release) for target in SUPPORTED),
    *(("stack_tp", target.release) for target in SUPPORTED),
    *(("vendored", target.release) for target in SUPPORTED),
    *(("faults", target.release) for target in SUPPORTED),
    *(("demo", target.release) for target in SUPPORTED[-1:]),
    *(("remote", target.release) for target in SUPPORTED[-1:]),
)
BEYOND_CI = (
    *(("stack", target.release) for target in INSTALLED if target.status == "followed"),
    *(("stack_tp", target.release) for target in RUNNABLE if target.status == "followed"),
)


def _nox_name(name: str, target: str | None) -> str:
    """Give what nox calls it: the release of some sessions is an argument of their own."""
    return name if name in ("demo", "faults", "remote") else title(name, target)


def _matrix(session: nox.Session, *command: str) -> int:
    """Run one of the matrix's commands where nox was called; its exit code: 2 is bad input."""
    line = (dev(session), "-m", "xkv_matrix", *command)
    return subprocess.run(line, env=environ(MATRIX_ENV), cwd=session.invoked_from, check=False).returncode


def _end(code: int) -> None:
    """End nox with an exit code; session.error would make every code a 1."""
    if code:
        sys.exit(code)


def _print_results() -> None:
    """Print what each session left on these sources, and count it all."""
    passed, failed, present = 0, 0, sources()
    for name, target in (*EXPECTED, *BEYOND_CI):
        found = read_outcome(Result(name, target, sources=present).file)
        if not isinstance(found, Outcome) or found.sources != present:
            continue
        passed += found.counts.get("passed", 0)
        failed += found.counts.get("failed", 0)
        verdict = "passed" if found.passed else "failed"
        print(f"{title(name, target):24} {verdict:8} {found.seconds:7.1f} s  {found.counts}")
    print(f"{passed} passed, {failed} failed", flush=True)


@nox.session
def gate(session: nox.Session) -> None:
    """Go or no-go, from the results that lie there, and whether the README's table says the same: -- [--json]."""
    with suppress(OSError):
        GATE.unlink()  # whatever keeps the gate from being asked: no older verdict stands
    needed = [f"--need={title(name, target)}" for name, target in EXPECTED]
    verdict = _matrix(session, "gate", f"--results={RESULTS}", f"--sources={sources()}", *needed, *session.posargs)
    if "--json" not in session.posargs:
        _print_results()
    _end(verdict)


@nox.session(default=False)
def everything(session: nox.Session) -> None:
    """A bare run, and the stack, of one rank and of two, of every followed release that can be installed."""
    for name in dict.fromkeys(_nox_name(*row) for row in (*EXPECTED, *BEYOND_CI, ("gate", None))):
        session.notify(name, posargs=())


@nox.session(default=False)
def table(session: nox.Session) -> None:
    """Put the support table, as the gate's last verdicts have it, into the README; `-- --check` only compares."""
    _end(_matrix(session, "table", *(session.posargs or ["--write"])))


@nox.session(default=False)
@nox.parametrize("target", _params(ALL))
def extract(session: nox.Session, target: Target) -> None:
    """Write the release's contract and feature table from its wheel's sources, to be reviewed."""
    _end(_matrix(session, "extract", target.release, *session.posargs))


@nox.session(default=False)
def fork(session: nox.Session) -> None:
    """Judge a fork's checkout by its sources, importing nothing of it: -- --source TREE [--json]."""
    _end(_matrix(session, "fork", *session.posargs))


@nox.session(default=False)
def vendor(session: nox.Session) -> None:
    """Copy compat, or the whole stack, into a fork's tree: -- --into DIR --as PACKAGE [--whole]."""
    _end(_matrix(session, "vendor", *session.posargs))


@nox.session(default=False)
def candidate(session: nox.Session) -> None:
    """Everything on a release that nobody has seen: -- --wheel FILE|--version V [--no-engine] [--json]."""
    quiet = "--json" in session.posargs
    ready()
    STATE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STATE) as fresh:
        line = (dev(session), "-m", "xkv_matrix", "candidate", f"--into={fresh}", *session.posargs)
        env = environ(MATRIX_ENV)
        judged = subprocess.run(
            line, env=env, cwd=session.invoked_from, stdout=sys.stderr if quiet else None, check=False
        )
        if not Path(fresh, "report.json").is_file():
            _end(judged.returncode or 1)
        report = json.loads(Path(fresh, "report.json").read_text())
        release = report["candidate"]
        folder = STATE / f"candidate-{release}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(fresh, folder)
    engine = Engine(report["package"], release, report["sha256"], Path(report["path"]).parent)
    needs = folder / "requirements.in"
    needs.write_text(f"-r {ROOT / 'requirements' / 'engine.in'}\n{needs.read_text()}")
    python = environments.environment(session, f"candidate-{release}", needs, engine)
    env = {**engine_env(release), TARGETS_VARIABLE: str(folder / "targets.toml")}
    parts = {name: Result(f"candidate_{name}", release) for name in ("backend", "harness", "stack")}
    stack_tests = (ENGINE_TESTS, RANKS_TESTS) if report["engine"] else (IMPORT_TESTS,)
    for part, tests in zip(parts.values(), ((BACKEND_TESTS,), (HARNESS_TESTS,), stack_tests), strict=True):
        pytest(session, part, python, *there(*tests), env=env, quiet=quiet)
    failed = sum(part.counts.get("failed", 0) for part in parts.values())
    fits = report["verdict"] == "usable" and not failed
    report["tests"] = {name: {"counts": part.counts, "failures": part.failures} for name, part in parts.items()}
    report["verdict"] = "fits" if fits else "does not fit"
    if quiet:
        print(json.dumps(report), flush=True)
    else:
        for name, part in parts.items():
            print(f"{name}: {part.counts or 'not run'}", *part.failures, sep="\n  ")
        print(f"candidate {release}: {report['verdict']}", flush=True)
    _end(0 if fits else 1)


@nox.session
def package(session: nox.Session) -> None:
    """Wheels and sdists of the three packages into dist/: built twice, judged, installed alone and together."""
    with recorded(session, "package") as result:
        python, dist = dev(session), str(ROOT / "dist")
        check(session, result, python, "-m", "development.distributions", dist, env=MATRIX_ENV, quoted=True)
        if not result.counts.get("failed"):  # else there may be nothing to install
            command = (python, "-m", "development.installs", dist, "--uv", environments.uv(session))
            check(session, result, *command, env=MATRIX_ENV, quoted=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The pages as a site in .xkv/site/, without the network; warnings are errors, links are checked."""
    with recorded(session, "docs") as result:
        command = (environments.documents(session), "-m", "development.site", "--into", str(STATE / "site"))
        check(session, result, *command, env=DOCUMENTS_ENV, quoted=True)


@nox.session(default=False)
def changelog(session: nox.Session) -> None:
    """What the next release's entry will say; `-- VERSION` makes the entry and sets that version everywhere."""
    command = (environments.documents(session), "-m", "development.changelog", *session.posargs)
    _end(subprocess.run(command, env=environ(DOCUMENTS_ENV), cwd=ROOT, check=False).returncode)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Compile the hashed requirement files again (needs the network); `-- --upgrade` takes newer versions."""
    uv = environments.uv(session)
    inputs = [
        ROOT / "requirements" / f"{name}.in" for name in ("tools", "run", "dev", "documents", "policies", "remote")
    ]
    for source in (*inputs, *sorted((ROOT / "matrix" / "requirements").glob("*.in"))):
        compiled = source.with_suffix(".txt")
        session.run(
            *(uv, "pip", "compile", "--quiet", "--config-file", str(ROOT / "requirements" / "lock.toml")),
            *("--universal", "--python-version", "3.10", "--generate-hashes", "--no-header", "--no-annotate"),
            *("--output-file", str(compiled), str(source), *session.posargs),
            env=environments.lock_env(),
        )
        compiled.write_text(without_torch_hashes(compiled.read_text()))


def without_torch_hashes(text: str) -> str:
    """Take torch's hashes out of a compiled file: they would shut out every build but the registry's own."""
    return re.sub(r"(?m)^(torch==\S+)(?: \\\n(?:    --hash=\S+(?: \\)?\n)+)", r"\1\n", text)


nox.options.sessions = [*dict.fromkeys(_nox_name(name, target) for name, target in EXPECTED), "gate"]
