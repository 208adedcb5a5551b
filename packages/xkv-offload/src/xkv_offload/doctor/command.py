"""`xkv doctor` where an engine's package is: its options, and the order of what it looks at.

Owns: the command that takes the place of the core's (ADR 0012), and what one check needs of another.
Must not know: how a check finds what it finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from xkv_compat.report import as_json
from xkv_store.commands_doctor import NoBandwidth, Pid, RingBytes, subject_of
from xkv_store.commands_gateway import CardFolder, Json, PortOrElse, SocketDir, SocketPath, path_option
from xkv_store.console import Output
from xkv_store.doctor.examination import Examined, Subject, examine, examine_service
from xkv_store.doctor.findings import Finding, as_text, as_value, exit_code, note, of_error
from xkv_store.errors import UserError
from xkv_store.geometry import Geometry
from xkv_store.progress import Progress, progress
from xkv_store.unused_options import refuse_unused

from .. import config as keys  # noqa: TID252  the package may have another name
from .. import failures  # noqa: TID252
from ..attachment import attachment, gateways, rank_region, ring_use  # noqa: TID252
from ..config import Config  # noqa: TID252
from .chunks import (
    BLOCKS_PER_CHUNK,
    ChunkPlan,
    Rates,
    Room,
    examine_break_even,
    examine_chunks,
    model_value,
    plan_chunk,
)
from .chunks import recommended as recommended_of
from .environment import environment_note, examine_allocator, examine_seed, gather_environment
from .host import Present, examine_faults, examine_host, gather_host
from .model import AUTO, ModelShape, read_model, shape_of
from .transfer_config import (
    TransferConfig,
    blocks_per_chunk_of,
    examine_connector,
    examine_keys,
    examine_supported,
    read_transfer_config,
    view_of,
)

BLOCK_TOKENS = 16  # vLLM's on GPUs, where nothing else is said
RANKS_MAX = 1024

ConfigText = Annotated[
    Optional[str],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Option("--config", metavar="JSON|FILE", help="vLLM's --kv-transfer-config; names the gateway, too."),
]
Model = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--model", parser=path_option("--model"), metavar="PATH", help="A model's config.json, or the folder."
    ),
]
Source = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--source",
        parser=path_option("--source"),
        metavar="TREE",
        help="Look at this vLLM source tree.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is known of an engine: what it would be started with. `blocks` None: not given."""

    transfer: TransferConfig | None = None
    config: Config | None = None
    shape: ModelShape | None = None
    ranks: int = 1
    block_tokens: int = BLOCK_TOKENS
    blocks: int | None = None
    hash_algorithm: str = "sha256"
    prefill_tokens_per_s: float | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def settings(self) -> Config:
        """The engine's, or the defaults."""
        return self.config or keys.parse({"xkv.port": 1})


def register(app: typer.Typer) -> None:
    """Add this command: an entry point of the group `xkv_commands`."""
    app.command(name="doctor")(doctor_command)


def doctor_command(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    config: ConfigText = None,
    model: Model = None,
    tp: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=RANKS_MAX, help="The engine's tensor parallel size [default: 1]."),
    ] = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"vLLM's --kv-cache-dtype [default: {AUTO}]."),
    ] = None,
    block_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=65_536, help=f"vLLM's --block-size [default: {BLOCK_TOKENS}]."),
    ] = None,
    blocks_per_chunk: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=65_536, help="The chunk, where no --config says it."),
    ] = None,
    prefill_tokens_per_s: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, help="How fast this engine computes a prompt: for when restoring pays."),
    ] = None,
    hash_algorithm: Annotated[str, typer.Option(help="vLLM's --prefix-caching-hash-algo.")] = "sha256",
    source: Source = None,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    card: CardFolder = None,
    socket: SocketPath = None,
    ring: RingBytes = None,
    pid: Pid = None,
    no_bandwidth: NoBandwidth = False,
    as_json: Json = False,
) -> None:
    """Look for what is wrong with vLLM, its configuration, the machine, the gateway and the card.

    Ends with 1 where something is, and says of each finding what follows and what to type.
    """
    output = Output(json=as_json)
    of_model = {"--dtype": dtype, "--prefill-tokens-per-s": prefill_tokens_per_s}
    if config is not None:
        refuse_unused({"--blocks-per-chunk": blocks_per_chunk}, "--config says the chunk")
    if model is None:
        refuse_unused({**of_model, "--blocks-per-chunk": blocks_per_chunk}, "without --model no chunk is looked at")
    if model is None and config is None:
        refuse_unused({"--tp": tp, "--block-size": block_size}, "neither --model nor --config says of which engine")
    launch = launch_of(
        config, model, tp=tp or 1, dtype=dtype or AUTO, block_tokens=block_size or BLOCK_TOKENS, blocks=blocks_per_chunk
    )
    launch = replace(launch, hash_algorithm=hash_algorithm, prefill_tokens_per_s=prefill_tokens_per_s)
    named = any(value is not None for value in (port, socket_dir, card, socket))
    if launch.transfer is not None and (named or ring is not None):
        raise UserError("--config names gateway and ring: leave --port, --socket-dir, --card, --socket and --ring out")
    own = subject_of(port, socket_dir, card, socket, ring, pid, measures=not no_bandwidth)
    subjects = [own] if launch.config is None else _subjects(launch, launch.config, own)
    with progress(output, "measuring the medium") as bar:
        findings, measured = diagnose(launch, subjects, source=source, pid=pid, bar=bar)
    output.value(as_value(findings, measured), as_text(findings))
    raise typer.Exit(exit_code(findings))


