"""The benchmarks: a table for people, and last one JSON object.

Owns: the command line, the order of the parts, and that a part that fails to run is an error while a bar that is
missed is not: these figures depend on what else the machine does.
Must not know: how anything is measured (the parts do) or what is enough (`report`).

    python bench/run.py --release-python PYTHON [--json] [--quick] [--folder DIR] [--part NAME ...]

PYTHON is that of an environment with vLLM, whose own functions and whose engine are measured.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # the stand: how real engines are run

import decode
import in_memory
import loads
import starts
import submits
import throughput
from release import Release
from report import BARS, Part, as_values, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[Path], Part]

ROOT: Final = Path(__file__).resolve().parent.parent
FREE_BYTES_MIN: Final = {True: 12 << 30, False: 24 << 30}  # by `quick`: a card, fio's file, the largest index
MEMORY_BYTES_MIN: Final = {True: 6 << 30, False: 12 << 30}  # on a tmpfs: a card of 4 GB, as much in files; rings


def main() -> int:
    """Run every part; 1 where one has failed to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release-python", required=True, metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--quick", action="store_true", help="fewer bytes and runs: for development")
    parser.add_argument("--folder", type=Path, default=ROOT / ".xkv", help="on the file system to measure")
    parser.add_argument("--part", action="append", help="only these (then most figures are missing: exit code 1)")
    options = parser.parse_args()
    quick = options.quick
    problem = _problem(options.folder, quick=quick)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    began = time.monotonic()
    load_before = os.getloadavg()[0]
    parts = _parts(Release(options.release_python), quick=quick)
    unknown = set(options.part or ()) - parts.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    chosen = {name: part for name, part in parts.items() if name in (options.part or parts)}
    people = sys.stderr if options.json else sys.stdout
    result, failed = _run_parts(chosen, options.folder, people)
    loads_text = f"load of the machine {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(table(result.figures), "", sep="\n", file=people)
    print(f"took {time.monotonic() - began:.0f} s{', quick' if quick else ''}; {loads_text}", file=people)
    print(*(f"failed: {name}: {reason}" for name, reason in failed), "", sep="\n", file=people)
    print(json.dumps(as_values(result.figures)), flush=True)
    return 1 if failed or {bar.key for bar in BARS} - result.figures.keys() else 0


def _problem(folder: Path, *, quick: bool) -> str | None:
    """Why nothing can be measured here."""
    if shutil.which("fio") is None:
        return "fio is missing: apt-get install fio"
    folder.mkdir(parents=True, exist_ok=True)
    for place, least in ((folder, FREE_BYTES_MIN[quick]), (in_memory.MEMORY, MEMORY_BYTES_MIN[quick])):
        if shutil.disk_usage(place).free < least:
            return f"less than {least >> 30} GiB are free in {place}"
    if _available_bytes() < MEMORY_BYTES_MIN[quick]:
        return f"less than {MEMORY_BYTES_MIN[quick] >> 30} GiB of memory are free"
    return None


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}["MemAvailable"] << 10


def _parts(release: Release, *, quick: bool) -> dict[str, Run]:
    """Every part by its name, in order; each gets a folder of its own."""
    sizes = starts.SIZES_QUICK if quick else starts.SIZES
    return {
        "decode": partial(decode.run, release=release, quick=quick),
        "throughput": partial(throughput.run, quick=quick),
        "memory": lambda _folder: in_memory.run(quick=quick),
        "loads": partial(loads.run, release=release, quick=quick),
        "submits": partial(submits.run, quick=quick),
        **{f"index-{size.name}": partial(starts.run, size=size, quick=quick) for size in sizes},
    }


def _run_parts(parts: dict[str, Run], folder: Path, people: TextIO) -> tuple[Part, Sequence[tuple[str, str]]]:
    """Each part in turn, and what it says as soon as it has ended."""
    result, failed = Part(), []
    for name, part in parts.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as own:
            try:
                found = part(Path(own))
            except Exception as error:  # noqa: BLE001 -- the other parts' figures are worth having
                traceback.print_exc()
                failed.append((name, str(error).splitlines()[0] if str(error) else type(error).__name__))
                continue
        result.add(found)
        print(*(f"{name}: {line}" for line in found.details), sep="\n", file=people, flush=True)
        print(f"{name}: took {time.monotonic() - began:.0f} s\n", file=people, flush=True)
    return result, failed


if __name__ == "__main__":
    sys.exit(main())
