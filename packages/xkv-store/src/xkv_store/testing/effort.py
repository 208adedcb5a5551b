"""How hard the tests try that draw their inputs: the same few inputs each time, or many more by chance.

Owns: the environment variable that says so, what it makes of a test's numbers, and Hypothesis's settings for fuzzing.
Must not know: any test.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hypothesis import settings

ENVIRONMENT_NAME: Final = "XKV_EFFORT"
"""So many times the inputs, with seeds of chance; unset: the inputs of CI, the same each time."""
EFFORT_MAX: Final = 100_000


def effort() -> int:
    """What the environment asks for; 0 where it does not ask."""
    given = os.environ.get(ENVIRONMENT_NAME, "")
    if not given:
        return 0
    if not given.isdigit() or not 1 <= int(given) <= EFFORT_MAX:
        raise ValueError(f"{ENVIRONMENT_NAME} must be a number from 1 to {EFFORT_MAX}, not {given!r}")
    return int(given)


def times(examples: int) -> int:
    """So many examples as are to be tried where CI tries `examples`."""
    return examples * max(1, effort())


def repeats() -> bool:
    """Whether the same inputs are to be tried each time."""
    return effort() == 0


def chances(examples: int) -> settings:
    """How a test of bytes draws its inputs: a decorator. It needs Hypothesis, which this package does not bring."""
    from hypothesis import HealthCheck, Phase, settings  # noqa: PLC0415  nothing else here needs it

    return settings(
        max_examples=times(examples),
        derandomize=repeats(),
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),  # explaining takes hundreds of examples more
        suppress_health_check=list(HealthCheck),
    )
