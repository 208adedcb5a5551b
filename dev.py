#!/usr/bin/env python3
"""Runs nox, and first brings nox and uv where they are missing; its arguments are nox's own.

Owns: the folder of the two tools, made with pip from `requirements/tools.txt` (hashed), and nothing else.
Must not know: sessions, targets or environments; they are `noxfile.py`'s. Standard library only.

    python3 dev.py                      everything that CI runs
    python3 dev.py -s demo -- --json    one session, with arguments of its own
"""

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PINS = ROOT / "requirements" / "tools.txt"
PYTHON_MIN = (3, 10)


def tools() -> Path:
    """Give the folder that holds the pinned nox and uv, filling it when it is not there yet."""
    seed = PINS.read_bytes() + sysconfig.get_platform().encode() + sys.version.encode()
    folder = ROOT / ".xkv" / f"tools-{hashlib.sha256(seed).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    print("dev: installing nox and uv", file=sys.stderr, flush=True)
    # Filled beside its place and moved there whole, so that a half one is never taken for it.
    scratch = Path(tempfile.mkdtemp(prefix="tools-", dir=folder.parent))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--target", str(scratch)]
    done = subprocess.run([*pip, "-r", str(PINS)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(scratch)
        print(done.stderr, file=sys.stderr)
        sys.exit("dev: pip could not install requirements/tools.txt (is it there? python3 -m pip --version)")
    try:
        scratch.rename(folder)
    except OSError:  # another call was quicker; its folder is as good
        shutil.rmtree(scratch)
    return folder


def main() -> None:
    """Run nox in this process, with this interpreter as the one that environments are made from."""
    if sys.version_info < PYTHON_MIN:
        needed = ".".join(map(str, PYTHON_MIN))
        sys.exit(f"dev: Python {needed} or newer is needed, this is {sys.version.split()[0]}")
    folder = tools()
    if sys.argv[1:] == ["--tools"]:
        print(folder)
        return
    for name in [name for name in os.environ if name.startswith("NOX")]:
        del os.environ[name]  # left over, they would choose other sessions than the line says
    # Not by going there: what a session is given (a wheel, a tree) is named from where the caller is.
    sys.argv[1:1] = ["--noxfile", str(ROOT / "noxfile.py")]
    sys.path.insert(0, str(folder))
    runpy.run_module("nox", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
