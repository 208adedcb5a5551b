"""`XkvOffloadingSpec`, as vLLM loads it.

Owns: start-up on both sides: configuration, attachment, identity, and putting manager and worker together.
Must not know: which symbols vary between releases (compat), how anything after start-up works.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from xkv_compat.features import detect_live
from xkv_compat.vllm_symbols import (
    current_vllm_config,
    event_maker,
    framework,
    kv_events_are_on,
    kv_load_failure_policy,
    kv_role,
    layer_specs,
    model_config_facts,
    none_hash_is_stable,
    offloading_config_view,
    offloading_connector_class,
    schedules_ahead,
    vllm_version_text,
)
from xkv_store.geometry import HEADER_BYTES, Geometry
from xkv_store.ring import staged_slots

from . import description, failures, identity, steps, sync_loads
from .asked_card import Card
from .attachment import (
    attach_rank,
    attach_scheduler,
    await_descriptors,
    gateways,
    one_gateways,
    ports_text,
    rank_region,
    ring_use,
)
from .config import parse
from .copy import make_mover
from .manager import ManagerOptions, Words, XkvManager
from .metrics import Makers, definitions
from .port_per_rank import card_of, reads_of, seeks_of
from .rank import RankContext
from .remote_lookups import RemoteLookups, Seeks
from .reports import failure_log, step_observer
from .restore_policy import ChunkFacts, RestorePolicy, Stage
from .staging import Reads, Staging
from .transfer import XkvTransferSpec
from .worker import XkvWorker

# A child of vLLM's: only what has that one's handlers and level is seen in an engine's log below a warning.
logger = logging.getLogger(f"vllm.{__name__}")

_framework = framework()
_OffloadingSpec: Any = _framework.OffloadingSpec
_OffloadingManager: Any = _framework.OffloadingManager
_OffloadingWorker: Any = _framework.OffloadingWorker


_OWN_CONNECTOR = f"{__package__}.connector"

if _OWN_CONNECTOR not in sys.modules:  # else vLLM uses our subclass of it, and its own class stays as it is
    failures.attach(offloading_connector_class(), failures.method_names(detect_live()), failure_log)


class _Manager(XkvManager, _OffloadingManager):  # type: ignore[misc]  # vLLM's class is Any here
    """XkvManager with the framework's defaults for whatever a release adds."""


class _Worker(XkvWorker, _OffloadingWorker):  # type: ignore[misc]  # vLLM's class is Any here
    """XkvWorker with the framework's defaults for whatever a release adds."""


