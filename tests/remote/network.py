"""Hosts for a run: network namespaces on a bridge where the kernel lets them be made, else loopback addresses.

Owns: the namespaces, each held by a process of ours, so that all of it goes with these; who is cut off.
Must not know: what runs on a host.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

SWITCH: Final = "switch"
HOSTS: Final = (SWITCH, "a", "b")
HELD_S: Final = 3_600  # a namespace is there no longer, whatever becomes of us
READY_S_MAX: Final = 5.0
_ADDRESSES: Final = {True: "10.77.0.{}", False: "127.0.0.{}"}


@dataclass(slots=True)
class Network:
    """Use it in `with`. `is_real`: each host is a namespace of its own, and can be cut off."""

    is_real: bool = False
    _holders: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        with ExitStack() as unfinished:
            unfinished.callback(self.close)
            self.is_real = self._make()
            if not self.is_real:
                self.close()
            unfinished.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: str) -> str:
        """Where the others reach it."""
        return _ADDRESSES[self.is_real].format(HOSTS.index(host) + 1)

    def on(self, host: str) -> list[str]:
        """What comes before a command that is to run there."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--"] if self.is_real else []

    def cut(self, host: str) -> None:
        """Nothing comes to it or from it any more; it is told nothing of that."""
        self._must(SWITCH, "link", "set", f"to-{host}", "down")

    def mend(self, host: str) -> None:
        """As before."""
        self._must(SWITCH, "link", "set", f"to-{host}", "up")

    def close(self) -> None:
        """All of it goes with the processes that hold it."""
        while self._holders:
            _, holder = self._holders.popitem()
            holder.kill()
            holder.wait()

    def _make(self) -> bool:
        try:
            for host in HOSTS:
                command = ["unshare", "--net", "sleep", str(HELD_S)]
                self._holders[host] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        except OSError:
            return False
        if not self._await_namespaces() or not self._ip(SWITCH, "link", "add", "bridge", "type", "bridge"):
            return False
        self._must(SWITCH, "addr", "add", f"{self.address_of_real(SWITCH)}/24", "dev", "bridge")
        self._must(SWITCH, "link", "set", "bridge", "up")
        for host in HOSTS:
            self._must(host, "link", "set", "lo", "up")
        for host in HOSTS[1:]:
            peer = ("peer", "name", "eth0", "netns", str(self._holders[host].pid))
            self._must(SWITCH, "link", "add", f"to-{host}", "type", "veth", *peer)
            self._must(SWITCH, "link", "set", f"to-{host}", "master", "bridge", "up")
            self._must(host, "addr", "add", f"{self.address_of_real(host)}/24", "dev", "eth0")
            self._must(host, "link", "set", "eth0", "up")
        return True

    @staticmethod
    def address_of_real(host: str) -> str:
        """An address in the namespaces."""
        return _ADDRESSES[True].format(HOSTS.index(host) + 1)

    def _await_namespaces(self) -> bool:
        """Whether each holder has one of its own by now: `unshare` makes it before it becomes `sleep`."""
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline:
            if any(holder.poll() is not None for holder in self._holders.values()):
                return False
            names = {Path(f"/proc/{holder.pid}/comm").read_text() for holder in self._holders.values()}
            if names == {"sleep\n"}:
                return True
            time.sleep(0.02)
        return False

    def _ip(self, host: str, *words: str) -> bool:
        command = ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--", "ip", *words]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False  # there is no `nsenter`

    def _must(self, host: str, *words: str) -> None:
        assert self._ip(host, *words), f"ip {' '.join(words)} on {host}"
