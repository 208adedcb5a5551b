"""The command line, also from a copy under another name: what a fork's maintainer sees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import xkv_compat
from xkv_compat.report import EXIT_BAD_INPUT, EXIT_OK, EXIT_UNSUPPORTED, main

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

_PACKAGE = Path(xkv_compat.__file__).parent


def test_table(
    make_tree: Callable[[dict[str, str]], Path],
    full_files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "--source", str(make_tree(full_files))]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r"\w+ +(yes|no) ", line)]
    assert len(rows) == len(xkv_compat.FEATURES)
    assert len({re.match(r"\w+ +", row).end() for row in rows}) == 1  # type: ignore[union-attr]
    assert lines[-1].startswith("usable: ")


def test_json(
    make_tree: Callable[[dict[str, str]], Path],
    full_files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    del full_files["v1/core/sched/output.py"]
    assert main(["report", "--json", "--source", str(make_tree(full_files))]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "usable"
    assert [name for name, found in report["features"].items() if not found] == ["loads_after_forward"]
    assert list(report["missing"]) == ["loads_after_forward"]


def test_unsupported(make_tree: Callable[[dict[str, str]], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--source", str(make_tree({}))]) == EXIT_UNSUPPORTED
    out = capsys.readouterr().out
    assert f"unsupported: {len(xkv_compat.REQUIREMENTS)} needed symbol(s) missing" in out
    assert "OffloadingWorker: no symbol vllm.v1.kv_offload.base:OffloadingWorker, nor " in out


def test_bad_input_is_one_line(
    make_tree: Callable[[dict[str, str]], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_tree({"v1/kv_offload/base.py": "def (:\n"})
    for tree, text in (
        (tmp_path / "absent", "no such folder"),
        (tmp_path, "not a vLLM"),
        (broken, "base.py:1:"),
    ):
        assert main(["report", "--source", str(tree)]) == EXIT_BAD_INPUT
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert text in captured.err


def test_a_name_that_is_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "vllm").symlink_to("vllm")
    for tree in ("a" * 300, "a/" * 3000, str(tmp_path / "loop"), str(tmp_path / "inside")):
        assert main(["report", "--source", tree]) == EXIT_BAD_INPUT
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"error: {tree[:200]}")
        assert captured.err.count("\n") == 1


def test_started_inside_a_tree_nothing_of_it_is_imported(tmp_path: Path) -> None:
    """Python puts the current folder first: only what `python -m` itself looks for before any of our code is its."""
    environment = {**os.environ, "PYTHONPATH": str(_PACKAGE.parent)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment
        )

    (tmp_path / "plain.py").write_text("import sys; print(*sys.modules)", encoding="utf-8")
    before = set(run("plain").stdout.split())
    shadowed = sorted(name for name in sys.stdlib_module_names if name not in before)
    assert {"argparse", "ast", "dataclasses", "inspect", "json", "pathlib", "typing", "__future__"} <= set(shadowed)
    for name in shadowed:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the tree was imported')", encoding="utf-8")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')", encoding="utf-8")
    done = run(_PACKAGE.name, "report", "--source", ".")
    assert (done.returncode, done.stderr) == (EXIT_UNSUPPORTED, "")
    assert "unsupported: " in done.stdout


def test_no_vllm_installed(run_live: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_live(None, "sys.modules['vllm'] = None\nfrom xkv_compat.report import main\nsys.exit(main(['report']))")
    # A None in sys.modules makes the import fail as if nothing were installed, also where something is.
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    assert done.stderr.startswith("error: no vLLM is installed in this Python")


def test_what_vllm_prints_while_it_is_imported_is_not_part_of_the_report(
    full_files: dict[str, str],
    make_tree: Callable[[dict[str, str]], Path],
    run_live: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    tree = make_tree({**full_files, "__init__.py": "print('WARNING of its own')\n"})
    done = run_live(tree, "from xkv_compat.report import main\nsys.exit(main(['report', '--json']))")
    assert json.loads(done.stdout)["features"], done.stderr
    assert "WARNING of its own" in done.stderr


def test_a_vendored_copy_under_another_name(
    make_tree: Callable[[dict[str, str]], Path],
    full_files: dict[str, str],
    run_live: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """A fork keeps its copy inside its own package; one absolute import or literal name would break it."""
    place = tmp_path / "vendor"
    (place / "fork").mkdir(parents=True)
    (place / "fork" / "__init__.py").touch()
    shutil.copytree(_PACKAGE, place / "fork" / "renamed", ignore=shutil.ignore_patterns("__pycache__"))
    tree = make_tree(full_files)
    code = f"""
import runpy
sys.argv = ["x", "report", "--json", "--source", {str(tree)!r}]
try:
    runpy.run_module("fork.renamed", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0, ended.code
import fork.renamed.vllm_symbols
assert fork.renamed.detect_live()["lookup_enum"]
assert "xkv_compat" not in sys.modules
"""
    done = run_live(tree, code, place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "usable"


def test_the_package_never_names_itself_and_needs_nothing() -> None:
    for path in _PACKAGE.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "xkv_compat" not in text, path
        for module in re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE):
            assert module in sys.stdlib_module_names, f"{path}: {module}"
