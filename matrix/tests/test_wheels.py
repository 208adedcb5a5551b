"""Wheels: a wrong or broken file must be said in one line and never be judged in a release's name."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from xkv_matrix.findings import MatrixError
from xkv_matrix.wheels import FOLDER_VARIABLE, fetch, unpack, unpack_whole, wheels_folder

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_matrix.targets import Target

_MEMBERS = {
    "vllm/__init__.py": "",
    "vllm/v1/x.py": "x = 1\n",
    "vllm/_C.so": "binary",
    "other/y.py": "",
    "vllm/a/../b.py": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "wheels"))
    return tmp_path / "wheels"


class _Index:
    """Stands for the package index: writes a wheel, and counts how often it was asked."""

    def __init__(self, name: str | None = None) -> None:
        self.asked = 0
        self._name = name

    def __call__(self, target: Target, folder: Path) -> None:
        self.asked += 1
        with zipfile.ZipFile(folder / (self._name or target.wheel), "w") as archive:
            for member, text in _MEMBERS.items():
                archive.writestr(zipfile.ZipInfo(member), text)


def _with_hash(target: Target, tmp_path: Path) -> Target:
    _Index()(target, tmp_path)
    return replace(target, sha256=hashlib.sha256((tmp_path / target.wheel).read_bytes()).hexdigest())


def test_fetched_once_checked_and_unpacked(target: Target, tmp_path: Path, folder: Path) -> None:
    target = _with_hash(target, tmp_path)
    index = _Index()
    wheel = fetch(target, index)
    assert fetch(target, index) == wheel == folder / target.wheel
    assert index.asked == 1
    tree = unpack(wheel, target.sha256)
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*.py")) == ["vllm/__init__.py", "vllm/v1/x.py"]
    marker = tree / "vllm" / "kept"
    marker.touch()
    assert unpack(wheel, target.sha256) == tree
    assert marker.exists(), "unpacked again"


def test_a_tree_that_is_not_whole_is_made_anew(target: Target, tmp_path: Path) -> None:
    target = _with_hash(target, tmp_path)
    wheel = fetch(target, _Index())
    tree = unpack(wheel, target.sha256)
    (tree / "complete").unlink()
    (tree / "vllm" / "v1" / "x.py").unlink()
    assert (unpack(wheel, target.sha256) / "vllm" / "v1" / "x.py").is_file()


def test_a_hash_that_does_not_match(target: Target) -> None:
    with pytest.raises(MatrixError, match=r"its sha256 is [0-9a-f]{64}, the row of 9\.9\.9 says 0{64}"):
        fetch(target, _Index())


def test_another_file_than_asked_for(target: Target, folder: Path) -> None:
    with pytest.raises(MatrixError, match=r"the index gave other\.whl instead"):
        fetch(target, _Index("other.whl"))
    assert list(folder.iterdir()) == []


def test_what_is_no_wheel(tmp_path: Path, target: Target) -> None:
    text = tmp_path / target.wheel
    text.write_text("no archive")
    with pytest.raises(MatrixError, match="not a wheel that can be unpacked"):
        unpack(text, target.sha256)
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("other/x.py", "")
    with pytest.raises(MatrixError, match="there is no vllm in it"):
        unpack(text, target.sha256)


def test_a_whole_wheel_is_a_fork_s_tree(tmp_path: Path, target: Target) -> None:
    _Index()(target, tmp_path)
    unpack_whole(tmp_path / target.wheel, tmp_path / "deep" / "tree")
    assert (tmp_path / "deep" / "tree" / "vllm" / "_C.so").read_text() == "binary"
    assert (tmp_path / "deep" / "tree" / "other" / "y.py").is_file()
    (tmp_path / "x.whl").write_text("no archive")
    with pytest.raises(MatrixError, match="not a wheel that can be unpacked"):
        unpack_whole(tmp_path / "x.whl", tmp_path / "other")


def test_the_folder_of_the_repository_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert wheels_folder().parts[-2:] == (".xkv", "wheels")
    assert (wheels_folder().parents[1] / "matrix" / "targets.toml").is_file()
