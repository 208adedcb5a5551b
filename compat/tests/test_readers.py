"""Both readers on small trees: what each kind of probe takes for present, and that the two agree."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_compat.errors import BadInput, BrokenVLLM
from xkv_compat.probes import Kind, Probe
from xkv_compat.source import SourceReader, Tree

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

_MODULE = "vllm.some"
_TEXT = '''
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from . import other
from .other import Base, Renamed as Alias


if TYPE_CHECKING:
    from vllm.other import OnlyForTypes

T = TypeVar("T")
DECLARED: int
FIRST, SECOND = 1, 2

try:
    import json as either
except ImportError:
    either = None

class Colour(Enum):
    RED = 1
    _private = 2
    def method(self): ...

@dataclass
class Data(Base):
    """Not "text" of a function."""
    own: int = 0
    constant: ClassVar[int] = 1

class Pair(NamedTuple):
    left: int

class Abstract(ABC):
    @abstractmethod
    def must(self): ...
    @property
    @abstractmethod
    def must_too(self): ...

class Filled(Abstract):
    def must(self): ...

class Box(Base, Generic[T]):
    def __init__(self, *args, key=None, **rest):
        super().__init__()
        self.plain = 1
        one, (self.paired, two) = 1, (2, 3)
        self.typed: int = 2
        self.nothing: int
        args.other = 3
    async def later(self, when, /): ...

def function(positional):
    """Says "documented"."""
    positional.manager.touch("written")
    manager.lookup()
    return positional.elsewhere.touched()
'''
_OTHER = """
from dataclasses import dataclass

@dataclass
class Base:
    inherited: int = 0
    def method(self, argument): ...
    def fill(self):
        self.from_base = 1

