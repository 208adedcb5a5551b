"""The built packages in environments of their own: alone and together, with what they declare and nothing else.

Owns: making these environments with uv, and what must work in each: its imports, its commands, its types.
Must not know: how the archives are made and what is in them (`distributions`), sessions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from development.distributions import packages, versions, wheel_metadata, wheel_of
from development.places import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["main", "requirements"]

PINS: Final = ROOT / "requirements" / "run.txt"
COMMAND_S_MAX: Final = 300  # fetching some ten wheels over a slow line
# What can be installed without the others, and everything. The backend needs the other two.
ALONE: Final = (("xkv_compat",), ("xkv_store",), ("xkv_store", "xkv_compat", "xkv_offload"))
# These modules ask vLLM for its base classes, and no vLLM is here; tests/test_stack_* import them.
NEED_VLLM: Final = ("xkv_offload.spec", "xkv_offload.connector")
# These are of GPUs, and import the torch (and its compiler) that come with vLLM.
NEED_TORCH: Final = ("xkv_offload.copy_triton", "xkv_offload.cuda", "xkv_offload.device_setup")
IMPORTS: Final = """
import importlib, pkgutil, sys
for name in sys.argv[2:]:
    package = importlib.import_module(name)
    found = [module.name for module in pkgutil.walk_packages(package.__path__, name + ".")]
    for module in found:
        if module not in {left_out!r} and not module.endswith("__main__"):
            importlib.import_module(module)
    assert package.__version__ == sys.argv[1], (name, package.__version__)
    print(name, len(found), "modules")
"""
# Somebody's strict program: without the packages' types it would be an error that there are none.
TYPED: Final = "import {module}\n\nversion: str = {module}.__version__\n"


def requirements(wheels: Sequence[Path]) -> list[str]:
    """Give what these wheels declare, less each other."""
    own = {str(wheel_metadata(wheel)["Name"]) for wheel in wheels}
    lines = [line for wheel in wheels for line in wheel_metadata(wheel).get_all("Requires-Dist") or ()]
    return [line for line in lines if line.split("=")[0].strip() not in own]


def _said(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def _commands(uv: str, folder: Path, python: str, modules: Sequence[str], version: str) -> Iterator[tuple[str, ...]]:
    """Give what must end with 0, one after the other."""
    imports = IMPORTS.replace("{left_out!r}", repr(NEED_VLLM + NEED_TORCH))
    yield (uv, "pip", "check", "--quiet", "--no-config", "--python", python)
    yield (python, "-I", "-c", imports, version, *modules)
    for module in modules:
        program = folder / f"uses_{module}.py"
        program.write_text(TYPED.format(module=module))
        yield (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=/dev/null",
               "--python-executable", python, str(program))  # fmt: skip
    if "xkv_compat" in modules:
        yield (python, "-I", "-m", "xkv_compat", "report", "--help")
    if "xkv_store" in modules:
        yield (str(Path(python).with_name("xkv")), "gateway", "run", "--help")


def _faults(uv: str, dist: Path, folder: Path, modules: Sequence[str], version: str) -> Iterator[str]:
    title = " + ".join(modules)
    wheels = [wheel_of(dist, module, version) for module in modules]
    python = str(folder / "bin" / "python")
    needs = folder.with_name(f"{folder.name}.in")
    needs.write_text("".join(f"{line}\n" for line in requirements(wheels)))
    install = (uv, "pip", "install", "--quiet", "--no-config", "--python", python)
    made: list[tuple[str, ...]] = [
        (uv, "venv", "--quiet", "--no-config", "--no-project", "--python", sys.executable, str(folder))
    ]
    if needs.read_text():
        made.append((*install, "--constraints", str(PINS), "--requirements", str(needs)))
    made.append((*install, "--no-deps", "--no-index", *map(str, wheels)))
    for command in made:
        code, said = _said(*command)
        if code:
            yield f"{title}: cannot be installed: {said}"
            return
    # What is only here, and in no environment of ours, is a dependency that somebody forgot to declare.
    for command in _commands(uv, folder, python, modules, version):
        code, said = _said(*command)
        if code:
            yield f"{title}: {' '.join(command[1:4])} …: {said}"
    if "xkv_store" in modules:
        script = str(Path(python).with_name("xkv"))
        code, said = _said(script, "--version")
        if (code, said) != (0, f"xkv {version}"):
            yield f"{title}: xkv --version says {said!r} with {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, alone and together, what lies in a folder, and say what does not work; the exit code: 1 where any."""
    parser = argparse.ArgumentParser(prog="python -m development.installs")
    parser.add_argument("dist", type=Path)
    parser.add_argument("--uv", default="uv")
    options = parser.parse_args(arguments)
    version = versions(packages(ROOT, PACKAGES))["xkv_store"]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for modules in ALONE:
            found = list(_faults(options.uv, options.dist, Path(scratch, "-".join(modules)), modules, version))
            sys.stdout.writelines(f"{line}\n" for line in found or [f"{' + '.join(modules)}: installed, and works"])
            sys.stdout.flush()
            wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
