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
THREADS_MAX: Final = 4  # where the kernel refuses io_uring, threads stand in for its queue, as in the gateway


@dataclass(frozen=True, slots=True)
class Fio:
    """fio with O_DIRECT on one file of `file_bytes` in `folder`, written in full beforehand: it overwrites."""

    folder: Path
    file_bytes: int
    engine: str

    @classmethod
    def prepare(cls, folder: Path, file_bytes: int) -> Fio:
        """Find the engine that this kernel allows, and write the file."""
        for engine in ("io_uring", "psync"):
            found = cls(folder, file_bytes, engine)
            try:
                found.seconds("write", block=1 << 20, total=file_bytes, depth=4)
            except subprocess.CalledProcessError as error:
                if engine == "psync":
                    raise RuntimeError(f"fio fails in {folder}: {error.stderr or error.stdout}") from error
                continue
            break
        return found

    def seconds(self, kind: Kind, *, block: int, total: int, depth: int) -> float:
        """Seconds for the first `total` bytes of the file, in order, in blocks of `block`, `depth` at a time."""
        command = ["fio", "--name=x", f"--directory={self.folder}", f"--filename={FILE}", "--direct=1", "--thread"]
        command += [f"--rw={kind}", f"--bs={block}", f"--filesize={self.file_bytes}", "--output-format=json"]
        command += ["--overwrite=0", "--fallocate=none", f"--ioengine={self.engine}", "--group_reporting"]
        if self.engine == "psync":
            jobs = min(depth, THREADS_MAX)
            command += [f"--numjobs={jobs}", f"--size={total // jobs}", f"--offset_increment={total // jobs}"]
        else:
            command += [f"--iodepth={depth}", f"--size={total}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        side = report["jobs"][0][kind]
        assert side["io_bytes"] == total, side
        return total / float(side["bw_bytes"])