class Renamed: ...
"""

# Kind, owner, name, expected.
_CASES: tuple[tuple[Kind, str, str, bool], ...] = (
    (Kind.SYMBOL, "", "Box", True),
    (Kind.SYMBOL, "", "function", True),
    (Kind.SYMBOL, "", "SECOND", True),
    (Kind.SYMBOL, "", "Base", True),
    (Kind.SYMBOL, "", "Alias", True),
    (Kind.SYMBOL, "", "other", True),
    (Kind.SYMBOL, "", "either", True),
    (Kind.SYMBOL, "", "Renamed", False),
    (Kind.SYMBOL, "", "OnlyForTypes", False),
    (Kind.SYMBOL, "", "DECLARED", False),
    (Kind.SYMBOL, "", "absent", False),
    (Kind.MEMBER, "Box", "method", True),
    (Kind.MEMBER, "Box", "later", True),
    (Kind.MEMBER, "Box", "plain", False),
    (Kind.MEMBER, "Alias", "method", False),
    (Kind.MEMBER, "Absent", "method", False),
    (Kind.OWN_MEMBER, "Box", "later", True),
    (Kind.OWN_MEMBER, "Box", "method", False),
    (Kind.FIELD, "Data", "own", True),
    (Kind.FIELD, "Data", "inherited", True),
    (Kind.FIELD, "Data", "constant", False),
    (Kind.FIELD, "Data", "absent", False),
    (Kind.FIELD, "Pair", "left", True),
    (Kind.FIELD, "Pair", "right", False),
    (Kind.PARAMETER, "Box.__init__", "key", True),
    (Kind.PARAMETER, "Box.__init__", "rest", True),
    (Kind.PARAMETER, "Box.later", "when", True),
    (Kind.PARAMETER, "Box.method", "argument", True),
    (Kind.PARAMETER, "Box.absent", "argument", False),
    (Kind.PARAMETER, "function", "positional", True),
    (Kind.PARAMETER, "function", "absent", False),
    (Kind.ENUM_MEMBER, "Colour", "RED", True),
    (Kind.ENUM_MEMBER, "Colour", "method", False),
    (Kind.ENUM_MEMBER, "Colour", "BLUE", False),
    (Kind.ABSTRACT, "Abstract", "must", True),
    (Kind.ABSTRACT, "Abstract", "must_too", True),
    (Kind.ABSTRACT, "Filled", "must_too", True),
    (Kind.ABSTRACT, "Filled", "must", False),
    (Kind.SELF_ATTRIBUTE, "Box", "plain", True),
    (Kind.SELF_ATTRIBUTE, "Box", "typed", True),
    (Kind.SELF_ATTRIBUTE, "Box", "paired", True),
    (Kind.SELF_ATTRIBUTE, "Box", "from_base", True),
    (Kind.SELF_ATTRIBUTE, "Box", "nothing", False),
    (Kind.SELF_ATTRIBUTE, "Box", "other", False),
    (Kind.CALL, "manager", "touch", True),
    (Kind.CALL, "manager", "lookup", True),
    (Kind.CALL, "elsewhere", "touch", False),
    (Kind.TEXT, "function", "written", True),
    (Kind.TEXT, "", "written", True),
    (Kind.TEXT, "function", 'Says "documented".', False),
    (Kind.TEXT, "Box", "written", False),
    (Kind.TEXT, "absent", "written", False),
)
_PROBES = tuple(Probe(kind, _MODULE, name, owner) for kind, owner, name, _ in _CASES)

_ASK = """
import json
from pathlib import Path
from xkv_compat.live import LiveReader
from xkv_compat.probes import Kind, Probe
reader = LiveReader()
probes = [Probe(Kind(kind), *rest) for kind, *rest in json.loads({given!r})]
print(json.dumps([reader.found(probe) for probe in probes]))
"""


def _files() -> dict[str, str]:
    return {"some.py": _TEXT, "other.py": _OTHER}


def _given(probes: tuple[Probe, ...]) -> str:
    return json.dumps([[probe.kind.value, probe.module, probe.name, probe.owner] for probe in probes])


@pytest.mark.parametrize(("kind", "owner", "name", "expected"), _CASES)
def test_source_reader(
    make_tree: Callable[[dict[str, str]], Path], kind: Kind, owner: str, name: str, expected: bool
) -> None:
    reader = SourceReader(Tree(make_tree(_files())))
    assert reader.found(Probe(kind, _MODULE, name, owner)) is expected


def test_live_reader_agrees(
    make_tree: Callable[[dict[str, str]], Path], run_live: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_live(make_tree(_files()), _ASK.format(given=_given(_PROBES)))
    assert done.returncode == 0, done.stderr
    assert dict(zip(_PROBES, json.loads(done.stdout), strict=True)) == {
        probe: case[3] for probe, case in zip(_PROBES, _CASES, strict=True)
    }


def test_a_file_that_is_too_deep_for_the_parser_is_a_broken_one(make_tree: Callable[[dict[str, str]], Path]) -> None:
    tree = Tree(make_tree({"deep.py": "x = " + "-" * 200_000 + "1\n"}))
    with pytest.raises(BrokenVLLM, match=r"deep\.py:0"):
        tree.module("vllm.deep")


def test_a_missing_module_is_absent_and_a_broken_one_an_error(
    make_tree: Callable[[dict[str, str]], Path], run_live: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A vLLM that fails to import must not pass for one that lacks a feature."""
    tree = make_tree(
        {
            "needs.py": "import a_library_that_is_not_here\n",
            "raises.py": "raise RuntimeError('no device')\n",
            "package/__init__.py": "import a_library_that_is_not_here\n",
            "package/inner.py": "",
        }
    )
    code = """
from xkv_compat.errors import BrokenVLLM
from xkv_compat.live import import_module
assert import_module("vllm.absent") is None
assert import_module("vllm.absent.deeper") is None
for name in ("vllm.needs", "vllm.raises", "vllm.package.inner"):
    try:
        import_module(name)
    except BrokenVLLM as error:
        print(error)
    else:
        raise AssertionError(name)
"""
    done = run_live(tree, code)
    assert done.returncode == 0, done.stderr
    needs, raises, inner = done.stdout.splitlines()
    assert needs == (
        "vLLM's module vllm.needs is there but broken: "
        "ModuleNotFoundError: No module named 'a_library_that_is_not_here'"
    )
    assert raises.endswith("RuntimeError: no device")
    assert "vllm.package.inner" in inner


