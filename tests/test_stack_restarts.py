"""Real engines and gateways that end in order and come back.

If these go, nothing shows any more that hits survive a restart, of either side or of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stand.cases import assert_restored, generate, prompts, restore_after_return, store
from stand.gateways import EmbeddedCard, Gateway
from stand.models import LLAMA

if TYPE_CHECKING:
    from pathlib import Path

    from stand.cases import Stand

pytest_plugins = ("stand.fixtures",)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MIB = 1024 * 1024
LINGER_S = 60.0  # longer than an engine's start, so that the second engine meets the first one's gateway


def test_engine_alone_gateway_alone_both(stand: Stand, tmp_path: Path) -> None:
    asked, later = prompts(LLAMA, 1, 2), prompts(LLAMA, 3)
    expected, later_expected = stand.baseline(LLAMA, asked), stand.baseline(LLAMA, later)
    with Gateway(tmp_path) as gateway:
        config = stand.offloading(LLAMA, gateway, blocks_per_chunk=2)
        first_gateway = gateway.pid
        with stand.engine(config) as first:
            store(first, asked, expected)
            gateway.stop()
            gateway.start()
            assert gateway.pid != first_gateway
            restore_after_return(first, asked, expected)
            store(first, later, later_expected)

        with stand.engine(config) as second:
            assert_restored(generate(second, asked), expected)
            assert_restored(generate(second, later), later_expected)

        gateway.stop()
        gateway.start()
        with stand.engine(config) as third:
            assert_restored(generate(third, asked), expected)
            assert_restored(generate(third, later), later_expected)


def test_embedded_gateway_outlives_the_engine_and_comes_back(stand: Stand, tmp_path: Path) -> None:
    asked = prompts(LLAMA, 1, 2)
    expected = stand.baseline(LLAMA, asked)
    with EmbeddedCard(tmp_path / "card", capacity_bytes=128 * MIB, linger_s=LINGER_S) as card:
        config = stand.offloading(LLAMA, card, blocks_per_chunk=16)
        with stand.engine(config) as first:
            store(first, asked, expected)
            gateway = card.gateway_pid()
            assert gateway not in {None, first.pid}

        with stand.engine(config) as second:
            assert card.gateway_pid() == gateway
            assert_restored(generate(second, asked), expected)

        assert card.end_gateway() == gateway
        assert card.gateway_pid() is None
        with stand.engine(config) as third:
            assert card.gateway_pid() not in {None, gateway}
            assert_restored(generate(third, asked), expected)
