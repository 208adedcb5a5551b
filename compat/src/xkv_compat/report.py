"""The report: which features a vLLM has, as an aligned table or as JSON.

Owns: the command line of the package, its output and its exit codes (0 usable, 1 not, 2 bad input).
Must not know: how features are found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from .errors import BadInput, BrokenVLLM
from .features import detect_live, detect_source
from .probes import FEATURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .features import Features

__all__ = ["EXIT_BAD_INPUT", "EXIT_OK", "EXIT_UNSUPPORTED", "as_json", "as_text", "main"]

EXIT_OK = 0
EXIT_UNSUPPORTED = 1
EXIT_BAD_INPUT = 2


def as_json(features: Features) -> dict[str, Any]:
    """The report as json-able data."""
    return {
        "where": features.where,
        "verdict": "usable" if features.supported else "unsupported",
        "unmet": list(features.unmet),
        "features": dict(features),
        "missing": {name: list(probes) for name, probes in features.missing.items()},
    }


def as_text(features: Features) -> str:
    """The report as an aligned table: feature, found or not, and what that means."""
    width = max(len(feature.name) for feature in FEATURES)
    since = max(len(feature.since) for feature in FEATURES)
    lines = [f"vLLM: {features.where}", ""]
    for feature in FEATURES:
        found = features[feature.name]
        meaning = feature.present if found else feature.absent
        lines.append(f"{feature.name:<{width}}  {'yes' if found else 'no ':<3}  {feature.since:<{since}}  {meaning}")
    lines.append("")
    if features.supported:
        lines.append(f"usable: {sum(features.values())} of {len(features)} features found")
    else:
        lines.append(f"unsupported: {len(features.unmet)} needed symbol(s) missing")
        lines.extend(f"  - {line}" for line in features.unmet)
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Which features a vLLM's KV offloading framework has, found by looking.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="print the features found and missing")
    report.add_argument("--source", metavar="TREE", help="a source tree that holds vllm/ (nothing of it is imported)")
    report.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Prints to stdout, errors to stderr in one line."""
    options = _parser().parse_args(arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # importing some releases logs to stdout
            features = detect_live() if options.source is None else detect_source(options.source)
    except (BadInput, BrokenVLLM) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_BAD_INPUT
    text = json.dumps(as_json(features), indent=2) if options.json else as_text(features)
    sys.stdout.write(f"{text}\n")
    return EXIT_OK if features.supported else EXIT_UNSUPPORTED
