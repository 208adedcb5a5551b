"""Which features a vLLM's KV offloading framework has, found by looking and never by its version.

Owns: the probe table, its live and its source reader, and the door to vLLM's varying symbols.
Must not know: the product that uses it. Standard library only; made to be vendored: it never names
itself, and importing it imports neither torch nor vllm and starts nothing.
"""

from __future__ import annotations

from .errors import BadInput, BrokenVLLM, CompatError, UnsupportedVLLM
from .features import Features, detect_live, detect_source
from .probes import FEATURES, REQUIREMENTS, Feature, Kind, Probe, Requirement

__all__ = [
    "FEATURES",
    "REQUIREMENTS",
    "BadInput",
    "BrokenVLLM",
    "CompatError",
    "Feature",
    "Features",
    "Kind",
    "Probe",
    "Requirement",
    "UnsupportedVLLM",
    "detect_live",
    "detect_source",
]
