"""What releases do wrong by themselves, each pinned where it happens, and what of it we keep from happening."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from harness import ledger, release
from harness.memory import PagesError
from harness.shapes import Shape, mla
from harness.story import prompt
from harness.walks import await_arrival, innermost
from xkv_compat.features import detect_live
from xkv_offload import description
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_store.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engine import Engine, Request
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures", "harness.slow_copies")

BLOCKS = 20
TOKENS = prompt(tokens=16 * BLOCKS + 3, seed=1)
SHAPE = Shape(groups=(mla(layers=2),), blocks=64, blocks_per_chunk=2)
SINGLE_BLOCKS = Shape(groups=(mla(layers=2),), blocks=64, blocks_per_chunk=1)


class Heard:
    """What the manager is told about requests and resets, in order: (method, request, keys)."""

    METHODS = ("on_new_request", "prepare_store", "on_request_finished", "reset_cache", "on_reset_flushed")

    def __init__(self, engine: Engine) -> None:
        self.calls: list[tuple[str, str | None, tuple[bytes, ...]]] = []
        for name in self.METHODS:
            vars(engine.manager)[name] = self._listener(name, getattr(engine.manager, name))

    def _listener(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def listen(*args: Any) -> Any:
            context = args[-1] if args else None
            keys = tuple(args[0]) if len(args) == 2 else ()
            self.calls.append((name, None if context is None else context.req_id, keys))
            return method(*args)

        return listen

    def of(self, req_id: str | None) -> list[str]:
        return [name for name, about, _ in self.calls if about == req_id]


# --- resets ----------------------------------------------------------------------------------------------------------


def storing(rig: Rig) -> Engine:
    """An engine with a request in the middle of its prefill, its first store under way."""
    engine = rig.launch(SHAPE, batch_tokens=96)
    engine.submit("running", TOKENS, output_tokens=2)
    engine.step()
    engine.step()
    assert engine.scheduler.connector.connector_scheduler._jobs
    return engine


def ends_by_a_key_error(engine: Engine, where: str) -> bool:
    """Run to the end. Releases that are not safe for such a reset look a forgotten job up, in `where`, and end."""
    if detect_live()["reset_safe"]:
        engine.run()
        return False
    with pytest.raises(KeyError) as caught:
        engine.run()
    assert innermost(caught.value) == where
    return True


@pytest.mark.usefixtures("copies_across_steps")
def test_a_reset_while_a_running_request_stores(rig: Rig) -> None:
    engine = storing(rig)
    engine.reset_connector()
    if ends_by_a_key_error(engine, "request_finished"):
        return
    assert engine.requests["running"].finish_reason == "length"
    engine.await_stores()
    engine.forget()
    assert engine.serve("after", TOKENS).loads == []


@pytest.mark.usefixtures("copies_across_steps")
def test_a_request_that_stores_again_after_such_a_reset(rig: Rig) -> None:
    engine = storing(rig)
    engine.reset_connector()
    engine.manager._stale.clear()  # what keeps the request from storing again
    if ends_by_a_key_error(engine, "_build_store_jobs"):
        return
    assert engine.requests["running"].finish_reason == "length"


@pytest.mark.usefixtures("copies_across_steps")
def test_a_reset_is_flushed_once_every_old_job_is_reported(rig: Rig) -> None:
    engine = rig.launch(SHAPE, batch_tokens=96)
    heard = Heard(engine)
    engine.reset_connector()
    at_once = ["reset_cache", "on_reset_flushed"] if detect_live()["reset_fence"] else ["reset_cache"]
    assert heard.of(None) == at_once, "nothing was under way"
    engine.submit("finished", prompt(tokens=64, seed=2))
    engine.step()
    old = set(engine.steps[-1].store_jobs)
    assert old
    heard.calls.clear()
    engine.reset_connector()
    assert heard.of(None) == ["reset_cache"], "jobs were under way"
    engine.run()
    assert heard.of(None) == at_once
    engine.await_stores()
    assert ledger.left(engine) == []


# --- the end of a request --------------------------------------------------------------------------------------------


def test_storing_answers_is_refused_where_their_last_chunk_would_be_junk(rig: Rig) -> None:
    if not detect_live()["finish_commit_clamp"]:
        with pytest.raises(UserError, match="offload_prompt_only = false is refused"):
            rig.launch(SINGLE_BLOCKS, extra={"offload_prompt_only": False})
        return
    engine = rig.launch(SINGLE_BLOCKS, extra={"offload_prompt_only": False})
    longer = answered(engine)
    assert engine.serve("longer", longer).loaded() == [(0,)]


def test_why_it_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The last token that was said is never computed, but the release stores the chunk that it would complete.
    monkeypatch.setattr(description, "check_supported", lambda *_: None)
    engine = rig.launch(SINGLE_BLOCKS, extra={"offload_prompt_only": False})
    longer = answered(engine)
    if detect_live()["finish_commit_clamp"]:
        assert engine.serve("longer", longer).loaded() == [(0,)]
        return
    with pytest.raises(PagesError, match=r"the load of layer\.0"):
        engine.serve("longer", longer)


def answered(engine: Engine) -> list[int]:
    """Serve a request whose answer ends with a block; a prompt that begins with all of it."""
    first = prompt(tokens=20, seed=5)
    request = ended_after_its_stores(engine, "answered", first)
    engine.await_stores()
    engine.forget()
    return prompt(tokens=50, seed=6, after=[*first, *request.said])


def ended_after_its_stores(engine: Engine, name: str, tokens: list[int]) -> Request:
    """A request of two blocks in all, which ends when its first block's store has been reported."""
    request = engine.submit(name, tokens, output_tokens=32 - len(tokens))
    engine.step()
    engine.step()
    await_arrival(engine, set(engine.steps[-2].store_jobs))
    engine.step()
    engine.run()
    return request


