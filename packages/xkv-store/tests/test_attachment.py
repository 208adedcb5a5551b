"""What a client attaches as, how long it waits between attempts, and that each reason says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xkv_store import attachment as reasons
from xkv_store.attachment import RETRY_MS_MAX, RETRY_MS_MIN, Attachment, retry_ms
from xkv_store.embedded import EmbeddedCard
from xkv_store.sockets import Peer
from xkv_store.wire import RefusedCode, Role


def attachment(socket: str = "/run/xkv/5557.sock", card: EmbeddedCard | None = None) -> Attachment:
    return Attachment(
        socket=Path(socket),
        engine_id="e",
        role=Role.RANK,
        rank=1,
        world_size=2,
        ring_bytes=1 << 30,
        load_reserve_bytes=1 << 28,
        staged_bytes=0,
        fragment_bytes=261_120,
        connect_timeout_ms=5_000,
        heartbeat_timeout_ms=3_000,
        embedded=card,
    )


@given(st.integers(0, 10**9), st.floats(0, 1))
def test_attempts_are_bounded_both_ways(attempt: int, jitter: float) -> None:
    """Neither a busy loop nor a gateway that comes back and is not noticed."""
    assert RETRY_MS_MIN / 2 <= retry_ms(attempt, jitter) <= RETRY_MS_MAX
    assert retry_ms(attempt, 0) == min(RETRY_MS_MAX, RETRY_MS_MIN * 2 ** min(attempt, 10))


@pytest.mark.parametrize("code", RefusedCode)
def test_each_refusal_is_one_line_with_the_gateways_reason(code: RefusedCode) -> None:
    text = str(reasons.refused(attachment(), code, "the reason given"))
    assert "the reason given" in text
    assert "\n" not in text


def test_nobody_there() -> None:
    assert "`xkv gateway run --port 5557`" in str(reasons.nobody_answers(attachment()))
    assert "`xkv gateway run`" in str(reasons.nobody_answers(attachment("/run/xkv/mine.sock")))
    embedded = str(reasons.nobody_answers(attachment(card=EmbeddedCard(folder=Path("/no/such/card")))))
    assert "/no/such/card/gateway.log" in embedded
    assert "its log ends" not in embedded
    assert "pid 12" in str(reasons.nothing_said(attachment(), Peer(12, 3, 4)))
    stopped = str(reasons.nothing_said(attachment(card=EmbeddedCard(folder=Path("/no/such/card"))), Peer(12, 3, 4)))
    assert "kill -9 12" in stopped
    assert "port" not in stopped, "an embedded gateway has none"
    assert "uid 3" in str(reasons.not_trusted(attachment(), Peer(12, 3, 4)))
