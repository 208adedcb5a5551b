"""The environments: made by uv from requirement files under `.xkv/envs`, shared by the sessions that need the same one.

Owns: making them, once for what they need and whole or not at all, and what a process with an engine is given.
Must not know: what any session looks for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from development.places import PACKAGES, ROOT, STATE
from xkv_matrix.wheels import wheels_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import nox

    from xkv_matrix.targets import Target

__all__ = [
    "DOCUMENTS_ENV",
    "MATRIX_ENV",
    "Engine",
    "dev",
    "documents",
    "engine_env",
    "environment",
    "lock_env",
    "of_target",
    "over",
    "policies",
    "remote",
    "uv",
]

MATRIX_ENV = {"PYTHONPATH": str(ROOT / "matrix")}  # the matrix is no package: it runs from the tree
# Where nothing of ours is installed, the matrix reads compat from the tree as well.
DOCUMENTS_ENV = {"PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in ("matrix", "compat/src"))}
ENVIRONMENTS = STATE / "envs"
LARGE_IMPORT = "vllm.entrypoints.llm"  # nearly everything that an engine imports
FIRST_IMPORT_S_MAX = 900  # half a minute on a quiet machine
COMPILE_S_MAX = 300  # a second on a quiet machine


@dataclass(frozen=True, slots=True)
class Engine:
    """A release's wheel: it is installed by its hash and without its dependencies.

    `folder`: the one place to take it from; without it, where the matrix puts its wheels, or the index.
    """

    package: str
    version: str
    sha256: str
    folder: Path | None = None

    @property
    def line(self) -> str:
        """Give it as a requirement."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


def uv(session: nox.Session) -> str:
    """Give the pinned uv; dev.py has it already unless nox was started by other means."""
    folder = session.run(sys.executable, str(ROOT / "dev.py"), "--tools", silent=True, stderr=None, log=False)
    return str(Path(str(folder).strip()) / "bin" / "uv")


# What is set for pip holds for uv as well.
PIP_TO_UV = {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
    "PIP_DEFAULT_TIMEOUT": "UV_HTTP_TIMEOUT",
}


def _uv_env() -> dict[str, str | None]:
    env: dict[str, str | None] = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "VIRTUAL_ENV": None}
    for pip_name, uv_name in PIP_TO_UV.items():
        if pip_name in os.environ and uv_name not in os.environ:
            env[uv_name] = ",".join(os.environ[pip_name].split())
    return env


def lock_env() -> Mapping[str, str | None]:
    """Give what compiling requirement files runs with: no folder of this machine may decide what is pinned."""
    return {**_uv_env(), "UV_FIND_LINKS": None, "PIP_FIND_LINKS": None}


@contextmanager
def _whole(session: nox.Session, name: str, seed: Sequence[bytes]) -> Iterator[tuple[Path, bool]]:
    """Give the folder of the environment called `name` and whether it must be filled, under a lock.

    The kernel drops the lock; a folder is in place only when it is whole, and another one for the same
    name was made for what is not asked for any more.
    """
    folder = ENVIRONMENTS / f"{name}-{hashlib.sha256(b'|'.join(seed)).hexdigest()[:12]}"
    done = folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.is_file():
            yield folder, False
            return
        for stale in folder.parent.glob(f"{name}-*"):
            shutil.rmtree(stale)
        start = time.monotonic()
        session.log(f"making the environment {folder.name}")
        yield folder, True
        done.write_text("")
        session.log(f"made {folder.name} in {time.monotonic() - start:.0f} s")


def environment(
    session: nox.Session, name: str, needs: Path, engine: Engine | None = None, ours: Sequence[str] = PACKAGES
) -> str:
    """Give the python of the environment called `name`, making it when what it `needs` has changed.

    All have our packages from the tree, and with them the optional library, compiled anew where its source is another.
    """
    seed = [needs.read_bytes(), (engine.line if engine else "").encode(), sys.version.encode(), str(ROOT).encode()]
    seed += [(ROOT / package / "pyproject.toml").read_bytes() for package in ours]
    with _whole(session, name, seed) as (folder, empty):
        if empty:
            _fill(session, folder, needs, engine, ours)
    for build in (ROOT / package / "native" / "build.py" for package in ours):
        if build.is_file():
            subprocess.run((sys.executable, str(build)), timeout=COMPILE_S_MAX, check=False)  # it says why not
    return str(folder / "bin" / "python")


