"""Compile the optional library: into the wheel by hatch_build.py, beside the source by a development environment.

Owns: the compiler's command, and when what is there is good already. Must not know: wheels, environments; what the
library does. Standard library only: a build has nothing else.

    python native/build.py [FILE]

Ends with 0 where FILE (beside the source unless named) is there and made from this source, and with 3 and a reason
where it cannot be: then Python does the same. CC names another compiler, as everywhere; XKV_NATIVE=0 asks for none.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "xkv.c"
LIBRARY = "libxkv.so.2"  # as `xkv_store.native` has it; no name that Python could take for a module
BESIDE = HERE.parent / "src" / "xkv_store" / LIBRARY
EXIT_NONE = 3
COMPILE_S_MAX = 120  # a second on a quiet machine
# The same source and compiler give the same bytes: no time, no folder, no id is in them.
FLAGS = (
    *("-std=gnu11", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-s"),
    *("-Wl,--build-id=none", f"-Wl,-soname,{LIBRARY}", f"-ffile-prefix-map={HERE}=."),
)


def _made_from() -> str:
    """The source by its hash, as it stands in what was compiled from it."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def build(into: Path) -> str:
    """Compile to `into` unless it is made from this source already; why it cannot be, or nothing."""
    if os.environ.get("XKV_NATIVE") == "0":
        return "XKV_NATIVE=0 asks for none"
    source = _made_from()
    if into.is_file() and source.encode() in into.read_bytes():
        return ""
    made = into.with_name(f"{into.name}.{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, *FLAGS, f'-DXKV_SOURCE="{source}"', str(SOURCE), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)
        if done.returncode:
            return f"{compiler[0]} cannot compile it: {done.stderr.strip()[-1000:]}"
        made.replace(into)  # whole or not at all: a process may be loading the old one
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no C compiler: {error}"
    finally:
        made.unlink(missing_ok=True)
    return ""


def main() -> int:
    """Build to the file that is named."""
    into = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else BESIDE
    reason = build(into)
    if reason:
        sys.stderr.write(f"the native library is not built, Python does its work: {reason}\n")
    return EXIT_NONE if reason else 0


if __name__ == "__main__":
    sys.exit(main())
