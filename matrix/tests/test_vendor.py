"""Vendored copies: one that still needs an original, or that nobody can trace, is of no use to a fork."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from xkv_matrix.__main__ import main
from xkv_matrix.findings import EXIT_BAD_INPUT, EXIT_OK, MatrixError
from xkv_matrix.vendor import PROVENANCE, Sources, dotted, vendor, vendor_tests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FILES = {
    "LICENSE": "licence\n",
    "compat/src/xkv_compat/__init__.py": "from .inner import x\n",
    "compat/src/xkv_compat/inner.py": "x = 1\n",
    "compat/src/xkv_compat/py.typed": "",
    "compat/src/xkv_compat/notes.txt": "not for the copy\n",
    "compat/tests/test_x.py": "import xkv_compat.inner\n",
    "packages/xkv-store/src/xkv_store/__init__.py": "",
    "packages/xkv-store/src/xkv_store/deep/__init__.py": "from xkv_compat import x\n",
    "packages/xkv-store/src/xkv_store/deep/er.py": (
        "é = 1; from xkv_store.deep import (  # long\n    x,\n)\n\n"
        "def f():\n    from xkv_compat.inner import x as y\n    return y\n"
    ),
    "packages/xkv-offload/src/xkv_offload/__init__.py": (
        '"""from xkv_store import nothing"""\nfrom xkv_store import deep\n'
    ),
}
_IMPORT_ALL = """
import importlib, pkgutil, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"xkv_store", "xkv_compat", "xkv_offload", "vllm"}:
            raise ModuleNotFoundError("an original was asked for: " + name, name=name)
sys.meta_path.insert(0, Gone())
sys.path.insert(0, sys.argv[1])
package = importlib.import_module("third")
found = [module.name for module in pkgutil.walk_packages(package.__path__, "third.")]
for name in found:
    if name not in sys.argv[2:] and not name.endswith("__main__"):
        importlib.import_module(name)
print(len(found))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in _FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Sources(tmp_path / "root")


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "fork").mkdir()
    return tmp_path / "fork"


def _imported(into: Path, *but: str, isolated: str = "-I") -> int:
    command = [sys.executable, isolated, "-B", "-c", _IMPORT_ALL, str(into), *but]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_compat_alone(sources: Sources, into: Path) -> None:
    place = vendor(into, "third", sources=sources)
    names = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    assert names == {"__init__.py", "inner.py", "py.typed", "LICENSE", PROVENANCE}
    facts = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
    assert (facts["project"], facts["licence"], facts["package"], facts["whole"]) == (
        "xkv",
        "Apache-2.0",
        "third",
        False,
    )
    assert (facts["commit"], facts["changed_since_commit"]) == ("unknown", None)  # no git there
    assert facts["files"]["inner.py"] == {
        "from": "compat/src/xkv_compat/inner.py",
        "sha256": hashlib.sha256(b"x = 1\n").hexdigest(),
    }


def test_the_whole_stack_imports_itself_relatively(sources: Sources, into: Path) -> None:
    place = vendor(into, "third", whole=True, sources=sources)
    deeper = (place / "xkv_store" / "deep" / "er.py").read_text(encoding="utf-8")
    assert deeper.splitlines()[0] == "é = 1; from ...xkv_store.deep import (  # long"
    assert "    from ...xkv_compat.inner import x as y\n" in deeper
    assert "from ...xkv_compat import x\n" in (place / "xkv_store" / "deep" / "__init__.py").read_text(encoding="utf-8")
    offload = (place / "xkv_offload" / "__init__.py").read_text(encoding="utf-8")
    assert offload == '"""from xkv_store import nothing"""\nfrom ..xkv_store import deep\n'
    assert _imported(into, isolated="-IS") == 6


@pytest.mark.parametrize("text", ["import xkv_compat.inner\n", "from  xkv_compat import x\n"])
def test_an_import_that_cannot_be_made_relative(sources: Sources, into: Path, text: str) -> None:
    (sources.root / "packages/xkv-store/src/xkv_store/odd.py").write_text(text, encoding="utf-8")
    with pytest.raises(MatrixError, match=r"odd\.py:1: "):
        vendor(into, "third", whole=True, sources=sources)
    assert list(into.iterdir()) == []


def test_our_own_compat_needs_nothing_but_the_standard_library(into: Path) -> None:
    place = vendor(into, "third")
    assert _imported(into, isolated="-IS") == len(list(place.glob("*.py"))) - 1
    facts = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
    assert all((Sources().root / file["from"]).is_file() for file in facts["files"].values())


