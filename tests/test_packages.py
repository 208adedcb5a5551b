"""What `nox -s package` and `nox -s changelog` judge: an archive that lacks a module, or holds a test, must not pass.

Owns: the rules that archives, versions and fragments are held to, tried on archives made by hand, and that this
repository's own packages and fragments keep them. Must not know: how hatchling builds; the session builds for real.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from development import changelog, distributions, installs
from development.places import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MODULES = ("xkv_store", "xkv_compat", "xkv_offload")
FOLDERS = ("store", "compat", "offload")
VERSION = "1.2.3"
METADATA = f"""Metadata-Version: 2.4
Name: {{name}}
Version: {VERSION}
Summary: what it is
License-Expression: Apache-2.0
Requires-Python: >=3.10
Description-Content-Type: text/markdown
{{requires}}
"""


def _wheel(
    folder: Path, module: str, *, without: str = "", more: str = "", requires: str = "", platform: str = "any"
) -> Path:
    info = f"{module}-{VERSION}.dist-info"
    metadata = METADATA.format(name=module.replace("_", "-"), requires=requires)
    files = {
        f"{module}/__init__.py": "",
        f"{module}/py.typed": "",
        f"{info}/METADATA": metadata.replace("\n\n", "\n"),
        f"{info}/RECORD": "",
        f"{info}/WHEEL": "",
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_text(),
        **({more: ""} if more else {}),
    }
    wheel = folder / f"{module}-{VERSION}-py3-none-{platform}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            if name != without:
                archive.writestr(name, text)
    return wheel


def _sdist(folder: Path, module: str, *, more: Sequence[str] = (), link: str = "") -> None:
    top = f"{module}-{VERSION}"
    names = [*distributions.ARCHIVE_TEXTS, f"src/{module}/__init__.py", f"src/{module}/py.typed"]
    with tarfile.open(folder / f"{top}.tar.gz", "w:gz") as archive:
        for name in [*names, *more]:
            member = tarfile.TarInfo(f"{top}/{name}")
            if name == link:
                member.type, member.linkname = tarfile.SYMTYPE, "../../LICENSE"
            archive.addfile(member, io.BytesIO(b""))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of three packages of one version."""
    for folder, module in zip(FOLDERS, MODULES, strict=True):
        source = tmp_path / folder / "src" / module
        source.mkdir(parents=True)
        (source / "__init__.py").write_text(f'__version__ = "{VERSION}"\n')
        (source / "py.typed").write_text("")
        (tmp_path / folder / "pyproject.toml").write_text("")
    (tmp_path / "offload" / "pyproject.toml").write_text(f'dependencies = ["xkv-store=={VERSION}", "numpy>=1"]\n')
    return tmp_path


def _packages(tree: Path) -> tuple[distributions.Package, ...]:
    return distributions.packages(tree, FOLDERS)


def _dist(tree: Path) -> Path:
    dist = tree / "dist"
    dist.mkdir()
    for module in MODULES:
        _wheel(dist, module)
        _sdist(dist, module)
    return dist


def test_whole_archives_have_no_faults(tree: Path) -> None:
    assert list(distributions.faults(_dist(tree), _packages(tree))) == []


@pytest.mark.parametrize(
    ("without", "more", "fault"),
    [
        ("xkv_store/__init__.py", "", "lacks xkv_store/__init__.py"),
        ("xkv_store/py.typed", "", "has no py.typed"),
        (f"xkv_store-{VERSION}.dist-info/licenses/LICENSE", "", "licenses/LICENSE"),
        ("", "tests/test_it.py", "holds tests/test_it.py"),
        ("", "xkv_store/__pycache__/a.pyc", "holds xkv_store/__pycache__/a.pyc"),
        ("", "xkv_matrix/targets.toml", "holds xkv_matrix/targets.toml"),
    ],
)
def test_a_wheel_with_too_little_or_too_much_is_a_fault(tree: Path, without: str, more: str, fault: str) -> None:
    dist = _dist(tree)
    _wheel(dist, "xkv_store", without=without, more=more)
    found = list(distributions.faults(dist, _packages(tree)))
    assert any(fault in line for line in found), found


def _native(tree: Path) -> Path:
    """Archives of packages of which one has a library where there is a compiler."""
    (tree / "store" / "native").mkdir()
    dist = _dist(tree)
    _sdist(dist, "xkv_store", more=distributions.BUILD_PARTS)
    return dist


def test_a_library_is_in_the_wheel_of_a_platform_and_in_no_other(tree: Path) -> None:
    """A wheel for any platform with a library of one would break, silently, on all others."""
    dist, library = _native(tree), f"xkv_store/{distributions.LIBRARY}"
    assert list(distributions.faults(dist, _packages(tree))) == [], "without a compiler"
    _wheel(dist, "xkv_store", more=library)
    assert any(f"holds {library}" in line for line in distributions.faults(dist, _packages(tree)))
    (dist / f"xkv_store-{VERSION}-py3-none-any.whl").unlink()
    _wheel(dist, "xkv_store", platform="linux_x86_64")
    assert any(f"lacks {library}" in line for line in distributions.faults(dist, _packages(tree)))
    _wheel(dist, "xkv_store", platform="linux_x86_64", more=library)
    assert list(distributions.faults(dist, _packages(tree))) == []
    _wheel(dist, "xkv_store")
    assert any("holds xkv_store-" in line for line in distributions.faults(dist, _packages(tree))), "one of both"


