"""The rules of the house that neither ruff, mypy nor import-linter can express.

Owns: what DESIGN and STYLE ask of every module (what it opens with, its length, its names, where guessing is
allowed), what importing a package may do, and that docs/format.md and `xkv_store.layout` say the same.
Must not know: what any module does.
"""

import ast
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from development.installs import NEED_TORCH, NEED_VLLM
from xkv_store import geometry, layout

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "packages" / "xkv-store" / "src"
OFFLOAD = ROOT / "packages" / "xkv-offload" / "src"
COMPAT = ROOT / "compat" / "src"
MATRIX = ROOT / "matrix" / "xkv_matrix"
ENTRIES = (ROOT / "noxfile.py", ROOT / "dev.py", ROOT / "development")

DOCSTRING_LINES_MAX = 8  # what a module owns and must not know is read at a glance, or not at all
MODULE_LINES_MAX = 520  # "about 500": more than that is two modules


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file and its tree."""

    path: Path
    tree: ast.Module
    lines: int

    def at(self, node: ast.stmt | ast.expr | ast.arg | ast.excepthandler) -> str:
        """Say where a node stands."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@cache
def _module(path: Path) -> Module:
    text = path.read_text()
    return Module(path, ast.parse(text, str(path)), text.count("\n"))


def _modules(*places: Path) -> list[Module]:
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
    return [_module(file) for file in sorted(files)]


def _test_modules() -> list[Module]:
    folders = [STORE.parent, OFFLOAD.parent, COMPAT.parent, ROOT / "matrix", ROOT]
    return _modules(*(folder / "tests" for folder in folders if (folder / "tests").is_dir()))


def _product() -> list[Module]:
    return _modules(STORE, OFFLOAD, COMPAT)


def _imports(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Give the absolute names that a module imports, wherever in it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module, node


# --- what a module looks like -----------------------------------------------------------------------------


def test_every_module_says_what_it_owns_and_what_it_must_not_know() -> None:
    wrong = []
    for module in (*_product(), *_modules(MATRIX, *ENTRIES)):
        opening = "\n".join((ast.get_docstring(module.tree) or "").splitlines()[:DOCSTRING_LINES_MAX])
        defines = any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in module.tree.body)
        marker = module.path.name in ("__init__.py", "__main__.py") and not defines
        if not opening or (not marker and not re.search(r"\bown", opening, re.IGNORECASE)):
            wrong.append(f"{module.path.relative_to(ROOT)}: what does it own?")
        elif not marker and not re.search(r"\bnot\b", opening):
            wrong.append(f"{module.path.relative_to(ROOT)}: what must it not know?")
    assert wrong == []


def test_every_test_module_says_what_it_is_about() -> None:
    modules = [module for module in _test_modules() if module.lines]
    missing = [module.path for module in modules if not ast.get_docstring(module.tree)]
    assert missing == []


def test_modules_are_short_and_named_for_what_they_hold() -> None:
    modules = (*_product(), *_modules(MATRIX, *ENTRIES))
    assert [(m.path.name, m.lines) for m in modules if m.lines > MODULE_LINES_MAX] == []
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [m.path for m in (*modules, *_test_modules()) if m.path.stem in vague] == []


# --- guessing and versions --------------------------------------------------------------------------------


def _is_call(node: ast.AST, name: str, arguments_min: int) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and len(node.args) >= arguments_min
    )


def _caught(handler: ast.ExceptHandler) -> set[str]:
    nodes = ast.walk(handler.type) if handler.type else ()
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def test_nothing_outside_compat_guesses_what_is_there() -> None:
    wrong = []
    for module in _modules(STORE, OFFLOAD):
        for node in ast.walk(module.tree):
            if _is_call(node, "hasattr", 1) or _is_call(node, "getattr", 3):
                assert isinstance(node, ast.Call)
                wrong.append(module.at(node))
            if isinstance(node, ast.ExceptHandler) and _caught(node) & {"ImportError", "ModuleNotFoundError"}:
                wrong.append(module.at(node))
        wrong += [module.at(at) for name, at in _imports(module) if name == "inspect"]
    assert wrong == []


RELEASE = re.compile(r"(?<![\d.])0\.(2[4-9]|3\d)(\.\d+)?(?![\d.])")
# A probe's `since` is free text for people, and compat's tests of the table read it.
FOR_PEOPLE = (COMPAT / "xkv_compat" / "probes.py",)


def _string_constants(module: Module) -> Iterator[ast.Constant]:
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def test_no_release_of_vllm_is_named_outside_the_matrix_data() -> None:
    wrong = [
        f"{module.at(node)}: {node.value!r}"
        for module in (*_product(), *_modules(MATRIX, *ENTRIES), *_modules(ROOT / "demo", ROOT / "bench"))
        if module.path not in FOR_PEOPLE
        for node in _string_constants(module)
        if RELEASE.search(str(node.value))
    ]
    assert wrong == []


