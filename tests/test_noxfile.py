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
        own = {(name, target.release) for name in ("contracts", "stack", "vendored")}
        assert own <= set(loaded.EXPECTED)
        assert target.torch in (ROOT / "matrix" / target.requirements).read_text()
    followed = {("stack", target.release) for target in loaded.ALL if target.requirements} - set(loaded.EXPECTED)
    assert followed == set(loaded.BEYOND_CI)
    assert loaded.nox.options.sessions[-1] == "gate"


def test_a_result_says_what_it_ran_on(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate takes no result of other sources; what is made by running them must not count as a change."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    source = tmp_path / "compat" / "src" / "a.py"
    (source.parent / "__pycache__").mkdir(parents=True)
    source.write_text("1")
    first = results.sources()
    (source.parent / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "compat" / ".hidden").write_text("x")
    (tmp_path / "README.md").write_text("x")
    assert results.sources() == first
    source.write_text("2")
    assert results.sources() != first


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


def test_a_malformed_row_ends_nox_with_one_line(tmp_path: Path) -> None:
    rows = tmp_path / "targets.toml"
    rows.write_text('[[target]]\nrelease = "1.2.3"\n')
    script = "import runpy, sys; sys.path[0:0] = sys.argv[2:]; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", script, str(ROOT / "noxfile.py")]
    env = {**os.environ, "XKV_TARGETS": str(rows)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    assert done.returncode == 2
    assert "target 1 (1.2.3): status, package" in done.stderr
    assert done.stderr.count("\n") == 1


def test_failed_tests_are_named_for_the_gate(results: ModuleType, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    cases = '<testcase classname="a" name="b"><failure/></testcase><testcase classname="a" name="c"/>'
    junit.write_text(f"<testsuite>{cases}</testsuite>")
    assert results._failures(junit) == ["a::b"]
