"""The configuration keys as data.

Owns: one row per `xkv.*` key: type, range, default, unit and text. Start-up checks and `docs/configuration.md`
are both made from it.
Must not know: how a key is used, vLLM, files, sockets.
"""

from dataclasses import dataclass
from typing import Literal

Scope = Literal["all", "port", "path"]

GIB = 1 << 30
MIB = 1 << 20
PORT_MAX = 65_535
STORE_THRESHOLD_MAX = 64  # counts fade: a larger one would rarely be reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key.

    `kind` is what JSON must hold; `low` and `high` bound numbers (both included); `scope` says with which way of
    reaching a card the key makes sense; `default_text` is for people where the default is not a constant.
    """

    name: str
    kind: Literal["int", "float", "str", "bool", "choice"]
    default: int | float | str | bool | None
    text: str
    low: int | float | None = None
    high: int | float | None = None
    choices: tuple[str, ...] = ()
    scope: Scope = "all"
    default_text: str = ""
    unit: str = ""

    @property
    def field(self) -> str:
        """The attribute of `config.Config` that holds the value."""
        return self.name.removeprefix("xkv.")

    @property
    def allowed(self) -> str:
        """What is allowed, for an error or the documentation."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "bool":
            return "true or false"
        if self.kind == "str":
            return "a text"
        word = "a whole number" if self.kind == "int" else "a number"
        unit = f" ({self.unit})" if self.unit else ""
        return f"{word} from {self.low:,} to {self.high:,}{unit}"


