"""Going on after a reset of the connector with jobs under way, which some releases do not survive.

Owns: that fault of theirs, told from any other.
Must not know: what was reset, and what a test is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_compat.features import detect_live

if TYPE_CHECKING:
    from harness.engine import Engine

STEPS_FOR_EVER = 200  # a request that waits for so many steps, after everything was reported, waits for ever


def outlives_its_reset(engine: Engine) -> bool:
    """Run to the end; or into vLLM's own fault: without `reset_safe` requests keep jobs that the reset has dropped."""
    if detect_live()["reset_safe"]:
        engine.run()
        return True
    connector = engine.scheduler.connector.connector_scheduler
    dropped = {job for status in connector._req_status.values() for job in status.transfer_jobs} - set(connector._jobs)
    assert dropped
    end, error = len(engine.steps) + STEPS_FOR_EVER, None
    try:
        engine.run(lambda: len(engine.steps) == end)
    except KeyError as found:
        error = found
    if error is None:
        assert not engine.is_idle(), "the request did not wait for its dropped job"
    else:
        assert error.args[0] in dropped
    return False
