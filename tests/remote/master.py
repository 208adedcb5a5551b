"""A real `mooncake_master`, which can be killed and come back.

Owns: its process, from its start to its end by its id. Must not know: who uses it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from remote.library import folder as folder_of_library

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

PORT: Final = 50_951
START_S_MAX: Final = 15.0
CLIENT_TTL_S: Final = 5  # a node that has gone keeps its objects' names for so long
LEASE_MS: Final = 1_000  # what was just read or asked for is not evicted for so long


class Master:
    """Use it in `with`."""

    def __init__(self, folder: Path, address: str, prefix: Sequence[str]) -> None:
        """`prefix`: what makes a command run on its host."""
        library = folder_of_library()
        assert library is not None
        self._log = folder / "master.log"
        self._prefix = list(prefix)
        self._address = address
        self._command = [
            *(*prefix, str(library / "mooncake_master")),
            *(f"--rpc_port={PORT}", f"--rpc_address={address}", "--metrics_port=0", "--enable_metric_reporting=false"),
            *(f"--client_ttl={CLIENT_TTL_S}", f"--default_kv_lease_ttl={LEASE_MS}"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self._address}:{PORT}"

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        probe = f"import socket; socket.create_connection(({self._address!r}, {PORT}), 1).close()"
        deadline = time.monotonic() + START_S_MAX
        while subprocess.run([*self._prefix, sys.executable, "-c", probe], capture_output=True, check=False).returncode:
            assert self._process.poll() is None, f"the master has ended: {self._log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, "the master does not listen"
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