@pytest.mark.slow
def test_our_own_stack_needs_none_of_its_originals(into: Path) -> None:
    place = vendor(into, "third", whole=True)
    needs_vllm = ("spec", "connector")
    needs_torch = ("copy_triton", "cuda", "device_setup")
    assert _imported(into, *(f"third.xkv_offload.{name}" for name in needs_vllm + needs_torch)) > 50
    for path in place.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.lstrip().startswith(("from xkv_", "import xkv_")), path


def test_a_copy_is_replaced_unless_somebody_edited_it(sources: Sources, into: Path) -> None:
    place = vendor(into, "third", whole=True, sources=sources)
    (place / "__pycache__").mkdir()
    (place / "__pycache__" / "__init__.cpython-311.opt-1.pyc").touch()
    assert vendor(into, "third", sources=sources) == place
    assert not (place / "xkv_store").exists(), "what the older copy had more is gone"
    (place / "inner.py").write_text("x = 2\n", encoding="utf-8")
    with pytest.raises(MatrixError, match=r"inner\.py was changed or added"):
        vendor(into, "third", sources=sources)
    (place / PROVENANCE).unlink()
    with pytest.raises(MatrixError, match="is there and is no copy of ours"):
        vendor(into, "third", sources=sources)
    assert (place / "inner.py").read_text(encoding="utf-8") == "x = 2\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not-a-name", "one Python identifier"),
        ("class", "identifier"),
        ("xkv_store", "original's name"),
        *((name, "standard library") for name in ("json", "sys", "_thread", "typing", "test", "vllm")),
        *((name, "meaning of its own") for name in ("__init__", "__main__", "__pycache__")),
        ("ﬁx", "reads this name as 'fix'"),
    ],
)
def test_a_name_that_is_none(sources: Sources, into: Path, name: str, said: str) -> None:
    with pytest.raises(MatrixError, match=said):
        vendor(into, name, sources=sources)


_GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false", "-C")


