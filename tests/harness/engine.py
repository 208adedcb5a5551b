"""One launch of an engine without a model: the release's real Scheduler and connectors, driven step by step.

Owns: the order in which scheduler and ranks are made and take turns, requests and their stories, bounds on waiting.
Must not know: what a page holds (worker), which release this is (release).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness import release
from harness.forward import Turn
from harness.story import Story
from harness.worker import Load, Rank, load_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.shapes import Shape

IDLE_S = 0.002  # between steps that schedule nothing: long against a busy loop, short against any I/O
RUN_S_MAX = 20.0
STEPS_MAX = 5000


@dataclass(slots=True)
class Request:
    """One request of a test, and what became of it."""

    req_id: str
    story: Story
    output_tokens: int
    computed_tokens: int = 0  # scheduled to be computed, over all steps
    loads: list[Load] = field(default_factory=list)
    finish_reason: str | None = None
    said: list[int] = field(default_factory=list)

    def loaded(self, group: int = 0) -> list[tuple[int, ...]]:
        """For each of its loads: which of the request's blocks in this group it brought."""
        return [tuple(one.index for one in load.blocks if one.group == group) for load in self.loads]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step was about. Jobs by number; `load_ends`: the tokens of a load's request once it has ended."""

    scheduled: Any
    load_jobs: dict[int, Any]
    store_jobs: dict[int, Any]
    flushed: frozenset[int]
    preempted: frozenset[str]
    turn: Turn
    load_ends: dict[int, int] = field(default_factory=dict)


