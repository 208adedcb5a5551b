"""From vLLM's connector to our own worker and manager behind it.

Owns: finding them in a connector, whatever spec that serves. Must not know: what fails or is computed, or who asks.
"""

from typing import Any

from xkv_compat.vllm_symbols import connector_manager, connector_workers

from .failures import FailureLog
from .manager import XkvManager
from .steps import Observer
from .worker import XkvWorker


def failure_log(connector: Any) -> FailureLog | None:
    """The log of a connector's worker, if the worker is ours."""
    ours = [worker for worker in connector_workers(connector) if isinstance(worker, XkvWorker)]
    return ours[0].context.failures if ours else None


def step_observer(connector: Any) -> Observer | None:
    """Where a connector's steps are told, if its manager is ours and wants to know."""
    manager = connector_manager(connector)
    return manager.step_scheduled if isinstance(manager, XkvManager) and manager.wants_steps else None
