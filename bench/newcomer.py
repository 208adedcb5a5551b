"""How long a newcomer waits: from a fresh clone and an empty environment to the first token of a restored prompt.

Owns: the clone, a home with nothing in it, and the clock. Must not know: what the README's first command does.
`python bench/newcomer.py [--json]`, with the repository's last commit; some minutes and 10 GB, taken away at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_COMMAND = re.compile(r"(?m)^(python3 dev\.py -s demo)\b")  # of the README
STAGES = {
    "tools": "installing nox and uv",
    "environment": "making the environment",
    "engine": "made ",
    "cold": "1 cold: serving the prompt",
    "restored": "2 restored: serving the prompt",
}
"""What is noted, and what a line that tells of it has; a stage of the demo is told of at its end."""
KEPT = re.compile(r"(PATH|LANG|PIP_.*|UV_.*|.*_proxy|SSL_.*)", re.IGNORECASE)  # where packages come from is no cache
RUN_S_MAX = 1_800


def run(home: Path) -> dict[str, float]:
    """Seconds since the clone began, by stage; `end` is the command's own. SystemExit where it fails."""
    found = FIRST_COMMAND.search((ROOT / "README.md").read_text())
    assert found is not None, "the README has another first command"
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    environment |= {"HOME": str(home), "TMPDIR": str(home), "PIP_NO_CACHE_DIR": "1"}
    begun = time.monotonic()
    clone = home / "xkv"
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(clone)], check=True)
    process = subprocess.Popen(
        shlex.split(found[1]), cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seen = {"clone": time.monotonic() - begun}
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(f"{time.monotonic() - begun:7.1f}  {line}")
        for stage, words in STAGES.items():
            if stage not in seen and words in line:
                seen[stage] = time.monotonic() - begun
    if process.wait(RUN_S_MAX):
        raise SystemExit(f"{found[1]}: exit code {process.returncode}")
    seen["end"] = time.monotonic() - begun
    missing = STAGES.keys() - seen
    if missing:
        raise SystemExit(f"nothing was said of {', '.join(sorted(missing))}")
    return {stage: round(seconds, 1) for stage, seconds in seen.items()}


def main() -> None:
    """Run it once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xkv-newcomer-") as home:
        seen = run(Path(home))
    if options.json:
        print(json.dumps(seen))
        return
    for stage, seconds in seen.items():
        print(f"{stage:12} {seconds:7.1f} s")


if __name__ == "__main__":
    main()
