"""The benchmarks: a table for people, and last one JSON object.

Owns: the command line, the order of the parts, and that a part that fails to run is an error while a bar that is
missed is not: these figures depend on what else the machine does.
Must not know: how anything is measured (the parts do) or what is enough (`report`).

    python bench/run.py [--json] [--quick] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

import starts
import throughput
from report import BARS, Part, as_values, table

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parent.parent
FREE_BYTES_MIN: Final = {True: 5 << 30, False: 20 << 30}  # by `quick`: the card, fio's file and the index


def main() -> int:
    """Run every part; 1 where one has failed to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--quick", action="store_true", help="fewer bytes and runs: for development")
    parser.add_argument("--folder", type=Path, default=ROOT / ".xkv", help="on the file system to measure")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is missing: apt-get install fio", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.folder).free < FREE_BYTES_MIN[options.quick]:
        gib = FREE_BYTES_MIN[options.quick] >> 30
        print(f"less than {gib} GiB are free in {options.folder}: give another --folder", file=sys.stderr)
        return 1
    began = time.monotonic()
    load_before = os.getloadavg()[0]
    result, failed = _run_parts(options.folder, quick=options.quick)
    loads = (round(load_before, 1), round(os.getloadavg()[0], 1))
    if not options.json:
        print(*result.details, "", table(result.figures), "", sep="\n")
        print(f"took {time.monotonic() - began:.0f} s; load of the machine {loads[0]} before, {loads[1]} after\n")
    print(json.dumps({**as_values(result.figures), "quick": options.quick, "load": loads}))
    return 1 if failed or {bar.key for bar in BARS} - result.figures.keys() else 0


def _run_parts(folder: Path, *, quick: bool) -> tuple[Part, list[str]]:
    result, failed = Part(), []

    def run_part(name: str, part: Callable[[], Part]) -> None:
        began = time.monotonic()
        try:
            found = part()
        except Exception:  # noqa: BLE001 -- the other parts' figures are worth having
            traceback.print_exc()
            failed.append(name)
            return
        result.figures |= found.figures
        result.details += [f"{name}: {line}" for line in found.details]
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as own:
        run_part("throughput", lambda: throughput.run(Path(own), quick=quick))
    for size in starts.SIZES_QUICK if quick else starts.SIZES:
        with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as own:
            run_part(f"index of {size.name}", lambda own=own, size=size: starts.run(Path(own), size, quick=quick))
    return result, failed


if __name__ == "__main__":
    sys.exit(main())
