"""What the same file system gives to fio: the other side of each ratio.

Owns: fio's command line and its report.
Must not know: gateways.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["write", "read"]
FILE: Final = "fio.dat"


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

    def seconds(self, kind: Kind, *, block: int, total: int, depth: int, jobs: int) -> float:
        """Seconds for the first `total` bytes of the file in blocks of `block`, `depth` at a time in all.

        Each of the `jobs` goes through a part of its own, in order.
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
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        side = report["jobs"][0][kind]
        assert side["io_bytes"] == total, side
        return total / float(side["bw_bytes"])
