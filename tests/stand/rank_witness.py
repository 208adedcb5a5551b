"""What a rank of a tensor-parallel engine counts beside the product, in the process of its worker.

Owns: the witness of that one process, and the methods by which the engine's process asks it.
Must not know: the scheduler, requests, anything of xkv but the names that it is given.

vLLM imports this module in each worker (`worker_extension_cls`), before the worker makes its offloading.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from stand.engine_server import LOAD_ERROR_METHODS, Witness, _connector_class
from stand.parallel_child import RANK_VARIABLE

WITNESS = Witness()
COUNTERS: dict[str, int] = {}

if text := os.environ.get(RANK_VARIABLE):
    modules, spec_name, counters_module = json.loads(text)
    *_, spec_module = [importlib.import_module(name) for name in modules]
    WITNESS.watch_spec(getattr(spec_module, spec_name))
    COUNTERS = importlib.import_module(counters_module).PROCESS_COUNTERS


class RankWitness:
    """Methods that vLLM adds to its worker, called by name from the engine's process; each answers for its rank."""

    model_runner: Any  # the worker's
    rank: int  # the worker's

    def stand_counters(self) -> dict[str, Any]:
        """Who this rank is, and what it has counted."""
        runner = type(self.model_runner)
        return {
            "pid": os.getpid(),
            "model_runner": f"{runner.__module__}.{runner.__qualname__}",
            "own_connector_methods": sorted(vars(_connector_class()).keys() & LOAD_ERROR_METHODS),
            "seen": dict(WITNESS.counts),
            "product": dict(COUNTERS),
        }

    def stand_zero_loads(self, on: bool, rank: int | None) -> None:
        """Whether pages are zeroed right after they were restored, here or on whichever rank is meant."""
        if rank in {None, self.rank}:
            WITNESS.zero_loads = on