def test_no_version_is_compared_in_the_product() -> None:
    wrong = [
        module.at(at)
        for module in _product()
        for name, at in _imports(module)
        if name.split(".")[0] in ("packaging", "pkg_resources")
        or (name == "importlib.metadata" and not _looks_for_commands(module, at))
    ]
    assert wrong == []


def _looks_for_commands(module: Module, at: ast.stmt) -> bool:
    """Which packages bring commands of `xkv` (ADR 0012) is asked in one place, and nothing else of metadata there."""
    names = [alias.name for alias in at.names] if isinstance(at, ast.ImportFrom) else []
    return module.path == STORE / "xkv_store" / "contributed.py" and names == ["entry_points"]


# What these read may run any code: nothing of ours takes objects from a file, a socket or shared memory that way.
# (vLLM pickles what it sends to its own workers: that is its own.) Tests' gateways are processes of multiprocessing.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "dbm"}
LOADERS = {("numpy", "load"), ("np", "load"), ("torch", "load")}


def test_nothing_is_unpickled() -> None:
    wrong = []
    for module in (*_product(), *_modules(MATRIX)):
        is_for_tests = "testing" in module.path.parent.relative_to(ROOT).parts
        forbidden = UNPICKLERS if is_for_tests else UNPICKLERS | {"multiprocessing"}
        wrong += [f"{module.at(at)}: {name}" for name, at in _imports(module) if name.split(".")[0] in forbidden]
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(ast.Name(owner), name) if (owner, name) in LOADERS:
                    wrong.append(f"{module.at(node)}: {owner}.{name}")
    assert wrong == []


# --- imports ----------------------------------------------------------------------------------------------


def test_compat_needs_the_standard_library_only_and_never_names_itself() -> None:
    wrong = [
        f"{module.at(at)}: {name}"
        for module in _modules(COMPAT)
        for name, at in _imports(module)
        if name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert wrong == []


def test_a_package_imports_its_own_modules_relatively() -> None:
    wrong = [
        f"{module.at(at)}: {name}"
        for source in (STORE, OFFLOAD)
        for module in _modules(source)
        for name, at in _imports(module)
        if name.split(".")[0] == module.path.relative_to(source).parts[0]
    ]
    assert wrong == []


IMPORTER = """
import sys, threading
import {dependencies}
seen = []
NOISY = {{"socket.__new__", "subprocess.Popen", "mmap.__new__", "_thread.start_new_thread", "os.fork"}}
def watch(event, arguments):
    if event == "open" and not str(arguments[0]).endswith((".py", ".pyc", ".so")):
        seen.append(f"opened {{arguments[0]}}")
    elif event in NOISY:
        seen.append(event)
sys.addaudithook(watch)
import importlib
for name in {modules}:
    importlib.import_module(name)
heavy = sorted({{"vllm", "torch", "triton", "transformers"}} & set(sys.modules))
assert not heavy, f"imported {{heavy}}"
assert not seen, seen
assert threading.active_count() == 1
"""


def _names(source: Path) -> list[str]:
    found = []
    for module in _modules(source):
        parts = module.path.relative_to(source).with_suffix("").parts
        if parts[-1] != "__main__":
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in found if name not in NEED_VLLM + NEED_TORCH]


@pytest.mark.parametrize(
    ("source", "dependencies"),
    [
        (COMPAT, "ast"),
        (STORE, "lmdb, msgspec, numpy, prometheus_client, rich, typer, xxhash"),
        (OFFLOAD, "lmdb, msgspec, numpy, prometheus_client, rich, typer, xxhash"),
    ],
    ids=["compat", "store", "offload"],
)
def test_importing_starts_nothing_and_opens_nothing(source: Path, dependencies: str) -> None:
    """VLLM imports the spec's module in its API server too, and forks afterwards."""
    script = IMPORTER.format(dependencies=dependencies, modules=_names(source))
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- names ------------------------------------------------------------------------------------------------

FORBIDDEN = {"cache", "caches", "cached", "tier", "tiers", "backend", "backends"}
# vLLM's own words, which the backend must speak: its KV caches, its methods, its attention backends.
VLLMS_OWN = re.compile(r"kv_?caches?|reset_cache|prefix_cach|cache_dtype|cache_config|attn_backend", re.IGNORECASE)


