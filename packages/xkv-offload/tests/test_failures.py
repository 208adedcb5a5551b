"""Channels and the method on vLLM's connector."""

import pytest

from xkv_offload.failures import FailureLog, attach, choose

GOOD = {"block_error_reporting": True, "abort_safe": True}


@pytest.mark.parametrize(
    ("change", "full_attention", "world_size", "channel"),
    [
        ({}, (True,), 1, "block_errors"),
        ({}, (True,), 2, "block_errors"),
        ({"abort_safe": False}, (True,), 1, "block_errors"),
        ({"abort_safe": False}, (True,), 2, "none"),
        ({}, (False,), 1, "none"),
        ({}, (True, True), 1, "none"),
        ({"block_error_reporting": False}, (True,), 1, "none"),
    ],
)
def test_the_channel_is_chosen_by_feature(
    change: dict[str, bool], full_attention: tuple[bool, ...], world_size: int, channel: str
) -> None:
    plan = choose(features=GOOD | change, full_attention=full_attention, world_size=world_size)
    assert plan.channel == channel
    assert bool(plan.reason) == (channel == "none")


class Base:
    def get_block_ids_with_load_errors(self) -> set[int]:
        return {1}


def test_the_method_adds_ours_to_what_was_there_once_and_spares_others() -> None:
    class Connector(Base):
        log: FailureLog | None = None

    for _ in range(2):
        attach(Connector, lambda connector: connector.log)
    ours, foreign = Connector(), Connector()
    ours.log = FailureLog()
    ours.log.add([5, 6])
    assert ours.get_block_ids_with_load_errors() == {1, 5, 6}
    assert ours.get_block_ids_with_load_errors() == {1}
    assert foreign.get_block_ids_with_load_errors() == {1}
    assert Base().get_block_ids_with_load_errors() == {1}


def test_a_class_that_has_the_method_is_left_alone() -> None:
    class Newer(Base):
        def get_block_ids_with_load_errors(self) -> set[int]:
            return {7}

    attach(Newer, lambda _: None)
    assert Newer().get_block_ids_with_load_errors() == {7}
