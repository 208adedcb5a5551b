"""Named points: the table and the code agree; a held point holds; without the environment nothing happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from xkv_store.testing import markers, points

if TYPE_CHECKING:
    from pathlib import Path


def test_table_and_code_agree() -> None:
    """A point that the code no longer reaches would let a kill test pass without killing anything."""
    assert set(markers.in_source()) == points.POINTS


def test_a_computed_name_is_refused(tmp_path: Path) -> None:
    """The list that is made from the source would lack it."""
    (tmp_path / "module.py").write_text("points.reached('a')\nreached('b'); reached('a')\n")
    assert markers.in_source(tmp_path) == {"a": ["module.py:1", "module.py:2"], "b": ["module.py:2"]}
    (tmp_path / "other.py").write_text("name = 'c'\nreached(name)\n")
    with pytest.raises(ValueError, match=r"other\.py:2"):
        markers.in_source(tmp_path)


def test_a_process_kills_itself_where_it_is_told(tmp_path: Path) -> None:
    """The second time, not the first, and nothing behind it runs."""
    (tmp_path / "put.written.kill").write_text("2")
    program = (
        "from xkv_store.testing.points import reached\nfor n in range(9): print(n, flush=True); reached('put.written')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), points.ENVIRONMENT_NAME: str(tmp_path)}
    run = [sys.executable, "-c", program]
    ended = subprocess.run(run, check=False, env=environment, stdout=subprocess.PIPE, timeout=30)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"0\n1\n")


def test_nothing_happens_without_the_environment(tmp_path: Path) -> None:
    run = [sys.executable, "-c", "from xkv_store.testing.points import reached; reached('put.received')"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(points.ENVIRONMENT_NAME, None)
    subprocess.run(run, check=True, cwd=tmp_path, env=environment, timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_a_held_point_holds_until_let_go(tmp_path: Path) -> None:
    hold = tmp_path / "put.written.hold"
    hold.touch()
    run = [
        sys.executable,
        "-c",
        "from xkv_store.testing.points import reached; reached('put.written'); print('on')",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), points.ENVIRONMENT_NAME: str(tmp_path)}
    with subprocess.Popen(run, env=environment, stdout=subprocess.PIPE) as process:
        try:
            mark = tmp_path / "put.written.reached"
            deadline = time.monotonic() + 30
            while not mark.exists():
                assert time.monotonic() < deadline, "the point was never reached"
                time.sleep(0.01)
            time.sleep(0.1)
            assert process.poll() is None, "the point did not hold"
            hold.unlink()
            output, _ = process.communicate(timeout=30)
            assert output == b"on\n"
            moment, pid = mark.read_text(encoding="ascii").split()
            assert int(pid) == process.pid
            assert int(moment) > 0
        finally:
            process.kill()
