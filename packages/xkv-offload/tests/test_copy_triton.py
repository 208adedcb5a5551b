"""The kernel is compiled for a GPU, by Triton's own compiler: that needs none.

If this goes, what Triton's interpreter takes and its compiler does not is found on a GPU, and so is a kernel that loads
byte by byte where everything is aligned.
"""

import re
from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from xkv_offload.copy_triton import TritonRows, move_rows
from xkv_offload.rows import PIECE_WORDS, ROW_BYTES_MAX, ROW_WORDS
from xkv_offload.staging_area import ALIGNMENT

HOPPER = GPUTarget("cuda", 90, 32)
assert ALIGNMENT % 16 == 0
WIDEST = {1: "b8", 2: "b16", 4: "b32", 8: "b64", 16: "v2.b64"}


@pytest.mark.parametrize("into_pages", [False, True])
@pytest.mark.parametrize("unit", WIDEST)
def test_the_kernel_compiles_and_moves_as_many_bytes_at_once_as_are_aligned(
    unit: int, into_pages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else a newer Triton warns; there is none here
    rows = TritonRows(unit_bytes=unit, largest_page_bytes=ROW_BYTES_MAX)
    constants = {
        "WORDS_PER_PIECE": PIECE_WORDS,
        "WORDS_PER_ROW": ROW_WORDS,
        "ELEMENT": rows._element,
        "ELEMENT_BYTES": rows._element_bytes,
        "VECTOR": rows._vector,
        "TILE": rows._tile,
        "INTO_PAGES": into_pages,
    }
    assert [*constants] == move_rows.arg_names[1:]
    source = ASTSource(
        fn=move_rows,
        signature={"plan": "*i64", **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(0,): [["tt.divisibility", 16]]},  # as the launcher finds of an address: ALIGNMENT is a multiple of it
    )
    made = compile_kernel(source, target=HOPPER, options={"num_warps": rows._warps})
    assert made.asm["cubin"].startswith(b"\x7fELF"), "the assembler has taken it"
    stores = {kind.removeprefix("st.global.") for kind in re.findall(r"st\.global\.[\w.]+", made.asm["ptx"])}
    assert stores == {WIDEST[unit]}
    assert not re.search(r"(ld|st)\.local", made.asm["ptx"]), "nothing is kept outside registers"
