"""`python -m campaign --seconds N --seed S [--canary] [--json]`, with XKV_TARGET naming the release that is installed.

Owns: nothing but the name. Must not know: what a campaign does, or how a run is told of.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from campaign.run import Campaign
from stand.runs import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from campaign.outcome import Outcome
    from stand.cases import Stand
    from stand.runs import Options


def run(stand: Stand, folder: Path, options: Options, say: Callable[[str], None]) -> Outcome:
    """One campaign."""
    return Campaign(stand, folder, options, say).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], name="campaign", run=run))