class Engine:
    """Scheduler and ranks of one launch. Closed in order by `close`."""

    def __init__(self, shape: Shape, launch: release.Launch) -> None:
        names = release.names()
        self.shape = shape
        self.requests: dict[str, Request] = {}
        self._stories: dict[str, Story] = {}
        self.steps: list[Step] = []
        self._heard = -1  # the number of the last step whose outcome the scheduler knows
        self.ranks: list[Rank] = []
        try:
            # Workers first, as the engine core does: they publish what the scheduler adopts.
            for rank in range(shape.ranks):
                self.ranks.append(Rank(shape, launch, rank=rank, stories=self._stories))
            self._make_scheduler(release.vllm_config(shape, launch, rank=0))
        except BaseException:
            for one in self.ranks:
                one.close()
            raise
        self._aggregator = names.KVOutputAggregator(shape.ranks)

    def _make_scheduler(self, config: Any) -> None:
        names = release.names()
        config.compilation_config.static_forward_context.clear()  # the scheduler's process has no layers
        cache_config = release.kv_cache_config(self.shape)
        block_size, hash_block_size = names.kv_cache_utils.resolve_kv_cache_block_sizes(cache_config, config)
        hash_function = names.hash_function(config.cache_config.prefix_caching_hash_algo)
        names.kv_cache_utils.init_none_hash(hash_function)
        self._block_hasher = names.kv_cache_utils.get_request_block_hasher(hash_block_size, hash_function)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=names.StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=False,
        )

    @property
    def manager(self) -> Any:
        """Our OffloadingManager."""
        return self.scheduler.connector.connector_scheduler.manager

    def close(self) -> None:
        """An orderly end: workers first, then the scheduler."""
        for rank in self.ranks:
            rank.close()
        self.scheduler.shutdown()

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, req_id: str, prompt: Sequence[int], *, output_tokens: int = 1) -> Request:
        """Hand a request to the scheduler."""
        names = release.names()
        self._stories[req_id] = Story(prompt)
        self.requests[req_id] = Request(req_id, self._stories[req_id], output_tokens)
        self.scheduler.add_request(
            names.Request(
                request_id=req_id,
                prompt_token_ids=list(prompt),
                sampling_params=names.SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0),
                pooling_params=None,
                block_hasher=self._block_hasher,
            )
        )
        return self.requests[req_id]

    def abort(self, req_id: str) -> None:
        """End a request as its client's disconnection does."""
        self.scheduler.finish_requests(req_id, release.names().RequestStatus.FINISHED_ABORTED)

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self, *, before_execute: Callable[[Step], None] | None = None) -> Step:
        """One step: schedule, execute on every rank, update. Every byte of every rank is compared in it."""
        step = self.schedule()
        if before_execute is not None:
            before_execute(step)
        self.update(step, self.execute(step))
        return step

    def schedule(self) -> Step:
        """The first third of a step: what the scheduler has decided."""
        scheduled = self.scheduler.schedule()
        metadata = scheduled.kv_connector_metadata
        step = Step(
            scheduled,
            dict(metadata.load_jobs),
            dict(metadata.store_jobs),
            frozenset(metadata.jobs_to_flush or ()),
            frozenset(scheduled.preempted_req_ids or ()),
            Turn(number=len(self.steps), heard=self._heard),
        )
        self.steps.append(step)
        self._note(step)
        return step

    def execute(self, step: Step) -> Any:
        """The second third: what the ranks did and said, as one output."""
        scheduled = step.scheduled
        metadata = scheduled.kv_connector_metadata
        # Each process has its own metadata; in one process the ranks must not see what another took out.
        outputs = []
        for rank in self.ranks:
            scheduled.kv_connector_metadata = _own_copy(metadata, step)
            outputs.append(rank.execute(scheduled, step.turn, step.load_ends))
        scheduled.kv_connector_metadata = metadata
        return outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)

    def update(self, step: Step, output: Any) -> None:
        """The last third: the scheduler hears what the ranks said."""
        for core_outputs in self.scheduler.update_from_output(step.scheduled, output).values():
            for one in core_outputs.outputs:
                self._hear(one)
        self._heard = step.turn.number

    def _note(self, step: Step) -> None:
        """Check that loads go exactly where the scheduler's own block tables say, and count."""
        for req_id, tokens in step.scheduled.num_scheduled_tokens.items():
            self.requests[req_id].computed_tokens += tokens
        for job_id, job in step.load_jobs.items():
            inside = step.scheduled.num_scheduled_tokens.get(job.req_id, 0)  # counted as computed already
            step.load_ends[job_id] = self.scheduler.requests[job.req_id].num_computed_tokens - inside
            load = load_of(job, groups=release.offloaded_groups(self.shape), end=step.load_ends[job_id])
            tables = self.scheduler.kv_cache_manager.get_block_ids(load.req_id)
            for one in load.blocks:
                assert one.block == tables[one.group][one.index] != 0
            self.requests[load.req_id].loads.append(load)

    def _hear(self, output: Any) -> None:
        request = self.requests[output.request_id]
        request.said += output.new_token_ids
        if output.finish_reason is not None:
            request.finish_reason = str(output.finish_reason)
        length = request.story.prompt_length
        assert request.said == request.story.tokens(length, length + len(request.said)), "another token was said"

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until `until` holds, or until everything is finished and every job reported. Bounded."""
        end = time.monotonic() + RUN_S_MAX
        for _ in range(STEPS_MAX):
            if self.is_idle() if until is None else until():
                return
            step = self.step()
            if not step.scheduled.total_num_scheduled_tokens:
                time.sleep(IDLE_S)
            if time.monotonic() > end:
                break
        unfinished = {name: one.finish_reason for name, one in self.requests.items()}
        raise AssertionError(f"no end after {len(self.steps)} steps: {unfinished}")

    def is_idle(self) -> bool:
        """As the engine core asks before it waits for new requests."""
        return not (
            self.scheduler.has_unfinished_requests()
            or self.scheduler.has_finished_requests()
            or self.scheduler.connector.has_pending_push_work()
        )

    def serve(self, req_id: str, prompt: Sequence[int], *, output_tokens: int = 1) -> Request:
        """Submit one request and run until nothing is left to do."""
        request = self.submit(req_id, prompt, output_tokens=output_tokens)
        self.run()
        return request

    def await_stores(self) -> None:
        """Wait until nothing that ranks have handed over waits for the gateway's answer."""
        end = time.monotonic() + RUN_S_MAX
        while self.manager._card.store_bytes():
            assert time.monotonic() < end, "the gateway does not answer for what it was given"
            time.sleep(IDLE_S)

    def await_gateway(self) -> None:
        """Wait until every client is attached to a gateway that lives."""
        end = time.monotonic() + RUN_S_MAX
        clients = [self.manager._card, *(rank.worker.context.client for rank in self.ranks)]
        while not all(client.alive() for client in clients):
            assert time.monotonic() < end, "the clients do not come back to the gateway"
            time.sleep(IDLE_S)

    def await_no_gateway(self) -> None:
        """Wait until the scheduler's client has heard that a gateway has gone."""
        end = time.monotonic() + RUN_S_MAX
        while self.manager._card.alive():
            assert time.monotonic() < end, "the scheduler takes a gateway that has gone for a living one"
            time.sleep(IDLE_S)

    # --- forgetting ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop vLLM's own prefix reuse, not the connector's, and poison all pages."""
        assert self.scheduler.reset_prefix_cache()
        for rank in self.ranks:
            rank.memory.poison(range(1, self.shape.blocks), seed=len(self.steps) + 1)

    def forget_all(self) -> None:
        """VLLM's reset with the connector's, at a moment when nothing is running. Pages stay as they are."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)

    def reset_connector(self) -> None:
        """What vLLM's reset does to the connector alone: nothing stored until now may be hit again."""
        assert self.scheduler.reset_connector_cache()


def _own_copy(metadata: Any, step: Step) -> Any:
    """The step's connector metadata as another process would get it."""
    return type(metadata)(
        **{
            **vars(metadata),
            "load_jobs": dict(step.load_jobs),
            "store_jobs": dict(step.store_jobs),
            "jobs_to_flush": None if metadata.jobs_to_flush is None else set(metadata.jobs_to_flush),
        }
    )
