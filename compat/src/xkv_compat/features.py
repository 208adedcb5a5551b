"""Which features a vLLM has: the probe table evaluated by one of the two readers.

Owns: evaluating terms, the frozen result, and remembering the live one.
Must not know: how a probe is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from .errors import BadInput, UnsupportedVLLM
from .live import LiveReader, import_module
from .probes import FEATURES, REQUIREMENTS, AllOf, AnyOf, Not, Probe, Term, probes_of
from .source import SourceReader, Tree

__all__ = ["Features", "Reader", "detect_live", "detect_source", "evaluate", "installed_version"]


class Reader(Protocol):
    """Whatever answers probes."""

    def found(self, probe: Probe) -> bool:
        """Whether what the probe looks for is there."""
        ...


class Features(Mapping[str, bool]):
    """Feature name → present; a frozen mapping. Asking for a name that is not in the table is a KeyError.

    Attributes:
        missing: for each absent feature, the probes of its term that found nothing.
        unmet: one line for each requirement that was found under none of its names.
        where: the installed version's text, or the tree's folder.
    """

    __slots__ = ("_present", "missing", "unmet", "where")

    def __init__(
        self,
        present: Mapping[str, bool],
        missing: Mapping[str, tuple[str, ...]],
        unmet: tuple[str, ...],
        where: str,
    ) -> None:
        self._present = MappingProxyType(dict(present))
        self.missing = MappingProxyType(dict(missing))
        self.unmet = unmet
        self.where = where

    def __getitem__(self, name: str) -> bool:
        return self._present[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)

    def __hash__(self) -> int:
        return hash((tuple(self._present.items()), self.unmet))

    def __repr__(self) -> str:
        found = ", ".join(name for name, present in self._present.items() if present)
        return f"Features({self.where}: {found})"

    @property
    def supported(self) -> bool:
        """Whether every requirement is met."""
        return not self.unmet

    def require(self) -> None:
        """Raise UnsupportedVLLM that lists everything missing at once, unless all requirements are met."""
        if self.unmet:
            raise UnsupportedVLLM(self.unmet, self.where)


def evaluate(reader: Reader, where: str) -> Features:
    """Evaluate the whole table; each probe is asked at most once."""
    answers: dict[Probe, bool] = {}

    def found(probe: Probe) -> bool:
        if probe not in answers:
            answers[probe] = reader.found(probe)
        return answers[probe]

    def holds(term: Term) -> bool:
        if isinstance(term, Probe):
            return found(term)
        if isinstance(term, AllOf):
            return all(holds(inner) for inner in term.terms)
        if isinstance(term, AnyOf):
            return any(holds(inner) for inner in term.terms)
        assert isinstance(term, Not)
        return not holds(term.term)

    present = {feature.name: holds(feature.term) for feature in FEATURES}
    missing = {
        feature.name: tuple(str(probe) for probe in probes_of(feature.term) if not found(probe))
        for feature in FEATURES
        if not present[feature.name]
    }
    unmet = tuple(
        f"{requirement.name}: no " + ", nor ".join(str(probe) for probe in requirement.one_of)
        for requirement in REQUIREMENTS
        if not any(found(probe) for probe in requirement.one_of)
    )
    return Features(present, missing, unmet, where)


def installed_version() -> str:
    """The installed vLLM's version as opaque text; BadInput where no vLLM is installed."""
    package = import_module("vllm")
    if package is None:
        raise BadInput("no vLLM is installed in this Python; install it, or name a source tree with --source")
    version = import_module("vllm.version")
    found = getattr(version, "__version__", None) if version is not None else None
    return str(found if found is not None else getattr(package, "__version__", "unknown"))


@lru_cache(maxsize=1)
def detect_live() -> Features:
    """The features of the vLLM that this interpreter imports; found on the first call, then remembered."""
    return evaluate(LiveReader(), installed_version())


def detect_source(tree: str | Path) -> Features:
    """The features of a source tree (the folder that holds ``vllm``, or that package), importing nothing."""
    source = Tree(Path(tree))
    return evaluate(SourceReader(source), str(source.package))
