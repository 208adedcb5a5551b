"""What the same file system gives to fio: the other side of each ratio.

Owns: fio's command line and its report.
Must not know: gateways.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["write", "read"]
FILE: Final = "fio.dat"
HUGE_PAGES: Final = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


@dataclass(frozen=True, slots=True)
class Fio:
    """fio with O_DIRECT on one file of `file_bytes` in `folder`, written in full beforehand: it overwrites."""

    folder: Path
    file_bytes: int
    engine: str

    @classmethod
    def prepare(cls, folder: Path, file_bytes: int) -> Fio:
        """Find the engine that this kernel allows (threads stand in for io_uring's queue), and write the file."""
        for engine in ("io_uring", "psync"):
            found = cls(folder, file_bytes, engine)
            try:
                found.seconds("write", block=1 << 20, total=file_bytes, depth=4, jobs=1)
            except subprocess.CalledProcessError as error:
                if engine == "psync":
                    raise RuntimeError(f"fio fails in {folder}: {error.stderr or error.stdout}") from error
                continue
            break
        return found

    def seconds(self, kind: Kind, *, block: int, total: int, depth: int, jobs: int, huge_pages: bool = False) -> float:
        """Seconds for the first `total` bytes of the file in blocks of `block`, `depth` at a time in all.

        Each of the `jobs` goes through a part of its own, in order. `huge_pages`: its buffers lie in them, as our ring
        does (glibc's doing: fio itself asks for none).
        """
        if self.engine == "psync":
            jobs = depth  # a thread has one block on its way
        while total // jobs < block:
            jobs //= 2
        command = ["fio", "--name=x", f"--directory={self.folder}", f"--filename={FILE}", "--direct=1", "--thread"]
        command += [f"--rw={kind}", f"--bs={block}", f"--filesize={self.file_bytes}", "--output-format=json"]
        command += ["--overwrite=0", "--fallocate=none", f"--ioengine={self.engine}", "--group_reporting"]
        command += [f"--numjobs={jobs}", f"--iodepth={max(1, depth // jobs)}"]
        command += [f"--size={total // jobs}", f"--offset_increment={total // jobs}"]
        environment = {**os.environ, HUGE_PAGES[0]: HUGE_PAGES[1]} if huge_pages else None
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        side = report["jobs"][0][kind]
        assert side["io_bytes"] == total, side
        return total / float(side["bw_bytes"])