def test_the_last_store_of_a_request_and_its_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "check_supported", lambda *_: None)
    engine = rig.launch(SINGLE_BLOCKS, extra={"offload_prompt_only": False})
    heard = Heard(engine)
    ended_after_its_stores(engine, "r", prompt(tokens=20, seed=5))
    order = [name for name in heard.of("r") if name != "on_new_request"]
    assert order.count("on_request_finished") == 1
    is_last = order[-1] == "on_request_finished"
    assert is_last == detect_live()["abort_safe"], "the same release ends requests too early"
    assert set(engine.manager._requests) == (set() if is_last else {"r"})  # bounded by REQUESTS_MAX
    engine.await_stores()
    assert ledger.left(engine) == []


def test_a_request_that_the_connector_was_never_told_of(rig: Rig) -> None:
    names = release.names()
    engine = rig.launch(SHAPE)
    heard = Heard(engine)
    stranger = names.Request(
        request_id="stranger",
        prompt_token_ids=TOKENS,
        sampling_params=names.SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=engine._block_hasher,
    )
    engine.scheduler.connector.connector_scheduler.request_finished(stranger)
    told = ["on_new_request", "on_request_finished"] if detect_live()["single_worker"] else ["on_request_finished"]
    assert heard.of("stranger") == told
    assert ledger.left(engine) == []


# --- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [True, False], ids=["restored", "computed anew"])
def test_a_preempted_request_is_waited_for_and_resumed(
    rig: Rig, slow_copies: Callable[[float], None], is_there: bool
) -> None:
    slow_copies(0.01)
    put_before = PROCESS_COUNTERS["store_objects"]
    shape = Shape(groups=(mla(layers=2),), blocks=20, blocks_per_chunk=1)
    engine = rig.launch(shape)
    heard = Heard(engine)
    waited: list[set[int]] = []
    worker = engine.ranks[0].worker
    wait = worker.wait

    def waits(jobs: set[int]) -> None:
        waited.append(set(jobs))
        wait(jobs)

    vars(worker)["wait"] = waits
    stays = engine.submit("stays", prompt(tokens=16 * 10, seed=1), output_tokens=20)
    goes = engine.submit("goes", prompt(tokens=16 * 9, seed=2), output_tokens=20)
    engine.step()
    stored = {job for job, one in engine.steps[0].store_jobs.items() if one.req_id == "goes"}
    assert engine.step().preempted == {"goes"}
    assert waited[0] >= stored
    before = {key for _, about, keys in heard.calls if about == "goes" for key in keys}
    assert len(before) == 9
    count = len(heard.calls)
    if not is_there:
        rig.gateway.kill()
    engine.run()
    assert {stays.finish_reason, goes.finish_reason} == {"length"}
    assert [load[-1] for load in goes.loaded()] == ([8] if is_there else [])
    again = {key for _, about, keys in heard.calls[count:] if about == "goes" for key in keys if key in before}
    if is_there:
        assert again == set()
        rig.gateway.await_objects(19)
        assert PROCESS_COUNTERS["store_objects"] - put_before == 19, "something is put twice"
    else:  # releases with a lock around the manager's calls begin again at the first chunk
        assert again == (before if detect_live()["manager_lock"] else set())
    assert ledger.left(engine) == []
