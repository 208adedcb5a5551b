"""An engine of several ranks, in a child of the engine server.

Owns: the engine core (in this process, so that it can be stepped), and what its ranks have counted together.
Must not know: tests, expected results, anything of xkv but the names that it is given.

The ranks are processes that vLLM itself spawns: each imports everything anew, which takes most of a start.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING

from stand.engine_server import EngineChild, Witness

if TYPE_CHECKING:
    from stand.engine_server import Message

# What each rank's witness imports, watches and reads, as JSON: modules in vLLM's order, spec, module of the counters.
RANK_VARIABLE = "XKV_STAND_RANK"


class ParallelChild(EngineChild):
    """One engine and the requests that its connection makes. Its counters are sums over scheduler and ranks."""

    def __init__(self, request: Message) -> None:
        self._witness = Witness()
        self._product_counters = {}
        arguments = request["llm"]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _a_core_for_each(arguments["tensor_parallel_size"])
        arguments["worker_extension_cls"] = "stand.rank_witness.RankWitness"
        if request["kv_transfer_config"] is not None:
            transfer = request["kv_transfer_config"]
            extra, own_connector = transfer["kv_connector_extra_config"], transfer["kv_connector_module_path"]
            modules = [*([own_connector] if own_connector else ()), extra["spec_module_path"]]
            os.environ[RANK_VARIABLE] = json.dumps([modules, extra["spec_name"], request["counters_module"]])
        self._llm = self._build(request)
        core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._witness.watch_scheduler(core.scheduler)
        ranks = self._ranks()
        self.description = {
            "model_runner": " beside ".join(one["model_runner"] for one in ranks),
            "groups": len(core.scheduler.kv_cache_config.kv_cache_groups),
            "ranks": [one["pid"] for one in ranks],
            "own_connector_methods": sorted({name for one in ranks for name in one["own_connector_methods"]}),
            "block_size": int(self._llm.llm_engine.vllm_config.cache_config.block_size),
        }

    def _ranks(self) -> list[Message]:
        return list(self._llm.collective_rpc("stand_counters"))

    def _counters(self, request: Message) -> Message:
        found = super()._counters(request)
        for rank in self._ranks():
            for what, own in found.items():
                total: Counter[str] = Counter(own)
                total.update(rank[what])
                found[what] = dict(total)
        return found

    def _zero_loads(self, request: Message) -> Message:
        self._llm.collective_rpc("stand_zero_loads", args=(request["on"], request["rank"]))
        return {}


def _a_core_for_each(ranks: int) -> str:
    """In vLLM's words, whose own choice wants a NUMA node for each."""
    allowed = sorted(os.sched_getaffinity(0))
    return "|".join(str(allowed[rank % len(allowed)]) for rank in range(ranks))