class XkvOffloadingSpec(_OffloadingSpec):  # type: ignore[misc]  # vLLM's class is Any here
    """vLLM's OffloadingSpec of xkv. Made once in the scheduler's process and once in each worker.

    Raises UserError for a configuration that is wrong, UnsupportedVLLM for a vLLM that lacks what is needed, both
    before any file, socket or memory exists.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._features = detect_live()
        self._features.require()
        self._view = offloading_config_view(args, kwargs)
        self._config = parse(self._view.extra_config)
        description.check_supported(self._view, self._config, self._features)
        super().__init__(*args, **kwargs)

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM's metrics endpoint shows of an engine: what manager and ranks count and measure."""
        makers = Makers(counter=_framework.OffloadingCounterMetadata, histogram=_framework.OffloadingHistogramMetadata)
        return definitions(makers, detect_live())

    def get_manager(self) -> XkvManager:
        """The scheduler's side: attach, wait for the ranks' identities, adopt the namespace."""
        view, config = self._view, self._config
        clients = attach_scheduler(view=view, config=config)
        texts = await_descriptors(clients, world_size=view.world_size, timeout_s=config.connect_timeout_ms / 1000)
        descriptors = [identity.Descriptor.from_text(text) for text in texts]
        engine: Mapping[str, Any] = next(one.engine for one in descriptors if one.rank == 0)
        adopted = identity.adopt(
            descriptors=descriptors,
            world_size=view.world_size,
            engine_id=view.engine_id,
            salt=config.namespace,
            own_because=self._own_because(engine),
        )
        if adopted.own_because:
            logger.warning(
                "What this engine stores cannot be hit by another launch: %s", "; ".join(adopted.own_because)
            )
        for client in clients:
            client.publish_namespace(adopted.namespace, adopted.text)
        ranks = 1 if engine["replicated"] else view.world_size
        geometry = Geometry.of_fragment_bytes(config.fragment_bytes)
        if config.restore_policy == "when_faster" and _OWN_CONNECTOR not in sys.modules:
            steps.attach(offloading_connector_class(), step_observer)
        slots = [geometry.fragments(size) if size else 0 for size in engine["chunk_bytes"]]
        ring_bytes = [number * geometry.slot_bytes for number in slots]
        rank_ring_bytes = config.ring_bytes // ranks  # for stores: where one object serves all, one rank has them
        logger.info(
            "xkv: namespace %s, %s",
            adopted.namespace.hex(),
            self._ranks_text(replicated=engine["replicated"]),
        )
        card = card_of(clients)
        reads = reads_of(clients) if engine["channel"] == "verified" else None
        return _Manager(
            card=card,
            options=ManagerOptions(
                namespace=adopted.namespace,
                ranks=ranks,
                group_bytes=dict(zip((group.group_id for group in view.groups), ring_bytes, strict=True)),
                store_backlog_bytes=config.store_backlog_bytes or rank_ring_bytes // 2,
                loads=engine["kv_role"] != "kv_producer",
                stores=engine["kv_role"] != "kv_consumer",
                gateways=len(clients),
                store_threshold=config.store_threshold,
            ),
            staging=self._staging(reads, slots=slots, ranks=ranks) if reads is not None else None,
            policy=self._policy(engine, card, reads, ranks) if config.restore_policy == "when_faster" else None,
            remote=None if adopted.own_because else self._remote(seeks_of(clients), slots),
            words=Words(
                miss=_framework.LookupResult.MISS,
                hit=_framework.LookupResult.HIT,
                pending=_framework.LookupResult.HIT_PENDING,
                prepare_store_output=_framework.PrepareStoreOutput,
                request_context=_framework.RequestOffloadingContext,
                stats=_framework.OffloadingConnectorStats,
                load_source=_framework.CacheHitSource.DISK if _framework.CacheHitSource else None,
                features=self._features,
                event=event_maker() if kv_events_are_on(self) else None,
            ),
        )

    def _ranks_text(self, *, replicated: bool) -> str:
        """How many objects a chunk has, why, and where they lie."""
        view, config = self._view, self._config
        ports = ports_text(view, config) if gateways(view, config) > 1 else ""
        return description.layout_text(
            asked=config.tp_layout, replicated=replicated, world_size=view.world_size, ports=ports
        )

    def _policy(self, engine: Mapping[str, Any], card: Card, reads: Reads | None, ranks: int) -> RestorePolicy:
        """What declines hits that would take longer than computing. `reads`: where hits are verified first."""
        view = self._view
        stages = [Stage(card.loaded)]
        if reads is not None:
            stages.append(Stage(reads.loaded, ranks // len(reads.loaded())))
        return RestorePolicy(
            chunks={
                group.group_id: ChunkFacts(group.tokens_per_block * view.blocks_per_chunk, size, is_prefix)
                for group, size, is_prefix in zip(
                    view.groups, engine["chunk_bytes"], engine["full_attention"], strict=True
                )
                if size
            },
            stages=stages,
            loads_in_steps=sync_loads.asked_for(view, self._features),
        )

    def _remote(self, seeks: Seeks, slots: Sequence[int]) -> RemoteLookups:
        """Where what the card lacks may come from. `slots`: of a whole chunk of each group on one rank."""
        return RemoteLookups(
            seeks,
            pending_seconds=self._config.pending_timeout_ms / 1000,
            fragments=dict(zip((group.group_id for group in self._view.groups), slots, strict=True)),
        )

    def _staging(self, reads: Reads, *, slots: Sequence[int], ranks: int) -> Staging:
        """Where hits are verified first. `slots`: of a whole chunk of each group on one rank."""
        staging = Staging(
            reads,
            pending_seconds=self._config.pending_timeout_ms / 1000,
            groups=sum(number > 0 for number in slots),
        )
        largest, tokens = max(
            (number, group.tokens_per_block) for number, group in zip(slots, self._view.groups, strict=True)
        )
        logger.info(
            "xkv: hits are verified before they are given; the %d MiB of xkv.staged_bytes restore at most %d tokens of "
            "one prompt",
            self._config.staged_bytes >> 20,
            staging.group_slots_max // (max(largest, 1) * ranks) * tokens * self._view.blocks_per_chunk,
        )
        return staging

    def get_worker(self, kv_caches: Any) -> XkvWorker:
        """One rank's side: attach, publish the rank's identity, ready the copies."""
        view, config = self._view, self._config
        vllm_config = current_vllm_config()
        assert vllm_config is not None, "vLLM sets its configuration while it makes a worker"
        started = time.monotonic()
        layers = layer_specs(vllm_config)
        description.check_states(view, layers, self._features)
        group_kinds = description.kinds(view, layers)
        full_attention = tuple(kind.full_attention for kind in group_kinds or ()) or (False,) * len(view.groups)
        failure_plan = failures.choose(
            features=self._features, full_attention=full_attention, world_size=view.world_size
        )
        sync_loads.check_launch(
            view,
            self._features,
            plan=failures.by_blocks(features=self._features, full_attention=full_attention, world_size=view.world_size),
            schedules_ahead=schedules_ahead(vllm_config),
            failure_policy=kv_load_failure_policy(vllm_config),
        )
        replicated = description.is_replicated(view, config, group_kinds)
        is_verified = failure_plan.channel == "verified" or config.verify_hits
        described = description.describe(
            view=view,
            config=config,
            features=self._features,
            version=vllm_version_text(),
            model=model_config_facts(vllm_config),
            layers=layers,
            replicated=replicated,
            kv_caches=kv_caches,
            kv_role=kv_role(vllm_config),
            channel="verified" if is_verified else failure_plan.channel,
            full_attention=full_attention,
        )
        layouts = description.layouts(view, kv_caches)
        use = ring_use(replicated=replicated)
        region = rank_region(view=view, config=config, is_verified=is_verified, use=use)
        staged_bytes = one_gateways(view, config).staged_bytes if is_verified else 0
        staged = staged_slots(staged_bytes=staged_bytes, slot_bytes=config.fragment_bytes + HEADER_BYTES)
        sharers = view.world_size // gateways(view, config)  # ranks whose objects are staged in one ring
        description.check_room(
            chunk_bytes=[layout.chunk_bytes for layout in layouts],
            config=config,
            world_size=view.world_size,
            load_slots=min(region.lease_slots, staged // (1 if replicated else sharers))
            if is_verified
            else region.lease_slots,
            store_slots=region.store_slots,
        )
        mover = make_mover(
            tensors=[tensor.tensor for tensor in kv_caches.tensors],
            staging_bytes=config.staging_bytes,
            layouts=layouts,
            fragment_bytes=config.fragment_bytes,
        )
        with ExitStack() as undone:  # should what follows fail
            client = attach_rank(view=view, config=config, staged_bytes=staged_bytes, use=use)
            undone.callback(client.close)
            undone.callback(mover.close)
            ring, own = client.ring, (client.store_region, client.load_region)
            mover.use_ring(
                ring.array,
                [*(range(one.first, one.first + one.count) for one in own), range(ring.slots - staged, ring.slots)],
            )
            client.publish_namespace(described.digest(), described.text())
            logger.info("xkv: rank %d of %d ready in %.2f s", view.rank, view.world_size, time.monotonic() - started)
            worker = _Worker(
                context=RankContext(
                    client=client,
                    rank=view.rank % sharers,
                    object_rank=0 if replicated else view.rank,
                    writes=not replicated or view.rank == 0,
                    blocks_per_chunk=view.blocks_per_chunk,
                    fragment_bytes=config.fragment_bytes,
                    layouts=layouts,
                    lone_last_block=[kind.mamba for kind in group_kinds or ()] or [False] * len(view.groups),
                    positions={group.group_id: position for position, group in enumerate(view.groups)},
                    mover=mover,
                    load_timeout_s=config.load_timeout_ms / 1000,
                    failure_plan=failure_plan,
                    failures=failures.FailureLog(),
                    recomputes=kv_load_failure_policy(vllm_config) == "recompute",
                ),
                transfer_result=_framework.TransferResult,
            )
            undone.pop_all()
        return worker

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, XkvWorker]]:
        """The worker for both directions, on releases that route by (source, destination) and know no worker."""
        worker, pages = self.get_worker(kv_caches), _framework.GPULoadStoreSpec
        yield pages, XkvTransferSpec, worker
        yield XkvTransferSpec, pages, worker

    def _own_because(self, engine: Mapping[str, Any]) -> list[str]:
        """Why the namespace must be this launch's own, as far as the scheduler knows."""
        reasons = []
        if not none_hash_is_stable(str(engine["hash_algorithm"])):
            reasons.append(
                "the root hash is random in each process: set PYTHONHASHSEED to a number, for example "
                "PYTHONHASHSEED=0, before the engine starts"
            )
        if engine["lora"] and not self._config.trust_lora_names:
            reasons.append("LoRA adapters are known by name only (xkv.trust_lora_names)")
        if engine["calculate_kv_scales"]:
            reasons.append("calculate_kv_scales makes scales that depend on the first request")
        return reasons
