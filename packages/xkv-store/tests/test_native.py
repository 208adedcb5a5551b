"""The optional library: it gives what Python gives, bit for bit, and without it nothing is missing.

Where there is no C compiler, the tests of the library itself are of a build that says so.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from xkv_store import native

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD: Final = Path(__file__).resolve().parents[1] / "native" / "build.py"
EXIT_NONE: Final = 3
SAMPLE: Final = bytearray(random.Random(1).randbytes((2 << 20) + 64))
NEAR: Final = (0, 16, 128, 240, 1_024, 2_048, 261_120, 2 << 20)
EDGES: Final = sorted({max(0, at + n) for at in NEAR for n in range(-2, 3)})


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library, compiled now; None where this machine has no compiler."""
    into = tmp_path_factory.mktemp("native") / native.LIBRARY.name
    done = subprocess.run([sys.executable, str(BUILD), str(into)], capture_output=True, text=True, check=False)
    assert (done.returncode, into.is_file()) in ((0, True), (EXIT_NONE, False)), done.stderr
    return into if into.is_file() else None


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, built: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way; `native` is Python's, too, where there is no compiler."""
    found = native.Native(built) if built is not None and request.param == "native" else None
    native.library.cache_clear()
    monkeypatch.setattr(native, "library", lambda: found)
    yield request.param
    monkeypatch.undo()
    native.library.cache_clear()


def both(buffers: list[memoryview], skip: int, payload_bytes: list[int]) -> list[int]:
    return [xxh3_64_intdigest(view[skip : skip + n]) for view, n in zip(buffers, payload_bytes, strict=True)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offset", [0, 1, 7, 63])
def test_checksums_are_those_of_python_at_every_edge(offset: int) -> None:
    view = memoryview(SAMPLE)[offset:]
    lengths = [length for length in EDGES if length <= 2 << 20]
    views = [view[: length + 3] for length in lengths]
    assert native.payload_checksums(views, 3, lengths) == both(views, 3, lengths)


@pytest.mark.usefixtures("way")
def test_checksums_of_every_length_to_three_blocks_are_those_of_python() -> None:
    lengths = list(range(3_100))
    views = [memoryview(SAMPLE)] * len(lengths)
    assert native.payload_checksums(views, 5, lengths) == both(views, 5, lengths)


@given(st.data())
def test_checksums_of_any_payloads_are_those_of_python(built: Path | None, data: st.DataObject) -> None:
    found = native.Native(built) if built is not None else None
    lengths = data.draw(st.lists(st.integers(0, 2 << 20) | st.integers(0, 5_000), max_size=5))
    skip = data.draw(st.integers(0, 20))
    views = []
    for length in lengths:
        at = data.draw(st.integers(0, len(SAMPLE) - length - skip))
        views.append(memoryview(SAMPLE)[at : at + length + skip])
    wanted = both(views, skip, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: found)
        assert native.payload_checksums(views, skip, lengths) == wanted


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("buffer", [memoryview(bytes(5_000)), memoryview(bytearray(3_000))], ids=["read only", "short"])
def test_memory_that_may_not_be_reached_by_its_address_is_not(buffer: memoryview) -> None:
    """A buffer that is shorter than what is asked for is summed as far as it goes: nothing behind it is read."""
    assert native.payload_checksums([buffer], 1_000, [4_000]) == [xxh3_64_intdigest(buffer[1_000:])]


def test_each_kind_of_registers_gives_the_same(tmp_path: Path, built: Path | None) -> None:
    """A processor takes the widest registers that it has: the others are tried by taking the wider ones away."""
    if built is None:
        return
    text = BUILD.with_name("xkv.c").read_text()
    for gone in (["avx512f"], ["avx512f", "avx2"]):
        source, library = tmp_path / "-".join(["xkv", *gone, ".c"]), tmp_path / ("-".join(gone) + ".so")
        changed = text
        for kind in gone:
            assert f'__builtin_cpu_supports("{kind}")' in changed
            changed = changed.replace(f'__builtin_cpu_supports("{kind}")', "0")
        source.write_text(changed)
        subprocess.run(["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
        lengths = [*range(241, 3_000, 7), 261_120]
        views = [memoryview(SAMPLE)] * len(lengths)
        assert native.Native(library).checksums(views, 1, lengths) == both(views, 1, lengths)


# --- whether it is used ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the library is looked for: a folder of the test's."""
    place = tmp_path / native.LIBRARY.name
    monkeypatch.setattr(native, "LIBRARY", place)
    monkeypatch.delenv(native.ENVIRONMENT_NAME, raising=False)
    native.library.cache_clear()
    yield place
    native.library.cache_clear()


def test_it_is_used_where_it_is_and_not_where_it_is_turned_off(
    fresh: Path, built: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.path_word() == "python"
    if built is not None:
        fresh.write_bytes(built.read_bytes())
    native.library.cache_clear()
    assert native.path_word() == ("python" if built is None else "native")
    monkeypatch.setenv(native.ENVIRONMENT_NAME, "0")
    native.library.cache_clear()
    assert native.path_word() == "python"


def test_what_cannot_be_loaded_is_not_used(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.write_bytes(b"no library")
    assert native.path_word() == "python"
    assert "is not used" in caplog.text


def test_a_library_that_is_wrong_is_not_used(
    fresh: Path, built: Path | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another compiler's mistake, or another machine's library, must not make every object a damaged one."""
    if built is not None:
        fresh.write_bytes(built.read_bytes())
        monkeypatch.setattr(native, "checksum", lambda _: 1)
    assert native.path_word() == "python"
    assert built is None or "its checksums are wrong" in caplog.text


def test_a_build_without_a_compiler_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    into = tmp_path / native.LIBRARY.name
    for environment in ({"CC": "no-such-compiler"}, {"CC": "false"}, {"XKV_NATIVE": "0"}):
        done = subprocess.run(
            [sys.executable, str(BUILD), str(into)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == EXIT_NONE
        assert "Python does its work" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_build_of_the_same_source_is_not_repeated_and_of_another_is(tmp_path: Path, built: Path | None) -> None:
    if built is None:
        return
    into = tmp_path / native.LIBRARY.name
    into.write_bytes(built.read_bytes())
    before = into.stat().st_mtime_ns, into.stat().st_ino
    subprocess.run([sys.executable, str(BUILD), str(into)], check=True)
    assert (into.stat().st_mtime_ns, into.stat().st_ino) == before
    into.write_bytes(b"of another source")
    subprocess.run([sys.executable, str(BUILD), str(into)], check=True)
    assert into.read_bytes() == built.read_bytes(), "the same bytes, wherever and whenever"