def _venv(session: nox.Session, folder: Path) -> None:
    command = (uv(session), "venv", "--quiet", "--no-config", "--no-project", "--python", sys.executable, str(folder))
    session.run(*command, env=_uv_env(), silent=True, log=False)


def _fill(session: nox.Session, folder: Path, requirements: Path, engine: Engine | None, ours: Sequence[str]) -> None:
    python = str(folder / "bin" / "python")
    install = (uv(session), "pip", "install", "--quiet", "--no-config", "--python", python)

    def run(*command: str) -> None:
        session.run(*command, env=_uv_env(), silent=True, log=False)

    _venv(session, folder)
    run(*install, "--requirements", str(requirements))
    if engine:
        lines = folder / "engine.txt"
        lines.write_text(engine.line + "\n")
        # The matrix may have fetched the wheel already; the hash is the same wherever it comes from.
        folder_of_wheels = engine.folder or wheels_folder()
        here = ("--find-links", str(folder_of_wheels)) if folder_of_wheels.is_dir() else ()
        only = ("--no-index",) if engine.folder else ()
        run(*install, *here, *only, "--no-deps", "--require-hashes", "--requirements", str(lines))
        # The first import compiles thousands of modules: here, and not within a test's time. Whether it is one that
        # works, the tests say.
        warm = (python, "-c", f"import {LARGE_IMPORT}")
        subprocess.run(warm, capture_output=True, timeout=FIRST_IMPORT_S_MAX, check=False)
    # Built anew by the pinned hatchling that stands in every requirement file: nothing is fetched here.
    editable = [part for package in ours for part in ("--editable", str(ROOT / package))]
    if editable:
        run(*install, "--no-cache", "--no-deps", "--no-build-isolation", *editable)


def over(session: nox.Session, name: str, python: str, *folders: Path) -> str:
    """Give the python of an environment that has these folders before what another one has, and none of our packages.

    A .pth file names that one's site-packages: what lies in it is found, but its own .pth files, by which our
    packages are installed there, are not read.
    """
    packages = [path for path in Path(python).parents[1].glob("lib*/python3*/site-packages") if not path.is_symlink()]
    lines = "".join(f"{path}\n" for path in (*folders, packages[0]))
    with _whole(session, name, [lines.encode()]) as (folder, empty):
        if empty:
            _venv(session, folder)
            (site,) = folder.glob("lib/python3*/site-packages")
            (site / "over.pth").write_text(lines)
    return str(folder / "bin" / "python")


def dev(session: nox.Session) -> str:
    """Give the python of the environment that holds neither torch nor vLLM."""
    return environment(session, "dev", ROOT / "requirements" / "dev.txt")


def documents(session: nox.Session) -> str:
    """Give the python of the environment that builds the site and the changelog, with nothing of ours installed."""
    return environment(session, "documents", ROOT / "requirements" / "documents.txt", ours=())


def policies(session: nox.Session) -> str:
    """Give the python of the environment that has the policies of others to compare ours with."""
    return environment(session, "policies", ROOT / "requirements" / "policies.txt")


def remote(session: nox.Session) -> Path | None:
    """Give the folder that has the remote's library, for a gateway beside an engine; None, said, on other Pythons."""
    python = environment(session, "remote", ROOT / "requirements" / "remote.txt", ours=())
    (site,) = Path(python).parents[1].glob("lib/python3*/site-packages")
    if (site / "mooncake").is_dir():
        return site
    session.warn("the remote's library has no wheel for this Python: a stand-in for it is tested, and no engine is run")
    return None


def of_target(session: nox.Session, target: Target) -> str:
    """Give the python of a release's environment."""
    engine = Engine(target.package, target.version, target.sha256)
    return environment(session, target.release, ROOT / "matrix" / target.requirements, engine)


def engine_env(release: str) -> dict[str, str]:
    """Give what a process with an engine needs: no network, a fixed hash seed, a cache root of its own."""
    root = STATE / "vllm" / release  # vLLM's notes on model classes carry no release in their names
    root.mkdir(parents=True, exist_ok=True)
    return {
        "VLLM_CACHE_ROOT": str(root),
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XKV_TARGET": release,
    }
