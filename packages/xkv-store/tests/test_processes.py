"""Gateways that tests start: none outlives whoever started it, however that one ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from xkv_store.testing import processes

if TYPE_CHECKING:
    from pathlib import Path

END_S_MAX: Final = 30.0
OWNER: Final = f"""
import sys, time
from pathlib import Path
from {processes.__name__} import running_gateway
if __name__ == "__main__":
    with running_gateway(Path(sys.argv[1])) as gateway:
        print(gateway.pid, flush=True)
        time.sleep(60)
"""


def test_a_gateway_ends_with_its_owner(tmp_path: Path) -> None:
    """A run that is killed must not leave a gateway with a ring and a card behind."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER, encoding="utf-8")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        gateway = os.pidfd_open(int(owner.stdout.readline()))
        try:
            owner.send_signal(signal.SIGKILL)
            assert select.select([gateway], [], [], END_S_MAX)[0], "the gateway goes on"
        finally:
            os.close(gateway)
