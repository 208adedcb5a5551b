"""From vLLM's connector to the failures that ours has logged.

Owns: finding our worker in a connector, whatever spec that serves. Must not know: what fails, or who asks.
"""

from typing import Any

from xkv_compat.vllm_symbols import connector_workers

from .failures import FailureLog
from .worker import XkvWorker


def failure_log(connector: Any) -> FailureLog | None:
    """The log of a connector's worker, if the worker is ours."""
    ours = [worker for worker in connector_workers(connector) if isinstance(worker, XkvWorker)]
    return ours[0].context.failures if ours else None
