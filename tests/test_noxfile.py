"""What the sessions count and write: a run that is wrongly called a pass would let a broken release through.

Owns: cases for noxfile.py's lists, and for counting and recording in development/. Must not know: engines.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from xkv_matrix.outcomes import Outcome, read_outcome
from xkv_matrix.page import BEGIN, END

ROOT = Path(__file__).resolve().parent.parent

OUTCOMES = """
import pytest

@pytest.fixture
def broken():
    raise OSError

def test_passes(): pass
def test_fails(): assert False
def test_cannot_start(broken): pass
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


class AbortedError(Exception):
    """What the session below ends with."""


class Session:
    """As much of nox's session as the recording needs."""

    def __init__(self) -> None:
        self.posargs: list[str] = []

    def error(self, text: str) -> NoReturn:
        raise AbortedError(text)

    def log(self, text: str) -> None:
        """What nox would print."""


@pytest.fixture(scope="module")
def loaded() -> Iterator[ModuleType]:
    """The noxfile as a module, once: nox keeps the sessions that it registers."""
    spec = importlib.util.spec_from_file_location("noxfile_under_test", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def results(loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of results, writing elsewhere."""
    module: ModuleType = sys.modules["development.results"]
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return module


def _written(results: ModuleType) -> dict[str, object]:
    (file,) = results.RESULTS.glob("*.json")
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_each_outcome_of_pytest_is_counted_as_what_it_is(results: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", "-c", "/dev/null", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=False)
    assert results._counted(junit) == {"passed": 1, "failed": 2, "skipped": 1, "xfailed": 1}


def test_a_session_that_counts_no_failure_has_passed(results: ModuleType) -> None:
    with results.recorded(Session(), "stack", "1.2.3") as result:
        result.add({"passed": 2})
    assert (results.RESULTS / "stack-1.2.3.json").is_file()
    assert _written(results)["outcome"] == "passed"


@pytest.mark.parametrize("counts", [{}, {"passed": 0}, {"passed": 5, "failed": 1}])
def test_nothing_run_or_anything_failed_is_a_failure(results: ModuleType, counts: dict[str, int]) -> None:
    with pytest.raises(AbortedError), results.recorded(Session(), "test") as result:
        result.add(counts)
    assert _written(results)["outcome"] == "failed"


def test_a_session_that_was_broken_off_leaves_a_failure_behind(results: ModuleType) -> None:
    def broken_off() -> None:
        with results.recorded(Session(), "test") as result:
            result.add({"passed": 3})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    written = _written(results)
    assert (written["outcome"], written["counts"]) == ("failed", {"passed": 3, "failed": 1})


def test_only_torch_loses_its_hashes(loaded: ModuleType) -> None:
    line = "    --hash=sha256:00"
    kept = f"torchish==1.0 \\\n{line} \\\n{line}\ntqdm==2 \\\n{line}\n"
    text = f"einops==1 \\\n{line}\ntorch==9.8.7 \\\n{line} \\\n{line}\n{kept}"
    assert loaded.without_torch_hashes(text) == f"einops==1 \\\n{line}\ntorch==9.8.7\n{kept}"


def test_a_bare_run_holds_every_supported_release(loaded: ModuleType) -> None:
    assert {("contracts", target.release) for target in loaded.ALL} <= set(loaded.EXPECTED)
    assert loaded.SUPPORTED
    for target in loaded.SUPPORTED:
        own = {(name, target.release) for name in ("contracts", "stack", "stack_tp", "vendored")}
        assert own <= set(loaded.EXPECTED)
        assert target.torch in (ROOT / "matrix" / target.requirements).read_text()
    installed = [target for target in loaded.ALL if target.requirements]
    stacks = {("stack", target.release) for target in installed}
    stacks |= {("stack_tp", target.release) for target in installed if target.engine}
    assert stacks - set(loaded.EXPECTED) == set(loaded.BEYOND_CI)
    assert loaded.nox.options.sessions[-1] == "gate"


MADE = (
    *(".xkv/x", ".git/x", "compat/src/__pycache__/a.pyc", "compat/.hidden", "compat/x.egg-info/PKG-INFO", "results/x"),
    "packages/xkv-store/src/xkv_store/libxkv.so.2",
    *("gate.json", "uv.lock", "dist/x.tar", "x-1.whl", "my-venv/pyvenv.cfg", "my-venv/lib/x.py", "compat/src/b.pyc"),
)
SOURCES = (
    *("compat/src/a.py", "dev.py", "noxfile.py", "docs/format.md", "docs/adr/1.md", "README.md", "CONTRIBUTING.md"),
    *(".ci/run", "LICENSE", "matrix/targets.toml", "requirements/x.txt", "tests/results", "development/results.py"),
)


def _put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_result_says_what_it_ran_on(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate takes no result of other sources; what is made by running them must not count as a change."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    for name in SOURCES:
        _put(tmp_path, name, "1")
    seen = {results.sources()}
    for name in MADE:
        _put(tmp_path, name, "x")
    (tmp_path / "loop").symlink_to("loop")
    assert {results.sources()} == seen
    for name in SOURCES:
        _put(tmp_path, name, "2")
        assert results.sources() not in seen, name
        seen.add(results.sources())


def test_the_page_s_table_is_the_gate_s_to_compare(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or writing it, after a run that only lacked it, would make all of that run's results stale."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    _put(tmp_path, "README.md", f"a\n{BEGIN}\nold\n{END}\nb\n")
    first = results.sources()
    _put(tmp_path, "README.md", f"a\n{BEGIN}\nnew\n{END}\nb\n")
    assert results.sources() == first
    _put(tmp_path, "README.md", f"a\n{BEGIN}\nnew\n{END}\nc\n")
    assert results.sources() != first


def test_what_is_set_elsewhere_takes_no_test_away(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(): pass\n\ndef test_two(): assert False\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k one")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("XKV_TARGETS", "elsewhere.toml")
    results.RESULTS.mkdir()
    result = results.Result("test", None)
    results.pytest(Session(), result, sys.executable, "-c", "/dev/null", str(tmp_path))
    assert (result.counts["passed"], result.counts["failed"]) == (1, 1)
    assert result.failures == ["test_it::test_two"]
    assert "XKV_TARGETS" not in results.environ()
    assert results.environ({"XKV_TARGETS": "a candidate's"})["XKV_TARGETS"] == "a candidate's"


def test_results_are_written_whole_or_end_nox_with_one_line(
    results: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with results.recorded(Session(), "lint") as result:
        assert not result.file.exists(), "nothing of an older run, and nothing of this one"
        result.add({"passed": 1})
    assert [path.name for path in results.RESULTS.iterdir()] == ["lint.json"]
    outcome = read_outcome(result.file)
    assert isinstance(outcome, Outcome)
    assert (outcome.passed, outcome.counts, outcome.sources) == (True, {"passed": 1}, result.sources)
    result.file.unlink()
    results.RESULTS.rmdir()
    results.RESULTS.write_text("")
    with pytest.raises(SystemExit) as ended, results.recorded(Session(), "lint"):
        raise AssertionError("it has begun")
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "failures"),
    [("print('finding')\nraise SystemExit('error: a line')", ["finding", "error: a line"]), ("print('fits')", [])],
)
def test_what_a_failed_check_says_is_a_reason(
    results: ModuleType, capfd: pytest.CaptureFixture[str], script: str, failures: list[str]
) -> None:
    result = results.Result("contracts", "1.2.3")
    results.check(Session(), result, sys.executable, "-c", script, quoted=True)
    assert result.failures == failures
    assert result.counts == {"failed" if failures else "passed": 1}
    assert capfd.readouterr().out.splitlines() == (failures or ["fits"])


def test_a_pytest_that_ends_by_itself_is_a_failure_with_a_reason(results: ModuleType, tmp_path: Path) -> None:
    """As it does where a test's time is over."""
    (tmp_path / "test_it.py").write_text("import os\n\ndef test_it(): os._exit(7)\n")
    results.RESULTS.mkdir()
    result = results.Result("stack", "1.2.3")
    results.pytest(Session(), result, sys.executable, "-c", "/dev/null", str(tmp_path))
    assert result.counts == {"failed": 1}
    assert result.failures == ["pytest ended with 7, and says of no test that it failed"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[target]]\nrelease = "1.2.3"\n', "target 1 (1.2.3): status, package"),
        ("a = " + "[" * 9000, "nested too deeply"),
    ],
)
def test_a_malformed_row_ends_nox_with_one_line(tmp_path: Path, text: str, said: str) -> None:
    rows = tmp_path / "targets.toml"
    rows.write_text(text)
    (tmp_path / "gate.json").write_text("go")
    script = (
        "import pathlib, runpy, sys; sys.path[0:0] = sys.argv[3:]; from development import places; "
        "places.ROWS = pathlib.Path(sys.argv[2]); places.GATE = places.ROWS.with_name('gate.json'); "
        "runpy.run_path(sys.argv[1])"
    )
    folders = (str(ROOT), str(ROOT / "matrix"))
    command = [sys.executable, "-c", script, str(ROOT / "noxfile.py"), str(rows), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "gate.json").exists(), "an older verdict, of rows that nobody can read"


