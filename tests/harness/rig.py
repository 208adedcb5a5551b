"""What a test holds: one gateway on one card (or several), and the engines that it launches after each other.

Owns: names of launches, the end of everything that was started.
Must not know: what a test is about.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from harness.engine import Engine
from harness.gateway import Gateway
from harness.pipeline import PipelinedEngine
from harness.release import Launch
from xkv_store.geometry import HEADER_BYTES, SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.pipeline import Pipeline
    from harness.shapes import Shape

RING_BYTES = 48 * 1024 * 1024  # three times what the largest case has under way at once


class Rig:
    """Closed by its test's fixture (`contextlib.closing`). Of several `gateways` each rank of an engine has one."""

    def __init__(self, folder: Path, *, slot_bytes: int = SLOT_BYTES, gateways: int = 1) -> None:
        self._folder = folder
        self._slot_bytes = slot_bytes
        self.gateway = Gateway(folder / "gateway", slot_bytes=slot_bytes)
        self.gateways = [self.gateway]
        for number in range(1, gateways):
            folder_of_it = folder / f"gateway-{number}"
            self.gateways.append(Gateway(folder_of_it, slot_bytes=slot_bytes, beside=self.gateways[-1]))
        self._engines: list[Engine] = []
        self._numbers = itertools.count(1)

    def launch(
        self,
        shape: Shape,
        *,
        extra: Mapping[str, Any] | None = None,
        batch_tokens: int = 2048,
        policy: str = "recompute",
        async_scheduling: bool = False,
        pipeline: Pipeline | None = None,
        events: Mapping[str, Any] | None = None,
    ) -> Engine:
        """Start an engine: new process state, new engine id, poisoned memory."""
        launch = Launch(
            folder=self._folder,
            engine_id=f"harness-{next(self._numbers)}",
            extra={**self._extra(), **(extra or {})},
            failure_policy=policy,
            batch_tokens=batch_tokens,
            async_scheduling=async_scheduling,
            events=events,
        )
        engine = Engine(shape, launch) if pipeline is None else PipelinedEngine(shape, launch, pipeline)
        self._engines.append(engine)
        return engine

    def _extra(self) -> dict[str, Any]:
        return {
            **self.gateway.extra,
            "xkv.fragment_bytes": self._slot_bytes - HEADER_BYTES,
            "xkv.ring_bytes": RING_BYTES,
            **({"xkv.port_per_rank": True} if len(self.gateways) > 1 else {}),
        }

    def relaunch(self, engine: Engine, **options: Any) -> Engine:
        """End an engine in order and start another of the same shape."""
        self.end(engine)
        return self.launch(engine.shape, **options)

    def end(self, engine: Engine) -> None:
        """End an engine in order."""
        self._engines.remove(engine)
        engine.close()

    def close(self) -> None:
        """End every engine, then the gateways; the first one's last, for it has the folder of all sockets."""
        with ExitStack() as closing:
            for gateway in self.gateways:
                closing.callback(gateway.close)
            for engine in self._engines:
                closing.callback(engine.close)
