"""The shapes of engines that the harness builds, as plain data.

Owns: groups of layers, their kinds of attention and page sizes; where each layer's pages lie in a rank's memory,
with guard bytes around them.
Must not know: vLLM, tokens, the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["mla", "full", "sliding", "mamba", "ring"]
StateMode = Literal["none", "align", "all"]

ELEMENT_BYTES = 4  # float32, which every platform has
GUARD_BYTES = 4096  # before, between and after the layers' regions; a multiple of every element's size


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One KV-cache group.

    `head_elements`: of one head and token: K and V together, or MLA's latent; of the whole state for Mamba, whose page
    is one state. `padding_bytes`: at each page's end. `window`: tokens that a sliding layer sees, its own included.
    `state_mode`: Mamba's; at which positions states are kept. A ring is one block per request, written round and round,
    and no part of a prefix. `is_draft`: an EAGLE or MTP draft model's layers.
    """

    kind: Kind
    layers: tuple[str, ...]
    block_tokens: int = 16
    heads: int = 1
    head_elements: int
    padding_bytes: int = 0
    window: int | None = None
    state_mode: StateMode = "align"
    is_draft: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, all heads; or of a state."""
        return self.heads * self.head_elements * ELEMENT_BYTES

    @property
    def page_rows(self) -> int:
        """Tokens' rows in a page, or one state."""
        return 1 if self.kind == "mamba" else self.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's page that mean something."""
        return self.page_rows * self.row_bytes

    @property
    def stride_bytes(self) -> int:
        """From one page to the next."""
        return self.page_bytes + self.padding_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One engine. `shared`: the n-th layers of all groups lie on the same memory, as vLLM's hybrid models do.

    `packed`: a block's pages of all regions lie side by side, and vLLM moves them as one. `hash_tokens`: tokens of one
    block hash, where it is finer than vLLM would choose. `speculative`: decoding with a draft model like EAGLE's.
    `dense`: windows and states are kept at every block, also where vLLM keeps those at a prompt's end alone.
    """

    groups: tuple[Group, ...]
    blocks: int
    blocks_per_chunk: int = 1
    ranks: int = 1
    shared: bool = False
    packed: bool = False
    hash_tokens: int | None = None
    speculative: bool = False
    dense: bool = False

    def __post_init__(self) -> None:
        """Overlaid groups must have equal page strides, or a block would lie elsewhere for each."""
        assert not self.shared or len({group.stride_bytes for group in self.groups}) == 1

    @property
    def identical_ranks(self) -> bool:
        """MLA's latent is the same on every rank."""
        return all(group.kind == "mla" for group in self.groups)

    def group_of(self, layer: str) -> int:
        """The position of a layer's group."""
        return next(number for number, group in enumerate(self.groups) if layer in group.layers)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group on one rank, as vLLM moves it."""
        return self.packed_bytes if self.packed else len(self.groups[group].layers) * self.groups[group].page_bytes

    def chunk_bytes(self, group: int) -> int:
        """Bytes of a whole chunk on one rank."""
        return self.blocks_per_chunk * self.block_bytes(group)

    def regions(self) -> tuple[tuple[str, ...], ...]:
        """The layers that share each region of memory, in order."""
        if not self.shared:
            return tuple((layer,) for group in self.groups for layer in group.layers)
        longest = max(len(group.layers) for group in self.groups)
        return tuple(
            tuple(group.layers[number] for group in self.groups if number < len(group.layers))
            for number in range(longest)
        )

    def page_stride(self, layer: str) -> int:
        """From a layer's page of one block to that of the next."""
        return self.packed_bytes if self.packed else self.groups[self.group_of(layer)].stride_bytes

    @property
    def packed_bytes(self) -> int:
        """One block's pages of all regions, paddings included."""
        return sum(self.groups[self.group_of(layers[0])].stride_bytes for layers in self.regions())

    def region_bytes(self, layers: tuple[str, ...]) -> int:
        """Bytes of the region that these layers share."""
        return self.blocks * self.groups[self.group_of(layers[0])].stride_bytes

    def offsets(self) -> dict[str, int]:
        """Where each layer's block 0 begins in a rank's memory."""
        found = {}
        at = GUARD_BYTES
        for layers in self.regions():
            found.update(dict.fromkeys(layers, at))
            if self.packed:
                at += self.groups[self.group_of(layers[0])].stride_bytes
            else:
                at += self.region_bytes(layers) + GUARD_BYTES
        return found

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank's memory, guards included."""
        if self.packed:
            return GUARD_BYTES + self.blocks * self.packed_bytes + GUARD_BYTES
        return GUARD_BYTES + sum(self.region_bytes(layers) + GUARD_BYTES for layers in self.regions())


def mla(*, layers: int = 3, prefix: str = "layer", latent: int = 576) -> Group:
    """A group of MLA layers; the latent is DeepSeek V2's (512 + 64 elements) unless said otherwise."""
    return Group(kind="mla", layers=tuple(f"{prefix}.{number}" for number in range(layers)), head_elements=latent)


def full(
    *, layers: int = 2, prefix: str = "full", block_tokens: int = 16, padding_bytes: int = 0, is_draft: bool = False
) -> Group:
    """A group of full-attention layers."""
    return Group(
        kind="full",
        layers=tuple(f"{prefix}.{number}" for number in range(layers)),
        block_tokens=block_tokens,
        heads=2,
        head_elements=2 * 32,
        padding_bytes=padding_bytes,
        is_draft=is_draft,
    )


def sliding(
    *,
    window: int,
    layers: int = 2,
    prefix: str = "sliding",
    block_tokens: int = 16,
    padding_bytes: int = 0,
    is_draft: bool = False,
) -> Group:
    """A group of sliding-window layers with the row size of `full`."""
    return Group(
        kind="sliding",
        layers=tuple(f"{prefix}.{number}" for number in range(layers)),
        block_tokens=block_tokens,
        heads=2,
        head_elements=2 * 32,
        padding_bytes=padding_bytes,
        window=window,
        is_draft=is_draft,
    )


def ring(*, layers: int = 1, block_tokens: int = 16) -> Group:
    """A group of scratch memory with the row size of `full`."""
    return replace(full(layers=layers, prefix="ring", block_tokens=block_tokens), kind="ring")


def mamba(*, layers: int = 2, block_tokens: int = 16, mode: StateMode = "align", page_bytes: int = 8192 + 512) -> Group:
    """A group of Mamba layers: a state of 1,504 bytes in a page of `page_bytes`, `full`'s with 512 of padding."""
    state = Group(
        kind="mamba",
        layers=tuple(f"mamba.{number}" for number in range(layers)),
        block_tokens=block_tokens,
        head_elements=376,
        state_mode=mode,
    )
    return replace(state, padding_bytes=page_bytes - state.page_bytes)
