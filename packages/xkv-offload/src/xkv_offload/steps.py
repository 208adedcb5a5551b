"""What each step of vLLM's scheduler computes, as its connector is told.

Owns: the method of vLLM's connector that passes it on to our manager (put on its class by `attach`, or of a subclass,
`connector`), and how many of a step's tokens are computed of prompts.
Must not know: what the manager makes of it, how long a step takes.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

logger = logging.getLogger(__name__)

METHOD = "build_connector_meta"
_MARK = "_xkv_steps"

Observer = Callable[[int], None]
ObserverOf = Callable[[Any], Observer | None]


def watched(before: Callable[..., Any], observer_of: ObserverOf) -> Callable[..., Any]:
    """The connector's method `before`, which also tells the observer how many prompt tokens the step computes.

    `observer_of(connector)` is None for a connector of another spec, or of ours where nobody wants to know.
    """

    @wraps(before)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        made = before(self, scheduler_output)
        try:
            observer = observer_of(self)
            if observer is not None:
                observer(prompt_tokens(scheduler_output))
        except Exception:
            logger.exception("What a step computes could not be told")
        return made

    vars(build_connector_meta)[_MARK] = True
    return build_connector_meta


def attach(connector_class: Any, observer_of: ObserverOf) -> None:
    """Put ours around the method of `connector_class`. Idempotent."""
    before = connector_class.build_connector_meta
    if _MARK not in vars(before):
        setattr(connector_class, METHOD, watched(before, observer_of))


def prompt_tokens(scheduler_output: Any) -> int:
    """Tokens that a step computes beyond the one (and the drafts) that each request which answers takes anyway."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return sum(
        max(0, tokens - 1 - len(drafts.get(req_id, ())))
        for req_id, tokens in scheduler_output.num_scheduled_tokens.items()
    )