def test_a_file_that_does_not_parse_is_named_with_its_line(
    make_tree: Callable[[dict[str, str]], Path],
) -> None:
    tree = make_tree({"some.py": "x = 1\n\ndef broken(:\n"})
    reader = SourceReader(Tree(tree))
    with pytest.raises(BrokenVLLM) as caught:
        reader.found(Probe(Kind.SYMBOL, _MODULE, "x"))
    assert f"{tree / 'vllm' / 'some.py'}:3: " in str(caught.value)


def test_the_package_itself_is_a_tree_too(
    make_tree: Callable[[dict[str, str]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(_files())
    assert Tree(tree / "vllm").package == Tree(tree).package
    monkeypatch.chdir(tree / "vllm")
    assert Tree(Path()).package == Tree(tree).package


def test_what_is_no_tree_is_told_in_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput) as caught:
            Tree(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_cycle_of_imports_ends(make_tree: Callable[[dict[str, str]], Path]) -> None:
    tree = make_tree({"some.py": "from .other import x\n", "other.py": "from .some import x\n"})
    assert not SourceReader(Tree(tree)).found(Probe(Kind.SYMBOL, _MODULE, "x"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = a" + ".b" * 900, "some.py:2: nested more than 100 levels deep"),
        ("if a: pass\n" + "elif a: pass\n" * 900, "nested more than 100 levels deep"),
        ("x = " + "+".join(["1"] * 900), "some.py:1: nested more than 100 levels deep"),
        ("x = " + "(" * 5000 + ")" * 5000, "some.py:"),
    ],
)
def test_what_is_too_deep_to_follow_is_broken_by_its_line(
    make_tree: Callable[[dict[str, str]], Path], text: str, said: str
) -> None:
    tree = Tree(make_tree({"some.py": text}))
    with pytest.raises(BrokenVLLM, match=said):
        tree.module("vllm.some")


def test_what_is_just_not_too_deep_can_be_followed(make_tree: Callable[[dict[str, str]], Path]) -> None:
    """The bound must hold for whoever recurses: names bound in branches, and a text made of what was parsed."""
    branches = "if a: pass\n" + "elif a: pass\n" * 90 + "else: deepest = 1\n"
    reader = SourceReader(Tree(make_tree({"some.py": f"{branches}\ny = {'f(' * 90}{')' * 90}\nz = {'1+' * 90}1\n"})))
    assert reader.found(Probe(Kind.SYMBOL, _MODULE, "deepest"))
    parsed = reader.tree.module(_MODULE)
    assert parsed is not None
    assert "f(f(" in ast.unparse(parsed)


def test_a_file_that_no_person_wrote_is_not_read(make_tree: Callable[[dict[str, str]], Path]) -> None:
    folder = make_tree({"some.py": ""})
    os.truncate(folder / "vllm" / "some.py", 4 << 30)
    with pytest.raises(BrokenVLLM, match="4294967296 bytes; 8388608 are the most that is read"):
        Tree(folder).module(_MODULE)


def test_modules_below_a_folder_are_files(make_tree: Callable[[dict[str, str]], Path]) -> None:
    folder = make_tree({"inner/some.py": "", "inner/deeper/other.py": "", "outer.py": ""})
    inner = folder / "vllm" / "inner"
    (inner / "folder.py").mkdir()
    (inner / "loop.py").symlink_to("loop.py")
    (inner / "dangling.py").symlink_to("nowhere.py")
    (inner / "up").symlink_to("..")
    os.mkfifo(inner / "pipe.py")  # to read it would wait for a writer
    names = ["vllm.inner", "vllm.inner.deeper", "vllm.inner.deeper.other", "vllm.inner.some"]
    assert sorted(name for name, _ in Tree(folder).files("inner")) == names
