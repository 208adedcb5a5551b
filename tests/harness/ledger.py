"""What an engine still holds once nothing is left to do: blocks, jobs, promises and slots.

Owns: where vLLM's scheduler, both sides of its connector, and our manager and workers keep account of what is under
way, and the count of what is left there.
Must not know: what happened before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.engine import Engine

GIVEN_BACK_S_MAX = 2.0

# Where each keeps what is under way, as far as a release has the place at all; empty at rest.
_SCHEDULER = {
    "requests", "running", "waiting", "skipped_waiting", "finished_recving_kv_req_ids", "failed_recving_kv_req_ids"
}  # fmt: skip
_CONNECTOR_SCHEDULER = {
    "_req_status", "_jobs", "_block_id_to_pending_jobs", "_chunks_being_loaded", "_reqs_being_loaded",
    "_blocks_being_loaded", "_current_batch_load_jobs", "_current_batch_jobs_to_flush", "_reset_fence",
}  # fmt: skip
_CONNECTOR_WORKER = {"_load_jobs", "_unsubmitted_store_jobs"}
_MANAGER = {"_live", "_prepared_bytes", "_touched"}
_STAGING = {"_requests", "_queue", "_chunks", "_in_jobs", "_quarantine"}
_WORKER = {"_jobs"}
_PLACES_MIN = {
    "scheduler": 3,
    "connector": 5,
    "worker's connector": 2,
    "manager": 2,
    "staging": 5,
    "worker": 1,
}  # else it is renamed


def left(engine: Engine) -> list[str]:
    """What is left, a line each. The engine must be idle, and the gateway have answered (`await_stores`)."""
    side = engine.scheduler.connector.connector_scheduler
    found = _left("scheduler", engine.scheduler, _SCHEDULER)
    found += _left("connector", side, _CONNECTOR_SCHEDULER)
    found += _left("manager", engine.manager, _MANAGER)
    staging = engine.manager._staging
    if staging is not None:
        staging.end_step()  # reads that nobody waits for any more
        found += _left("staging", staging, _STAGING)
        found += [f"{staging._reads.slots - staging._reads.free} staged slots are not free"] * (
            staging._reads.slots != staging._reads.free
        )
    pool = engine.scheduler.kv_cache_manager.block_pool
    free, all_ = pool.get_num_free_blocks(), engine.shape.blocks - 1  # one is the null block
    found += [f"{all_ - free} blocks are not free"] if free != all_ else []
    for rank in engine.ranks:
        found += _left("worker's connector", rank.connector.connector_worker, _CONNECTOR_WORKER)
        found += _left("worker", rank.worker, _WORKER)
        found += [f"rank {rank.rank} waits for loads {sorted(rank.loads)}"] if rank.loads else []
    return found + _slots(engine)


def _slots(engine: Engine) -> list[str]:
    """Slots that are not given back soon: the threads that do it come after what vLLM is told."""
    end = time.monotonic() + GIVEN_BACK_S_MAX
    while True:
        clients = [rank.worker.context.client for rank in engine.ranks]
        regions = [region for client in clients for region in (client.lease_budget, client.store_region)]
        found = [f"{one.count - one.free} slots are not free" for one in regions if one.free != one.count]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.002)


def _left(who: str, holder: Any, places: set[str]) -> list[str]:
    here = {name: value for name, value in vars(holder).items() if name in places}
    assert len(here) >= _PLACES_MIN[who], f"{who} has no places but {sorted(here)}"
    return [f"{who}: {name} holds {value!r}" for name, value in here.items() if value]
