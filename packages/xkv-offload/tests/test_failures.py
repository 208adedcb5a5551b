"""Channels and the method on vLLM's connector."""

from dataclasses import dataclass, field

import pytest

from xkv_offload.failures import BLOCKS_METHOD, REQUESTS_METHOD, FailureLog, attach, choose, method_names

GOOD = {"request_error_reporting": False, "block_error_reporting": True, "abort_safe": True}


@pytest.mark.parametrize(
    ("change", "full_attention", "world_size", "channel"),
    [
        ({}, (True,), 1, "block_errors"),
        ({}, (True,), 2, "block_errors"),
        ({"abort_safe": False}, (True,), 1, "block_errors"),
        ({"abort_safe": False}, (True,), 2, "verified"),
        ({}, (False,), 1, "verified"),
        ({}, (True, True), 1, "verified"),
        ({"block_error_reporting": False}, (True,), 1, "verified"),
        ({"request_error_reporting": True}, (True,), 1, "request_errors"),
        ({"request_error_reporting": True, "abort_safe": False}, (False, True), 8, "request_errors"),
    ],
)
def test_the_channel_is_chosen_by_feature(
    change: dict[str, bool], full_attention: tuple[bool, ...], world_size: int, channel: str
) -> None:
    plan = choose(features=GOOD | change, full_attention=full_attention, world_size=world_size)
    assert plan.channel == channel
    assert bool(plan.reason) == (channel == "verified")


@dataclass(frozen=True)
class Results:
    finished_recving: set[str]
    failed_recving: set[str] = field(default_factory=set)


class Base:
    def get_block_ids_with_load_errors(self) -> set[int]:
        return {1}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Results:
        return Results({"a", "b", *finished_req_ids}, {"x"})


BOTH = (BLOCKS_METHOD, REQUESTS_METHOD)


def test_the_methods_add_ours_to_what_was_there_once_and_spare_others() -> None:
    class Connector(Base):
        log: FailureLog | None = None

    for _ in range(2):
        attach(Connector, BOTH, lambda connector: connector.log)
    ours, foreign = Connector(), Connector()
    ours.log = FailureLog()
    ours.log.add([5, 6])
    ours.log.add_request("a")
    ours.log.add_request("aborted meanwhile")
    assert ours.get_block_ids_with_load_errors() == {1, 5, 6}
    assert ours.get_block_ids_with_load_errors() == {1}
    assert ours.get_transfer_results({"c"}) == Results({"a", "b", "c"}, {"a", "x"})
    assert ours.get_transfer_results(set()) == Results({"a", "b"}, {"x"})
    assert foreign.get_block_ids_with_load_errors() == {1}
    assert foreign.get_transfer_results(set()) == Results({"a", "b"}, {"x"})
    assert Base().get_block_ids_with_load_errors() == {1}


def test_a_class_that_has_a_method_keeps_it() -> None:
    class Newer(Base):
        def get_block_ids_with_load_errors(self) -> set[int]:
            return {7}

    attach(Newer, BOTH, lambda _: None)
    assert Newer().get_block_ids_with_load_errors() == {7}
    assert "get_transfer_results" in vars(Newer)


def test_only_what_vllm_asks_for_is_attached() -> None:
    assert method_names(GOOD) == (BLOCKS_METHOD,)
    assert method_names(GOOD | {"request_error_reporting": True}) == BOTH