KEYS: tuple[Key, ...] = (
    Key(
        name="xkv.port",
        kind="int",
        default=None,
        low=1,
        high=PORT_MAX,
        default_text="none; 5557 is customary",
        scope="port",
        text="The gateway to use, by the port it was started with. Excludes `xkv.path`.",
    ),
    Key(
        name="xkv.port_per_rank",
        kind="bool",
        default=False,
        scope="port",
        text="A gateway for each rank: rank 0 uses that of `xkv.port`, rank 1 that of the next port, and so on. Each "
        "has its rank's objects and its part of the ring; a hit needs all of them. Needs `xkv.port`. With it "
        "`xkv.tp_layout` = `auto` is `per_rank`, and `replicated` is refused.",
    ),
    Key(
        name="xkv.path",
        kind="str",
        default=None,
        default_text="`$XDG_CACHE_HOME/xkv/card`",
        scope="path",
        text="Folder of an embedded card: its gateway is started (or joined) by the engine itself. Used where no "
        "port is given.",
    ),
    Key(
        name="xkv.capacity_bytes",
        kind="int",
        default=None,
        low=64 * MIB,
        high=1 << 50,
        unit="bytes",
        default_text="80 % of what is free there, at most 64 GiB",
        scope="path",
        text="Size of an embedded card.",
    ),
    Key(
        name="xkv.socket_dir",
        kind="str",
        default=None,
        default_text="`$XDG_RUNTIME_DIR/xkv`, else a private folder under the temporary directory",
        text="Folder of the gateways' sockets.",
    ),
    Key(
        name="xkv.gateway_uid",
        kind="int",
        default=None,
        low=0,
        high=(1 << 32) - 2,
        default_text="none: our own user's and root's gateways are trusted",
        scope="port",
        text="Another user whose gateway is trusted with what is stored; that gateway names us with `--allow-uid`.",
    ),
    Key(
        name="xkv.fragment_bytes",
        kind="int",
        default=261_120,
        low=3_072,
        high=64 * MIB - 1_024,
        unit="bytes",
        text="Payload of one slot: a multiple of 4,096 less 1,024. It must be the card's.",
    ),
    Key(
        name="xkv.ring_bytes",
        kind="int",
        default=GIB,
        low=4 * MIB,
        high=1 << 40,
        unit="bytes",
        text="The engine's ring in shared memory, shared out among its ranks.",
    ),
    Key(
        name="xkv.staging_bytes",
        kind="int",
        default=256 * MIB,
        low=MIB,
        high=1 << 36,
        unit="bytes",
        text="Staging area on each GPU. Unused where the KV tensors lie in host memory.",
    ),
    Key(
        name="xkv.tp_layout",
        kind="choice",
        default="auto",
        choices=("auto", "replicated", "per_rank"),
        text="`replicated`: one object serves all ranks, rank 0 writes it; only where pages are identical on every "
        "rank (all layers MLA, no context parallelism). `per_rank`: one object per rank. `auto` decides.",
    ),
    Key(
        name="xkv.store_backlog_bytes",
        kind="int",
        default=None,
        low=MIB,
        high=1 << 40,
        unit="bytes",
        default_text="half of a rank's part of the ring",
        text="More than this on its way to the card, per rank: further chunks are not stored.",
    ),
    Key(
        name="xkv.load_reserve_bytes",
        kind="int",
        default=None,
        low=MIB,
        high=1 << 40,
        unit="bytes",
        default_text="a quarter of the ring",
        text="Part of the ring that puts never take.",
    ),
    Key(
        name="xkv.staged_bytes",
        kind="int",
        default=None,
        low=MIB,
        high=1 << 40,
        unit="bytes",
        default_text="a quarter of the ring",
        text="Part of the ring for objects that are verified before they are hits. Used only where vLLM has no way "
        "to hear of a failed load, or with `xkv.verify_hits`.",
    ),
    Key(
        name="xkv.verify_hits",
        kind="bool",
        default=False,
        text="Verify objects before they are hits also where vLLM can hear of a failed load. A gateway whose card is a "
        "remote alone asks for it (see [remote](remote.md#the-remote-alone)); with `xkv.databases` = 0 it is so.",
    ),
    Key(
        name="xkv.grace_ms",
        kind="int",
        default=5_000,
        low=0,
        high=600_000,
        unit="ms",
        scope="path",
        text="How long an evicted object stays readable on an embedded card.",
    ),
    Key(
        name="xkv.linger_s",
        kind="float",
        default=60.0,
        low=0.0,
        high=604_800.0,
        unit="s",
        scope="path",
        text="How long an embedded gateway stays after its last session.",
    ),
    Key(
        name="xkv.io_threads",
        kind="int",
        default=8,
        low=1,
        high=64,
        scope="path",
        text="I/O threads of an embedded gateway.",
    ),
    Key(
        name="xkv.databases",
        kind="int",
        default=1,
        low=0,
        high=64,
        scope="path",
        text="Databases (files) of a new embedded card. 0: there is no card but `xkv.remote`, nothing is kept in "
        "`xkv.path` (its gateway's lock and log are there), and `xkv.capacity_bytes` is how much of the remote is "
        "listed, 256 GiB unless it is given.",
    ),
    Key(
        name="xkv.remote",
        kind="str",
        default=None,
        default_text="none",
        scope="path",
        text="Address of a remote behind an embedded card, by which machines share objects: "
        "`mooncake://HOST:PORT?…` (see [remote](remote.md)). A gateway of its own gets it as `--remote`.",
    ),
    Key(
        name="xkv.connect_timeout_ms",
        kind="int",
        default=5_000,
        low=100,
        high=600_000,
        unit="ms",
        text="At start-up: to reach the gateway, and for all ranks to publish their namespace.",
    ),
    Key(
        name="xkv.load_timeout_ms",
        kind="int",
        default=10_000,
        low=10,
        high=600_000,
        unit="ms",
        text="One load job, from its submission: later it has failed.",
    ),
    Key(
        name="xkv.pending_timeout_ms",
        kind="int",
        default=2_000,
        low=10,
        high=600_000,
        unit="ms",
        text="One request's wait for objects to be verified, and its wait for a remote: later, it is a miss.",
    ),
    Key(
        name="xkv.heartbeat_timeout_ms",
        kind="int",
        default=3_000,
        low=300,
        high=600_000,
        unit="ms",
        text="A gateway whose heartbeat is older is taken for dead: every lookup misses, nothing is stored.",
    ),
    Key(
        name="xkv.namespace",
        kind="str",
        default="",
        text="Salt of the namespace: engines with different salts never share objects.",
    ),
    Key(
        name="xkv.weights_fingerprint",
        kind="str",
        default="auto",
        default_text="`auto`",
        text="Which weights these are: `auto` takes the snapshot's commit or samples the files; any other text is "
        "taken as it is.",
    ),
    Key(
        name="xkv.restore_policy",
        kind="choice",
        default="always",
        choices=("always", "when_faster"),
        text="`when_faster`: hits are declined while restoring takes longer than computing, by what the engine "
        "measures of both (see [operations](operations.md#a-slow-medium)).",
    ),
    Key(
        name="xkv.trust_lora_names",
        kind="bool",
        default=False,
        text="With LoRA: adapters of equal names are equal. Otherwise an engine with LoRA shares nothing with "
        "other launches.",
    ),
    Key(
        name="xkv.store_threshold",
        kind="int",
        default=0,
        low=0,
        high=STORE_THRESHOLD_MAX,
        unit="requests",
        text="Store a chunk once so many requests have asked for it, to spare the medium; 0 and 1: the first time. "
        "What comes back for the first time is then no hit yet. Counted in each engine, about, in 4 MiB.",
    ),
)

BY_NAME = {key.name: key for key in KEYS}
