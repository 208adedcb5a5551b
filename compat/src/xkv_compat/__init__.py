"""Which features a vLLM's KV offloading framework has, found by looking and never by its version.

Owns: the probe table, its live and its source reader, and the door to vLLM's varying symbols.
Must not know: the product that uses it. Standard library only; made to be vendored: it never names
itself, and importing it imports neither torch nor vllm and starts nothing.
"""

# Imports nothing, so that ``__main__`` is reached before any module is looked for; names are filled in when asked for.
TYPE_CHECKING = False
if TYPE_CHECKING:
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
    "__version__",
    "detect_live",
    "detect_source",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import errors, features, probes  # noqa: PLC0415 - see above

    found = next(vars(module)[name] for module in (errors, features, probes) if name in module.__all__)
    globals()[name] = found
    return found