def _defined(module: Module) -> Iterator[tuple[str, ast.stmt | ast.expr | ast.arg]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_one_word_has_one_meaning() -> None:
    """A card, a database, an index and a ring are never called a cache, a tier, a store or a backend."""
    wrong = []
    for module in _modules(STORE, OFFLOAD):
        stem = module.path.stem
        wrong += [f"{module.path.relative_to(ROOT)}"] if _words(stem) & FORBIDDEN else []
        for name, node in _defined(module):
            bad_word = _words(name) & FORBIDDEN and not VLLMS_OWN.search(name)
            bad_class = isinstance(node, ast.ClassDef) and re.search(r"[a-z]Store$", name)
            if bad_word or bad_class:
                wrong.append(f"{module.at(node)}: {name}")
    assert wrong == []


# --- tests and requirement files --------------------------------------------------------------------------


def test_tests_skip_nothing_and_mock_nothing() -> None:
    forbidden = {"skip", "skipif", "importorskip", "MagicMock", "Mock"}
    wrong = []
    for module in _test_modules():
        wrong += [module.at(at) for name, at in _imports(module) if name.startswith("unittest.mock")]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in forbidden:
                wrong.append(module.at(node))
    assert wrong == []


def test_requirement_files_name_no_place_and_pin_everything() -> None:
    """A line that names an index, a URL or a folder would tie an environment to one machine."""
    files = [*ROOT.glob("requirements/*.txt"), *ROOT.glob("matrix/requirements/*.txt")]
    assert files
    for file in files:
        for line in file.read_text().splitlines():
            is_hash = re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)
            is_pin = re.match(r"[\w.-]+(\[[\w,-]+\])?==[\w.!]+( ;|$| \\)", line)
            assert is_hash or is_pin, f"{file.name}: {line}"
        pins = re.findall(r"(?m)^([\w.-]+)\S*==\S+[^\n]*\n(?!    --hash)", file.read_text())
        assert set(pins) <= {"torch"}, f"{file.name}: without a hash: {pins}"


# --- docs/format.md ---------------------------------------------------------------------------------------


def _section(heading: str) -> str:
    text = (ROOT / "docs" / "format.md").read_text()
    after = text[text.index(heading) + len(heading) :]
    return after.split("\n## ")[0]


def _rows(text: str) -> list[list[str]]:
    """Give the cells of the first table in `text`, without its heading."""
    lines = text[text.index("\n|") + 1 :].split("\n\n", maxsplit=1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _number(cell: str) -> int | None:
    plain = cell.replace(",", "")
    return int(plain) if plain.isdigit() else None


def _fixed(rows: list[list[str]]) -> list[tuple[int, int]]:
    """Give (offset, bytes) of the rows where both are plain numbers."""
    numbers = [(_number(row[0]), _number(row[1])) for row in rows]
    return [(offset, size) for offset, size in numbers if offset is not None and size is not None]


def _fields(packed: struct.Struct) -> list[tuple[int, int]]:
    """Give (offset, bytes) of each field of a struct format, padding included."""
    order, found, offset = packed.format[0], [], 0
    for token in re.findall(r"\d+[sx]|[A-Z]", packed.format[1:]):
        size = struct.calcsize(order + token)
        found.append((offset, size))
        offset += size
    assert offset == packed.size
    return found


CHECKSUM_BYTES = 8


@pytest.mark.parametrize(
    ("heading", "packed", "tail"),
    [
        ("## Slot header", layout.SLOT_HEADER, [(geometry.HEADER_BYTES - CHECKSUM_BYTES, CHECKSUM_BYTES)]),
        ("\nSuperblock:", layout.SUPERBLOCK, [(geometry.SUPERBLOCK_BYTES - CHECKSUM_BYTES, CHECKSUM_BYTES)]),
        ("\nRecord:", layout.RECORD, []),
        ("## Lookup table", layout.TABLE_HEADER, []),
        ("## Control page", layout.CONTROL_HEADER, []),
    ],
    ids=["slot header", "superblock", "record", "lookup table", "control page"],
)
def test_the_page_on_formats_and_the_code_agree(
    heading: str, packed: struct.Struct, tail: list[tuple[int, int]]
) -> None:
    assert _fixed(_rows(_section(heading))) == [*_fields(packed), *tail]


def test_magics_and_the_version_stand_on_the_page() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    magics = {layout.SLOT_MAGIC, layout.DATABASE_MAGIC, layout.TABLE_MAGIC, layout.CONTROL_MAGIC}
    assert {magic.encode() for magic in re.findall(r"magic `(\w{8})`", text)} == magics
    assert text.startswith(f"# Formats, version {layout.FORMAT_VERSION}\n")


def test_sizes_on_the_page_are_those_of_the_code() -> None:
    sizes = {row[0]: _number(row[1]) for row in _rows(_section("## Sizes"))}
    assert list(sizes.values()) == [
        geometry.SLOT_BYTES,
        geometry.HEADER_BYTES,
        geometry.FRAGMENT_BYTES,
        geometry.IO_STEP_BYTES,
    ]
    assert f"{layout.EXTENT.size}·E" in _section("\nRecord:")
    assert f"| entry bytes, {layout.TABLE_ENTRY.size} |" in _section("## Lookup table")
    assert f"At most {geometry.KEY_BYTES_MAX} bytes." in _section("## Object key")
    places = {_number(row[0]) for row in _rows(_section("## Database"))}
    assert places == {0, geometry.SUPERBLOCK_COPY_OFFSET, geometry.DATA_OFFSET}