def test_a_variable_that_is_left_over_changes_no_row(
    loaded: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XKV_TARGETS", "elsewhere.toml")
    assert loaded.targets() == loaded.ALL
    assert capsys.readouterr().err == "XKV_TARGETS is set; sessions go by the committed rows\n"


def test_no_supported_row_ends_the_demo_with_a_line(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "SUPPORTED", ())
    with pytest.raises(AbortedError, match="no supported row"):
        loaded._target(Session(), None)
    assert loaded._target(Session(), loaded.RUNNABLE[0].release) == loaded.RUNNABLE[0]


def test_the_gate_s_two_forms_are_one_judgement(
    loaded: ModuleType,
    results: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And no damaged result keeps the counts from being printed, nor an older verdict from being removed."""
    asked: list[tuple[str, ...]] = []

    def matrix(_session: object, *command: str) -> int:
        asked.append(command)
        return 1

    results.RESULTS.mkdir()
    verdict = tmp_path / "gate.json"
    for name, value in (("_matrix", matrix), ("GATE", verdict), ("RESULTS", results.RESULTS)):
        monkeypatch.setattr(loaded, name, value)
    (results.RESULTS / "lint.json").write_text("[")
    (results.RESULTS / "types.json").write_text(json.dumps({"counts": 5}))
    with results.recorded(Session(), "test") as result:
        result.add({"passed": 3})
    for arguments in ([], ["--json"]):
        verdict.write_text("go")
        session = Session()
        session.posargs = arguments
        with pytest.raises(SystemExit) as ended:
            loaded.gate.func(session)
        assert ended.value.code == 1
        assert not verdict.exists()
        said = capsys.readouterr().out.splitlines()
        assert said[-1:] == ([] if arguments else ["3 passed, 0 failed"])
    assert asked[0] == asked[1][:-1]


def test_what_a_session_is_given_is_named_from_where_the_caller_is(tmp_path: Path) -> None:
    """dev.py is called by its path from a fork's checkout: `--source .` is that checkout."""
    script = (
        f"import sys; sys.argv[0] = 'x'; sys.path.insert(0, {str(ROOT)!r}); import dev, pathlib, runpy\n"
        "dev.tools = pathlib.Path\n"
        "import os\ndef nox(*_, **__):\n"
        "    print(pathlib.Path.cwd(), *sys.argv[1:], *[x for x in os.environ if 'NOX' in x], sep='\\n')\n"
        "runpy.run_module = nox; dev.main()\n"
    )
    command = [sys.executable, "-c", script, "-s", "fork"]
    env = {**os.environ, "NOXSESSION": "lint", "NOXPYTHON": "3.9"}  # left over: they choose other sessions
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60, env=env)
    assert done.stdout.splitlines() == [str(tmp_path), "--noxfile", str(ROOT / "noxfile.py"), "-s", "fork"]


def test_every_row_can_be_extracted_and_no_bare_run_does_it(loaded: ModuleType) -> None:
    assert [param.id for param in loaded.extract.parametrize] == [target.release for target in loaded.ALL]
    assert not [name for name in loaded.nox.options.sessions if name.startswith(("extract", "table"))]


def test_failed_tests_are_named_for_the_gate(results: ModuleType, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    cases = '<testcase classname="a" name="b"><failure/></testcase><testcase classname="a" name="c"/>'
    junit.write_text(f"<testsuite>{cases}</testsuite>")
    assert results._failures(junit) == ["a::b"]
