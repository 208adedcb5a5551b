"""Named points: the table and the code agree; a held point holds; without the environment nothing happens."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import xkv_store
from xkv_store.testing import points

SOURCES = Path(xkv_store.__path__[0])


def named_in_code() -> set[str]:
    """Every literal that the package hands to `reached`."""
    names: set[str] = set()
    for source in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called != "reached":
                continue
            (argument,) = node.args
            assert isinstance(argument, ast.Constant), f"{source}:{node.lineno}: not a literal"
            assert isinstance(argument.value, str), f"{source}:{node.lineno}: not a string"
            names.add(argument.value)
    return names


def test_table_and_code_agree() -> None:
    """A point that the code no longer reaches would let a kill test pass without killing anything."""
    assert named_in_code() == set(points.POINTS)


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