def launch_of(
    config: str | None, model: Path | None, *, tp: int, dtype: str, block_tokens: int, blocks: int | None
) -> Launch:
    """What the options say of an engine. Raises UserError for what cannot be read at all."""
    shape = shape_of(read_model(model), ranks=tp, dtype=dtype) if model is not None else None
    launch = Launch(shape=shape, ranks=tp, block_tokens=block_tokens, blocks=blocks)
    if config is None:
        return launch
    transfer = read_transfer_config(config)
    found = [*examine_connector(transfer), *examine_keys(transfer)]
    checked = None
    if not keys.faults(transfer.extra):
        try:
            checked = keys.parse(transfer.extra)
        except UserError as error:
            remedy = "name a folder that can be one"
            found.append(of_error("configuration", error, "the engine does not start", remedy))
    try:
        blocks = blocks_per_chunk_of(transfer.extra, block_tokens=block_tokens)
    except UserError as error:
        found.append(of_error("configuration", error, "the engine does not start"))
    return replace(launch, transfer=transfer, config=checked, blocks=blocks, findings=found)


def diagnose(
    launch: Launch, subjects: Sequence[Subject], *, source: Path | None, pid: int | None, bar: Progress
) -> tuple[list[Finding], dict[str, Any]]:
    """Look at everything; the findings in their order, and what was measured."""
    host = gather_host(source)
    features = host.features
    present: Present | None = features if features is not None and features.supported else None
    findings = examine_host(host)
    if present is not None:
        findings += examine_faults(present)
    environment = gather_environment(pid)
    findings.append(examine_seed(environment, present, launch.hash_algorithm))
    findings += [*examine_allocator(environment), *environment_note(pid)]
    findings += _configuration(launch, present)
    measured: dict[str, Any] = {}
    examined = [examine(one, bar) if not place else examine_service(one, bar) for place, one in enumerate(subjects)]
    for one in examined:
        findings += one.findings
    if examined:
        measured |= examined[0].measured()
        if len(examined) > 1:
            measured["others"] = [one.measured() for one in examined[1:]]
    if features is not None:
        measured["vllm"] = as_json(features)
    if launch.shape is not None:
        more, value = _model(launch, launch.shape, present, examined)
        findings += more
        measured["model"] = value
    return findings, measured


def _configuration(launch: Launch, present: Present | None) -> list[Finding]:
    """What is wrong with the engine's configuration on this vLLM."""
    if launch.transfer is None:
        return [note("configuration", "not looked at: no --config", "", "--config JSON, as vLLM gets it")]
    found = list(launch.findings)
    if exit_code(found) or launch.config is None:
        return found
    if present is None:
        return [*found, note("configuration", "its keys are right; what this vLLM makes of them was not looked at")]
    groups = len(launch.shape.groups) if launch.shape is not None else 1
    view = view_of(
        launch.transfer.extra,
        group_tokens=(launch.block_tokens,) * groups,
        blocks_per_chunk=launch.blocks or 1,
        world_size=launch.ranks,
    )
    return found + examine_supported(view, launch.config, present)


