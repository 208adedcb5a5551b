"""What a step computes reaches our manager, and nobody else's; the connector's own answer is left as it is."""

from types import SimpleNamespace
from typing import Any

from xkv_offload import steps


def scheduled(tokens: dict[str, int], drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts or {})


def test_answers_and_drafts_are_no_prompt() -> None:
    assert steps.prompt_tokens(scheduled({})) == 0
    assert steps.prompt_tokens(scheduled({"a": 1, "b": 1})) == 0
    assert steps.prompt_tokens(scheduled({"a": 1, "b": 4, "c": 513}, {"b": [7, 7, 7]})) == 512


def connector_class() -> Any:
    class Connector:
        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return ("meta", scheduler_output)

    return Connector


def test_attached_once_however_often_and_told_once() -> None:
    told: list[int] = []
    connector = connector_class()
    for _ in range(3):
        steps.attach(connector, lambda _connector: told.append)
    step = scheduled({"a": 10})
    assert connector().build_connector_meta(step) == ("meta", step)
    assert told == [9]

    ours = type("Ours", (connector,), {})  # it has the method of the class that has it
    steps.attach(ours, lambda _connector: told.append)
    assert "build_connector_meta" not in vars(ours)


def test_a_subclass_leaves_its_base_alone() -> None:
    told: list[int] = []
    base = connector_class()
    ours = type("Ours", (base,), {})
    steps.attach(ours, lambda _connector: told.append)
    base().build_connector_meta(scheduled({"a": 10}))
    assert told == []
    ours().build_connector_meta(scheduled({"a": 10}))
    assert told == [9]


def test_another_specs_connector_and_an_error_of_ours_change_nothing() -> None:
    def broken(_connector: Any) -> Any:
        raise RuntimeError("boom")

    for observer_of in (lambda _connector: None, broken):
        connector = connector_class()
        steps.attach(connector, observer_of)
        step = scheduled({"a": 10})
        assert connector().build_connector_meta(step) == ("meta", step)
