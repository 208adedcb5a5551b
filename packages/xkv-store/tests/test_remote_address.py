"""A remote's address: what may be typed, and that an error says what to type."""

from __future__ import annotations

import pytest

from xkv_store.errors import UserError
from xkv_store.remote_address import EXAMPLE, HANDSHAKE, RemoteAddress


def test_an_address_and_all_that_may_come_behind_it() -> None:
    found = RemoteAddress.parse("mooncake://m.example:50051", "--remote")
    assert (found.master, found.host, found.protocol, found.metadata) == ("m.example:50051", "", "tcp", HANDSHAKE)
    assert found.segment_bytes == 0
    text = "mooncake://[fd00::1]:7?host=h&protocol=rdma&device=mlx5_0&metadata=http://m:1/x&segment=2GiB&memory=8MiB"
    found = RemoteAddress.parse(text, "--remote")
    assert (found.text, found.master, found.device) == (text, "[fd00::1]:7", "mlx5_0")
    assert (found.metadata, found.segment_bytes, found.memory_bytes) == ("http://m:1/x", 2 << 30, 8 << 20)
    assert RemoteAddress.parse(EXAMPLE, "--remote").segment_bytes == 64 << 30


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("10.0.0.1:50051", "type for example"),
        ("redis://h:1", "type for example"),
        ("mooncake://h", "type for example"),
        ("mooncake://h:port", "type for example"),
        ("mooncake://h:1/path", "type for example"),
        ("mooncake://h:1?segments=1GiB", "segment"),
        ("mooncake://h:1?segment=much", "segment"),
        ("mooncake://h:1?segment=1GiB&segment=2GiB", "twice"),
        ("mooncake://h:1?host=", "empty"),
        ("mooncake://h:1?protocol=udp", "tcp or rdma"),
        ("mooncake://h:1?memory=1MiB", "at least"),
        ("mooncake://h:1?segment", "NAME=VALUE"),
    ],
)
def test_anything_else_is_an_error_that_names_the_option(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word) as error:
        RemoteAddress.parse(text, "xkv.remote")
    assert "xkv.remote" in str(error.value)
