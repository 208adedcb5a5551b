"""Object layout: spans cover every byte once and never cross a fragment."""

from hypothesis import given
from hypothesis import strategies as st

from xkv_offload.layout import ObjectLayout, Page, fragment_range, spans


def test_sizes() -> None:
    layout = ObjectLayout(4, (Page(0, 100), Page(1, 28)))
    assert layout.block_bytes == 128
    assert layout.chunk_bytes == 512


@given(first=st.integers(0, 10_000), length=st.integers(1, 5_000), fragment=st.integers(1, 999))
def test_spans_cover_each_byte_once_in_order(first: int, length: int, fragment: int) -> None:
    at = 0
    for span in spans(first_byte=first, length=length, fragment_bytes=fragment):
        assert span.page_offset == at
        assert span.fragment * fragment + span.offset == first + at
        assert 0 < span.length <= fragment - span.offset
        at += span.length
    assert at == length
    touched = {span.fragment for span in spans(first_byte=first, length=length, fragment_bytes=fragment)}
    assert touched == set(fragment_range(first_byte=first, length=length, fragment_bytes=fragment))
