"""Sizes and limits of the format, and how an object is cut.

Owns every size that the bytes on a card depend on, with the relations between them. Must not know struct
formats, files or memory. Drawn in docs/format.md.
"""

from dataclasses import dataclass

from .errors import UserError

SLOT_BYTES = 262_144
HEADER_BYTES = 1_024
FRAGMENT_BYTES = 261_120
IO_STEP_BYTES = 4_096  # alignment of O_DIRECT on every device in use (512e and 4Kn)
SUPERBLOCK_BYTES = 4_096
SUPERBLOCK_COPY_OFFSET = 4_096
DATA_OFFSET = 1_048_576

SLOT_BYTES_MIN = IO_STEP_BYTES
SLOT_BYTES_MAX = 1 << 26  # 64 MiB: a slot's fill must fit the header's 32-bit field, and rings hold many
DATABASES_MAX = 256  # per card; each costs the gateway a descriptor or two
SLOTS_PER_DATABASE_MAX = (1 << 32) - 1  # an extent's slot number has 32 bits
FRAGMENTS_MAX = (1 << 32) - 1  # a header's fragment index has 32 bits
EXTENTS_MAX = (1 << 16) - 1  # a record's extent count has 16 bits
GENERATION_BELIEVED_MAX = 1 << 62  # no card has ever counted so far: a larger one is damage, and would leave no next

NAMESPACE_BYTES = 16
HASH_BYTES_MAX = 32
KEY_BYTES_MAX = NAMESPACE_BYTES + 4 + 1 + HASH_BYTES_MAX + 2
RANK_MAX = (1 << 16) - 1
RANKS_PER_ENTRY = 64

assert HEADER_BYTES + FRAGMENT_BYTES == SLOT_BYTES
assert SLOT_BYTES % IO_STEP_BYTES == 0
assert HEADER_BYTES < IO_STEP_BYTES
assert SUPERBLOCK_BYTES % IO_STEP_BYTES == 0
assert SUPERBLOCK_COPY_OFFSET >= SUPERBLOCK_BYTES
assert SUPERBLOCK_COPY_OFFSET + SUPERBLOCK_BYTES <= DATA_OFFSET
assert DATA_OFFSET % IO_STEP_BYTES == 0
assert KEY_BYTES_MAX <= 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """How objects are cut on one card. `slot_bytes` is a multiple of 4,096."""

    slot_bytes: int = SLOT_BYTES

    def __post_init__(self) -> None:
        if self.slot_bytes % IO_STEP_BYTES or not SLOT_BYTES_MIN <= self.slot_bytes <= SLOT_BYTES_MAX:
            raise UserError(
                f"slot bytes must be a multiple of {IO_STEP_BYTES} from {SLOT_BYTES_MIN} to "
                f"{SLOT_BYTES_MAX}, not {self.slot_bytes}"
            )

    @classmethod
    def of_fragment_bytes(cls, fragment_bytes: int) -> "Geometry":
        """The geometry whose slots hold `fragment_bytes` of payload; UserError where there is none."""
        slot_bytes = fragment_bytes + HEADER_BYTES
        if slot_bytes % IO_STEP_BYTES or not SLOT_BYTES_MIN <= slot_bytes <= SLOT_BYTES_MAX:
            raise UserError(
                f"fragment bytes must be a multiple of {IO_STEP_BYTES} less {HEADER_BYTES}, from "
                f"{SLOT_BYTES_MIN - HEADER_BYTES} to {SLOT_BYTES_MAX - HEADER_BYTES}, not {fragment_bytes}; "
                f"{FRAGMENT_BYTES} is the usual one"
            )
        return cls(slot_bytes)

    @property
    def fragment_bytes(self) -> int:
        """Payload bytes of a full slot."""
        return self.slot_bytes - HEADER_BYTES

    def fragments(self, length: int) -> int:
        """How many fragments an object of `length` bytes has; at least 1."""
        return max(1, -(-length // self.fragment_bytes))

    def payload_bytes(self, length: int, fragment: int) -> int:
        """Payload bytes of fragment number `fragment` of an object of `length` bytes."""
        return max(0, min(self.fragment_bytes, length - fragment * self.fragment_bytes))

    def slot_fill_bytes(self, length: int, fragment: int) -> int:
        """How far that fragment's slot is moved: header and payload, rounded up to the I/O step."""
        filled = HEADER_BYTES + self.payload_bytes(length, fragment)
        return -(-filled // IO_STEP_BYTES) * IO_STEP_BYTES
