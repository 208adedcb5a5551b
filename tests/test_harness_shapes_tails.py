"""Tails: the state at the prompt's last hash, inside a block, is an object of its own where a release stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import release
from harness.refusals import refused
from harness.shapes import Shape, full, mamba
from harness.story import prompt

if TYPE_CHECKING:
    from harness.engine import Engine, Request
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

# Blocks of 16 tokens and hashes of 4: after 206 tokens, the last block has a hash after 12 of its 14 rows.
SHAPE = Shape(groups=(full(padding_bytes=512), mamba()), blocks=64, shared=True, hash_tokens=4)
TOKENS = prompt(tokens=206, seed=1)
WHOLE = [tuple(range(12))], [(11,)]
WITH_TAIL = [tuple(range(13))], [(12,)]


def restores_tails() -> bool:
    """Where hits are verified first, vLLM does not wait for a tail once it has the chunks before it."""
    return release.stores_tails() and release.channel(SHAPE) != "verified"


def restored(engine: Engine, name: str, tokens: list[int]) -> Request:
    """Serve a prompt with nothing in the engine itself."""
    engine.await_stores()
    engine.forget()
    return engine.serve(name, tokens, output_tokens=20)


def test_a_tail_is_restored(rig: Rig) -> None:
    if refused(rig, SHAPE):
        return
    first = rig.launch(SHAPE)
    first.serve("cold", TOKENS, output_tokens=3)
    pages = [release.sides(job)[0] for step in first.steps for job in step.store_jobs.values()]
    tails = [(list(one.group_sizes), list(one.block_indices)) for one in pages if max(one.block_indices) == 12]
    assert tails == ([([1, 1], [12, 12])] if release.stores_tails() else [])
    rig.gateway.await_objects(12 + 1 + 2 * len(tails))

    second = rig.relaunch(first)
    request = second.serve("restored", TOKENS, output_tokens=20)
    assert (request.loaded(0), request.loaded(1)) == (WITH_TAIL if restores_tails() else WHOLE)
    assert request.computed_tokens == 206 - (204 if restores_tails() else 192) + 19


def test_a_tail_is_of_its_own_prefix_alone(rig: Rig) -> None:
    # Two prompts part inside the block: each has its tail there, and a third that leaves earlier has neither.
    if refused(rig, SHAPE):
        return
    first = rig.launch(SHAPE)
    other = prompt(tokens=203, seed=2, after=TOKENS[:198])
    first.serve("cold", TOKENS, output_tokens=3)
    first.serve("other", other, output_tokens=3)
    first.await_stores()
    with_tail = WITH_TAIL if restores_tails() else WHOLE

    second = rig.relaunch(first)
    longer = restored(second, "longer", prompt(tokens=230, seed=3, after=TOKENS))
    assert (longer.loaded(0), longer.loaded(1)) == with_tail
    assert longer.computed_tokens == 230 - (204 if restores_tails() else 192) + 19
    again = restored(second, "other again", other)
    assert (again.loaded(0), again.loaded(1)) == with_tail
    assert again.computed_tokens == 203 - (200 if restores_tails() else 192) + 19
    third = restored(second, "third", prompt(tokens=206, seed=4, after=TOKENS[:195]))
    assert (third.loaded(0), third.loaded(1)) == WHOLE


def test_a_tail_with_nothing_before_it_is_restored(rig: Rig) -> None:
    # Shorter than a block: the tail is all there is, and vLLM waits for it also where hits are verified first.
    tokens = prompt(tokens=14, seed=5)
    if refused(rig, SHAPE):
        return
    first = rig.launch(SHAPE)
    first.serve("cold", tokens, output_tokens=3)
    objects = 2 if release.stores_tails() else 0
    rig.gateway.await_objects(objects)
    request = rig.relaunch(first).serve("restored", tokens, output_tokens=5)
    assert (request.loaded(0), request.loaded(1)) == (([(0,)], [(0,)]) if objects else ([], []))
    assert request.computed_tokens == 14 - (12 if objects else 0) + 4