def _subjects(launch: Launch, config: Config, own: Subject) -> list[Subject]:
    """The engine's gateways."""
    assert launch.transfer is not None
    view = view_of(
        launch.transfer.extra, group_tokens=(launch.block_tokens,), blocks_per_chunk=1, world_size=launch.ranks
    )
    found = []
    for number in range(gateways(view, config)):
        attached = attachment(view=view, config=config, gateway=number, is_scheduler=True)
        found.append(
            replace(
                own,
                socket=attached.socket,
                card=config.path,
                embedded=config.path is not None,
                ring_bytes=config.ring_bytes,
                fragment_bytes=config.fragment_bytes,
                capacity_bytes=config.capacity_bytes,
                io_threads=config.io_threads,
                trusted_uids=attached.gateway_uids,
            )
        )
    return found


def _model(
    launch: Launch, shape: ModelShape, present: Present | None, examined: Sequence[Examined]
) -> tuple[list[Finding], dict[str, Any]]:
    """What the model's chunks come to, and whether restoring pays."""
    kinds = ", ".join(f"{one.layers} layers of {one.kind} attention" for one in dict.fromkeys(shape.groups))
    whole = "one object for all ranks" if shape.replicated else f"{shape.ranks} rank(s)"
    text = f"{shape.rank_token_bytes} bytes a token on each rank ({shape.dtype}; {len(shape.groups)} group(s): {kinds})"
    findings = [note("model", f"{text}; {whole}")]
    is_verified = False
    if present is not None:
        plan = failures.choose(features=present, full_attention=shape.full_attention, world_size=shape.ranks)
        is_verified = plan.channel == "verified"
        if is_verified:
            findings.append(note("model", f"hits are verified before they are given: {plan.reason}"))
    try:
        room = _room(launch, shape, is_verified=is_verified)
    except UserError as error:
        return [*findings, of_error("chunk size", error, "the engine does not start", "a larger xkv.ring_bytes")], {}
    holes = present is not None and not present["group_window_info"]

    def planned(blocks: int) -> ChunkPlan:
        return plan_chunk(shape, block_tokens=launch.block_tokens, blocks=blocks, room=room, holes=holes)

    plans = [planned(blocks) for blocks in BLOCKS_PER_CHUNK]
    given = None if launch.blocks is None else planned(launch.blocks)
    in_tokens = present is not None and not present["blocks_per_chunk_key"]
    findings += examine_chunks(plans, given, in_tokens=in_tokens)
    value = dict(model_value(shape, plans))
    rates = _rates(launch, examined)
    used = given or recommended_of(plans)
    if rates is not None and used is not None:
        found, tokens = examine_break_even(shape, rates, chunk_tokens=used.tokens)
        findings.append(found)
        value["break_even_tokens"] = tokens
    else:
        what = "not told: it takes the card's bandwidth and --prefill-tokens-per-s"
        findings.append(note("break-even", what, "", "--prefill-tokens-per-s N (vLLM's log: prompt throughput)"))
    return findings, value


def _room(launch: Launch, shape: ModelShape, *, is_verified: bool) -> Room:
    """A rank's part of the ring, as the engine divides it."""
    config = launch.settings
    extra = launch.transfer.extra if launch.transfer is not None else {}
    view = view_of(extra, group_tokens=(launch.block_tokens,), blocks_per_chunk=1, world_size=launch.ranks)
    region = rank_region(view=view, config=config, is_verified=is_verified, use=ring_use(replicated=shape.replicated))
    geometry = Geometry.of_fragment_bytes(config.fragment_bytes)
    return Room(geometry=geometry, store_slots=region.store_slots, load_slots=region.lease_slots)


def _rates(launch: Launch, examined: Sequence[Examined]) -> Rates | None:
    """None where one of them is not known. Several gateways read at once, each from a card of its own."""
    read = [one.bandwidth.read_bytes_per_s for one in examined if one.bandwidth is not None]
    if launch.prefill_tokens_per_s is None or not read:
        return None
    start_s = max((one.get_s or 0.0 for one in examined), default=0.0)
    return Rates(read_bytes_per_s=sum(read), prefill_tokens_per_s=launch.prefill_tokens_per_s, start_s=start_s)
