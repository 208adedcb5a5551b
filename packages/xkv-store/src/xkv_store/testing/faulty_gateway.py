"""`python -m <package>.testing.faulty_gateway <words of xkv>`: a gateway whose medium fails as a plan says.

Owns: the environment variable XKV_FAULTS=<folder>, with `plan.json` (`FaultPlan.to_json`) in it, and the file
`effects` there, a line for each fault that took effect.
Must not know: what a plan may hold. No gateway but this one looks at the variable.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .. import cli  # noqa: TID252  the package may have another name
from .faults import FaultPlan, Injector, Kind, Operation, put_under

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENT_NAME: Final = "XKV_FAULTS"
_PLAN: Final = "plan.json"
_EFFECTS: Final = "effects"


def write_plan(folder: Path, plan: FaultPlan) -> None:
    """Lay a plan where a gateway with XKV_FAULTS=<folder> finds it."""
    folder.mkdir(exist_ok=True)
    (folder / _PLAN).write_text(plan.to_json(), encoding="ascii")


def effects(folder: Path) -> Counter[tuple[Operation, Kind]]:
    """What has gone wrong in the gateways that used the folder."""
    file = folder / _EFFECTS
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return Counter((Operation(operation), Kind(kind)) for operation, kind in (line.split("/") for line in lines))


def main(words: Sequence[str]) -> int:
    """`xkv` with these words, on the medium of the environment's plan."""
    folder = Path(os.environ[ENVIRONMENT_NAME])
    put_under(Injector(FaultPlan.from_json((folder / _PLAN).read_text(encoding="ascii")), folder / _EFFECTS))
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