def _commit_all(folder: Path) -> str:
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        subprocess.run((*_GIT, str(folder), *command), check=True, capture_output=True)
    done = subprocess.run((*_GIT, str(folder), "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _facts(place: Path) -> tuple[str, bool | None]:
    facts = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
    return facts["commit"], facts["changed_since_commit"]


def test_a_copy_names_its_own_commit(sources: Sources, into: Path) -> None:
    commit = _commit_all(sources.root)
    assert _facts(vendor(into, "third", sources=sources)) == (commit, False)
    (sources.root / "compat/src/xkv_compat/inner.py").write_text("x = 3\n", encoding="utf-8")
    assert _facts(vendor(into, "third", sources=sources)) == (commit, True)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_copy_of_an_export_does_not_name_the_commit_of_what_is_around_it(
    sources: Sources, into: Path, tracked: bool
) -> None:
    around = sources.root.parent
    if not tracked:
        (around / ".gitignore").write_text("root\n", encoding="utf-8")
    (around / "x").touch()
    _commit_all(around)
    assert _facts(vendor(into, "third", sources=sources)) == ("unknown", None)


def test_an_export_at_the_top_of_another_repository(sources: Sources, into: Path) -> None:
    (sources.root / ".gitignore").write_text("compat\nLICENSE\n", encoding="utf-8")
    _commit_all(sources.root)
    assert _facts(vendor(into, "third", sources=sources)) == ("unknown", None)


def _add(name: str) -> Callable[[Path], object]:
    def change(place: Path) -> None:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("precious", encoding="utf-8")

    return change


@pytest.mark.parametrize(
    "change",
    [
        _add("inner.py"),
        _add("more.py"),
        _add("__pycache__/mine.txt"),
        _add("__pycache__/mine.pyc"),
        _add("deep/x"),
        lambda place: (place / "link").symlink_to("/nowhere"),
        lambda place: (place / "LICENSE").unlink(),
        lambda place: [(place / "inner.py").unlink(), (place / "inner.py").symlink_to("LICENSE")],
        lambda place: [(place / "inner.py").unlink(), (place / "inner.py").mkdir()],
    ],
)
def test_an_edited_copy_is_kept_as_it_is(sources: Sources, into: Path, change: Callable[[Path], object]) -> None:
    place = vendor(into, "third", sources=sources)
    change(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(MatrixError, match="since it was copied"):
        vendor(into, "third", sources=sources)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        "[" * 100_000,
        '{"files": {}}',
        '{"format": 1, "project": "xkv", "files": {}}',
        '{"format": 1, "project": "xkv", "files": {"a": {"sha256": 1}}}',
        '{"format": 1, "project": "another", "files": {"LICENSE": {"sha256": "1"}}}',
    ],
)
def test_what_is_not_ours_is_not_replaced(sources: Sources, into: Path, text: str) -> None:
    (into / "third").mkdir()
    (into / "third" / PROVENANCE).write_text(text, encoding="utf-8")
    with pytest.raises(MatrixError, match="is no copy of ours"):
        vendor(into, "third", sources=sources)
    assert (into / "third" / PROVENANCE).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("target", ["/nowhere", "third", "."])
def test_a_link_is_not_replaced(sources: Sources, into: Path, target: str) -> None:
    (into / "third").symlink_to(target)
    with pytest.raises(MatrixError, match="is no copy of ours"):
        vendor(into, "third", sources=sources)
    assert (into / "third").is_symlink()


def test_tests_overwrite_nothing_that_is_not_ours(sources: Sources, into: Path, tmp_path: Path) -> None:
    original = sources.root / "compat/tests/test_x.py"
    with pytest.raises(MatrixError, match=r"test_x\.py is there and is no copy of ours"):
        vendor_tests(sources.root, "third", sources=sources)
    assert original.read_text(encoding="utf-8") == _FILES["compat/tests/test_x.py"]
    place = vendor_tests(tmp_path / "tests", "third", sources=sources)
    vendor_tests(place, "fourth", sources=sources)
    copy = place / "compat/tests/test_x.py"
    assert copy.read_text(encoding="utf-8") == "import fourth.inner\n"
    copy.write_text("import fifth\n", encoding="utf-8")
    with pytest.raises(MatrixError, match="was changed since"):
        vendor_tests(place, "third", sources=sources)
    package = vendor(into, "third", sources=sources)
    with pytest.raises(MatrixError, match="none of our tests'"):
        vendor_tests(package, "third", sources=sources)


def test_tests_speak_of_the_copy(sources: Sources, tmp_path: Path) -> None:
    vendor_tests(tmp_path / "tests", "third", sources=sources)
    copied = tmp_path / "tests" / "compat" / "tests" / "test_x.py"
    assert copied.read_text(encoding="utf-8") == "import third.inner\n"


def test_the_whole_stack_s_tests_speak_of_the_copy(sources: Sources, tmp_path: Path) -> None:
    """Of all three rooms, of nothing else, and with what they compare with beside them."""
    texts = {
        "packages/xkv-offload/tests/test_y.py": (
            'from xkv_store.deep import er\nNAME = "xkv_offload.y"\nimport xkv_matrix\n'
        ),
        "tests/stand/z.py": "import xkv_compat\nf'xkv_{1}'\n",
        "docs/configuration.md": "xkv_offload\n",
    }
    for name, text in {**texts, "tests/vendored/test_c.py": ""}.items():
        (sources.root / name).parent.mkdir(parents=True, exist_ok=True)
        (sources.root / name).write_text(text, encoding="utf-8")
    into = vendor_tests(tmp_path / "tests", "vllm.third", whole=True, sources=sources)
    first, second, page = ((into / name).read_text(encoding="utf-8") for name in texts)
    assert first.splitlines() == [
        "from vllm.third.xkv_store.deep import er",
        'NAME = "vllm.third.xkv_offload.y"',
        "import xkv_matrix",
    ]
    assert second == "import vllm.third.xkv_compat\nf'xkv_{1}'\n"
    assert page == texts["docs/configuration.md"]
    assert (into / "tests" / "vendored" / "test_c.py").is_file()


def test_a_copy_below_other_packages_bears_their_names(tmp_path: Path) -> None:
    place = tmp_path / "src" / "vllm" / "v1" / "third"
    place.mkdir(parents=True)
    for folder in (place, *place.parents[:2]):
        (folder / "__init__.py").touch()
    assert dotted(place) == "vllm.v1.third"


def test_command_line(into: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vendor", "--into", str(tmp_path / "absent"), "--as", "third"]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.endswith("absent: no such folder\n")
    assert main(["vendor", "--into", str(into), "--as", "third", "--tests", str(Sources().root)]) == EXIT_BAD_INPUT
    assert list(into.iterdir()) == []
    for folder, name in (("/proc", "third"), (str(into), "a" * 300)):
        capsys.readouterr()
        assert main(["vendor", "--into", folder, "--as", name]) == EXIT_BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1
    capsys.readouterr()
    command = ["vendor", "--json", "--into", str(into), "--as", "third", "--tests", str(tmp_path / "tests")]
    assert main(command) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["written"] == [str(into / "third"), str(tmp_path / "tests")]