def test_a_wheel_of_a_platform_is_a_fault_where_there_is_no_library(tree: Path) -> None:
    dist = _dist(tree)
    (dist / f"xkv_store-{VERSION}-py3-none-any.whl").rename(dist / f"xkv_store-{VERSION}-py3-none-linux_x86_64.whl")
    found = list(distributions.faults(dist, _packages(tree)))
    assert any(line.startswith("dist: lacks xkv_store") for line in found)


@pytest.mark.parametrize(
    ("more", "link", "fault"),
    [(("tests/test_it.py",), "", "holds"), ((), "LICENSE", "is no plain file")],
    ids=["a test", "a link out of the archive"],
)
def test_an_sdist_with_tests_or_links_is_a_fault(tree: Path, more: tuple[str, ...], link: str, fault: str) -> None:
    dist = _dist(tree)
    _sdist(dist, "xkv_compat", more=more, link=link)
    found = list(distributions.faults(dist, _packages(tree)))
    assert len(found) == 1
    assert fault in found[0]


def test_an_archive_that_is_not_there_or_not_ours_is_a_fault(tree: Path) -> None:
    dist = _dist(tree)
    (dist / f"xkv_offload-{VERSION}.tar.gz").rename(dist / "xkv_other-1.tar.gz")
    found = list(distributions.faults(dist, _packages(tree)))
    assert found == [f"dist: lacks xkv_offload-{VERSION}.tar.gz", "dist: holds xkv_other-1.tar.gz"]


def test_another_licence_is_a_fault(tree: Path) -> None:
    dist = _dist(tree)
    wheel = dist / f"xkv_store-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name).replace(b"Apache-2.0", b"MIT") for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    assert list(distributions.faults(dist, _packages(tree))) == [
        f"{wheel.name}: License-Expression is MIT, and not Apache-2.0"
    ]


@pytest.mark.parametrize("text", ['__version__ = "1.2.4"\n', '__version__ = "one"\n', ""])
def test_packages_of_different_versions_are_a_fault(tree: Path, text: str) -> None:
    (tree / "compat" / "src" / "xkv_compat" / "__init__.py").write_text(text)
    assert any("not one version" in line for line in distributions.version_faults(_packages(tree)))


def test_a_pin_of_another_version_is_a_fault(tree: Path) -> None:
    (tree / "offload" / "pyproject.toml").write_text('dependencies = ["xkv-store==1.2.2"]\n')
    (fault,) = distributions.version_faults(_packages(tree))
    assert "xkv-store==1.2.2" in fault


def test_what_is_installed_is_what_the_wheels_declare_less_each_other(tmp_path: Path) -> None:
    store = _wheel(tmp_path, "xkv_store", requires="Requires-Dist: lmdb>=1.5\nRequires-Dist: rich>=13")
    offload = _wheel(tmp_path, "xkv_offload", requires=f"Requires-Dist: xkv-store=={VERSION}\nRequires-Dist: numpy>=1")
    assert installs.requirements([store]) == ["lmdb>=1.5", "rich>=13"]
    assert installs.requirements([store, offload]) == ["lmdb>=1.5", "rich>=13", "numpy>=1"]


# --- this repository's own --------------------------------------------------------------------------------


def test_our_packages_are_of_one_version_and_say_it_once() -> None:
    found = distributions.packages()
    assert [package.module for package in found] == list(MODULES)
    assert list(distributions.version_faults(found)) == []
    for package in found:
        project = (package.folder / "pyproject.toml").read_text()
        assert 'dynamic = ["version"]' in project, "the module says it, and nothing else"
        assert f'path = "src/{package.module}/__init__.py"' in project


def test_a_wheel_has_entry_points_where_its_package_brings_programs_or_commands() -> None:
    assert {one.module for one in distributions.packages() if one.entry_points} == {"xkv_store", "xkv_offload"}


def test_each_package_carries_the_licence() -> None:
    """As a file of its own: a link would lead out of the archive."""
    for folder in PACKAGES:
        licence = ROOT / folder / "LICENSE"
        assert not licence.is_symlink()
        assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_fragments_are_what_the_changelog_is_made_of() -> None:
    assert list(changelog.fragment_faults()) == []
    assert (ROOT / changelog.CHANGELOG).read_text().count("<!-- scriv-insert-here -->") == 1


def test_what_is_no_fragment_is_named(tmp_path: Path) -> None:
    folder = tmp_path / changelog.FRAGMENTS
    folder.mkdir(parents=True)
    for name, text in (("7-good.md", "Good.\n"), ("notes.txt", "x"), ("8-empty.md", " \n"), ("9-h.md", "# Added\n")):
        (folder / name).write_text(text)
    found = [fault.partition(":")[0] for fault in changelog.fragment_faults(tmp_path)]
    assert found == ["8-empty.md", "9-h.md", "notes.txt"]
    assert changelog.unreleased(tmp_path).startswith("Good.")


def test_a_version_is_set_wherever_it_stands(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog, "packages", lambda root: distributions.packages(root, FOLDERS))
    changed = changelog.set_version("1.3.0", tree)
    assert len(changed) == 4
    assert set(distributions.versions(_packages(tree)).values()) == {"1.3.0"}
    assert list(distributions.version_faults(_packages(tree))) == []
    assert "numpy>=1" in (tree / "offload" / "pyproject.toml").read_text()
    assert changelog.set_version("1.3.0", tree) == []


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3; rm", "1.2.3.dev0"])
def test_what_is_no_version_changes_nothing(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        changelog.main([version])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
