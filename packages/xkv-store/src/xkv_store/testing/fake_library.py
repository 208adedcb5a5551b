"""A pool in a folder, spoken to as Mooncake's store client is: for tests of a remote without its library.

Owns: objects as files, and what a test asks to go wrong, by files too. Must not know: gateways, objects' formats.

`make` writes the package that a gateway's process for the remote imports; this one has to be importable there.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Final

NOT_FOUND: Final = -704
NO_ROOM: Final = -200
IN_USE: Final = -706
NO_MASTER: Final = -900
HANG_S: Final = 0.02


def make(folder: Path) -> Path:
    """Write a package `mooncake` into `folder`, to be put on the module path; returns its pool's folder."""
    package, pool = folder / "mooncake", folder / "pool"
    package.mkdir(parents=True)
    pool.mkdir()
    (package / "__init__.py").write_text("")
    module = ".".join(__name__.split(".")[-3:])  # as the gateway's process names this package
    (package / "store.py").write_text(
        f"from functools import partial\nfrom {module} import FakePool\n"
        f"MooncakeDistributedStore = partial(FakePool, {str(pool)!r})\n"
    )
    return pool


class FakePool:
    """The calls that are used.

    A file `hang-look` (load, store) makes these calls wait; `down`: there is no master; `full`: no room;
    `in-use`: nothing is removed; `slow-rings`: all memory but the first takes a second to register.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._registered = 0

    def _waits(self, lane: str) -> bool:
        """Wait as long as asked; whether the master answers."""
        while (self._folder / f"hang-{lane}").exists():
            time.sleep(HANG_S)
        return not (self._folder / "down").exists()

    def setup(  # noqa: PLR0917  as it is there
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int:
        """0, or a code."""
        self._host = f"{host}:{os.getpid()}"
        (self._folder / "setups").open("a").write(f"{segment} {protocol} {device} {metadata} {buffer} {master}\n")
        return 0 if self._waits("setup") else NO_MASTER

    def get_hostname(self) -> str:
        """As others know this client."""
        return self._host

    def register_buffer(self, address: int, size: int) -> int:
        """0, or a code."""
        if self._registered and (self._folder / "slow-rings").exists():
            time.sleep(1.0)
        self._registered += 1
        return 0 if address and size else NO_MASTER

    def unregister_buffer(self, address: int) -> int:
        """0, or a code."""
        return 0 if address else NO_MASTER

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1, 0, or a code."""
        if not self._waits("look"):
            return [NO_MASTER] * len(keys)
        return [int((self._folder / key).exists()) for key in keys]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Bytes, or a code."""
        if not self._waits("load"):
            return [NO_MASTER] * len(keys)
        codes = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            path = self._folder / key
            data = path.read_bytes() if path.exists() else None
            if data is not None and len(data) <= size:
                ctypes.memmove(address, data, len(data))
            codes.append(NOT_FOUND if data is None else len(data) if len(data) <= size else -600)
        return codes

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """0, or a code."""
        if not self._waits("store"):
            return [NO_MASTER] * len(keys)
        if (self._folder / "full").exists():
            return [NO_ROOM] * len(keys)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            if not (self._folder / key).exists():
                part = self._folder / f".{key}"
                part.write_bytes(ctypes.string_at(address, size))
                part.rename(self._folder / key)
        return [0] * len(keys)

    def batch_remove(self, keys: list[str]) -> list[int]:
        """0, or a code."""
        if (self._folder / "in-use").exists():
            return [IN_USE] * len(keys)
        for key in keys:
            (self._folder / key).unlink(missing_ok=True)
        return [0] * len(keys)
