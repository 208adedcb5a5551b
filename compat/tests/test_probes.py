"""The table itself: without these, a feature could be unreachable, unexplained or asked for twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_compat import FEATURES, REQUIREMENTS, detect_source
from xkv_compat.probes import Kind, probes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_names_are_unique_and_explained() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
    assert all(feature.since and feature.present and feature.absent for feature in FEATURES)
    assert all(requirement.one_of for requirement in REQUIREMENTS)


def test_every_kind_is_used_and_every_probe_is_complete() -> None:
    """A kind that no feature uses would be code that nothing runs."""
    probes = {probe for feature in FEATURES for probe in probes_of(feature.term)}
    assert {probe.kind for probe in probes} == set(Kind)
    for probe in probes:
        assert probe.module.startswith("vllm.")
        assert bool(probe.name) == (probe.kind is not Kind.MODULE)
        assert bool(probe.owner) == (probe.kind not in {Kind.MODULE, Kind.SYMBOL}), probe


def test_the_full_tree_has_every_feature(
    make_tree: Callable[[dict[str, str]], Path], full_files: dict[str, str]
) -> None:
    """The other tests take something away from this tree: it must have everything first."""
    features = detect_source(make_tree(full_files))
    assert features.supported
    assert [name for name, found in features.items() if not found] == []
