"""One rank of an engine: the release's real worker-side connector, and a stand-in for the model runner.

Owns: the calls that a model runner makes on the connector in one step, in their order; block tables as a runner
keeps them; the forward pass, which writes rows and reads back what attention would read; the proof that a load
brought exactly its blocks.
Must not know: how requests are scheduled, the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import release
from harness.memory import PagesError, RankMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.shapes import Shape
    from harness.story import Story


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """One block that a load fills: which block of the request's sequence in which group."""

    group: int
    index: int
    block: int


@dataclass(frozen=True, slots=True)
class Load:
    """A load job as the worker was told of it."""

    req_id: str
    blocks: tuple[LoadedBlock, ...]


@dataclass(slots=True)
class _Table:
    """A request's block ids, by group."""

    blocks: list[list[int]] = field(default_factory=list)


class Rank:
    """One worker process's part of an engine."""

    def __init__(self, shape: Shape, launch: release.Launch, *, rank: int, stories: Mapping[str, Story]) -> None:
        names = release.names()
        self.rank = rank
        self._shape = shape
        self._stories = stories
        self._config = release.vllm_config(shape, launch, rank=rank)
        self.memory = RankMemory(shape, seed=rank)
        self._tables: dict[str, _Table] = {}
        self.loads: dict[int, Load] = {}
        self.failed_blocks: set[int] = set()
        self.failed_requests: set[str] = set()
        with names.config.set_current_vllm_config(self._config):
            self.connector = names.KVConnectorFactory.create_connector(
                config=self._config,
                role=names.KVConnectorRole.WORKER,
                kv_cache_config=release.kv_cache_config(shape),
            )
            self.connector.register_kv_caches(release.kv_tensors(shape, self.memory.bytes))

    @property
    def worker(self) -> Any:
        """Our OffloadingWorker."""
        return self.connector.connector_worker.worker

    def close(self) -> None:
        """What a worker process does at its orderly end."""
        self.connector.shutdown()

    # --- one step ------------------------------------------------------------------------------------------------

    def execute(self, scheduled: Any) -> Any:
        """One execute_model, as the model runners call it: the ModelRunnerOutput of this rank."""
        names = release.names()
        metadata = scheduled.kv_connector_metadata
        # The dictionaries are the connector's, which takes jobs out of them.
        for job_id, job in metadata.load_jobs.items():
            self.loads[job_id] = load_of(job)
        self.connector.handle_preemptions(metadata)
        self._update_tables(scheduled)
        self.connector.bind_connector_metadata(metadata)
        after_forward = release.loads_after_forward() and not scheduled.has_sync_kv_loads
        if not after_forward:
            self.connector.start_load_kv(None)
        sampled = self._forward(scheduled)
        if after_forward:
            self.connector.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            self.connector.wait_for_save()
        output = names.KVConnectorOutput()
        failed = release.take_transfer_results(self.connector, scheduled.finished_req_ids, output)
        output.invalid_block_ids = self.connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = self.connector.get_kv_connector_stats()
        output.kv_connector_worker_meta = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        self._settle_loads(output, failed)
        self.check()
        req_ids = list(scheduled.num_scheduled_tokens)
        return names.ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: number for number, req_id in enumerate(req_ids)},
            sampled_token_ids=[sampled[req_id] for req_id in req_ids],
            kv_connector_output=output,
        )

    def check(self) -> None:
        """Every byte of this rank's memory is what it must be."""
        filling = [
            (layer, one.block)
            for load in self.loads.values()
            for one in load.blocks
            for layer in self._shape.groups[one.group].layers
        ]
        self.memory.check(filling)

    # --- block tables --------------------------------------------------------------------------------------------

    def _update_tables(self, scheduled: Any) -> None:
        for req_id in scheduled.finished_req_ids:
            self._tables.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._tables[new.req_id] = _Table([list(blocks) for blocks in new.block_ids])
        cached = scheduled.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = _Table([list(group) for group in blocks])
            elif blocks is not None:
                for known, more in zip(self._tables[req_id].blocks, blocks, strict=True):
                    known.extend(more)

    # --- the forward pass ----------------------------------------------------------------------------------------

    def _forward(self, scheduled: Any) -> dict[str, list[int]]:
        """Write the rows of every scheduled token, read what it attends to, and say the next token."""
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for req_id, count in scheduled.num_scheduled_tokens.items():
            start, end = starts[req_id], starts[req_id] + count
            for group in range(len(self._shape.groups)):
                self._write(req_id, group, start, end)
            for group in range(len(self._shape.groups)):
                self._read(req_id, group, start, end)
            story = self._stories[req_id]
            sampled[req_id] = story.tokens(end, end + 1) if end >= story.prompt_length else []
        return sampled

    def _spans(self, req_id: str, group: int, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(block id, first row, first position, last position + 1) of the blocks that hold these positions."""
        tokens = self._shape.groups[group].block_tokens
        blocks = self._tables[req_id].blocks[group]
        while start < end:
            stop = min(end, (start // tokens + 1) * tokens)
            yield blocks[start // tokens], start % tokens, start, stop
            start = stop

    def _write(self, req_id: str, group: int, start: int, end: int) -> None:
        for block, row, first, stop in self._spans(req_id, group, start, end):
            assert block != 0, f"{req_id} computes into the null block"
            for layer in self._shape.groups[group].layers:
                self.memory.write(layer, block, row, self.content(req_id, layer, first, stop))

    def _read(self, req_id: str, group: int, start: int, end: int) -> None:
        """The rows that the first scheduled token attends to, which earlier steps computed or loads brought."""
        window = self._shape.groups[group].window
        oldest = 0 if window is None else max(0, start - window + 1)
        for block, row, first, stop in self._spans(req_id, group, oldest, end):
            if block == 0:
                raise PagesError(f"{req_id} reads position {first} of group {group} from the null block")
            for layer in self._shape.groups[group].layers:
                found = self.memory.rows(layer, block)[row : row + stop - first]
                wanted = self.content(req_id, layer, first, stop)
                if not np.array_equal(found, wanted):
                    wrong = [first + int(at) for at in np.flatnonzero((found != wanted).any(axis=1))]
                    raise PagesError(f"{req_id}, {layer}, block {block}: wrong rows at positions {wrong}")

    def content(self, req_id: str, layer: str, start: int, end: int) -> Any:
        """The rows that this rank must hold for these positions."""
        group = self._shape.groups[self._shape.group_of(layer)]
        return self._stories[req_id].rows(
            layer=layer,
            rank=0 if self._shape.identical_ranks else self.rank,
            start=start,
            end=end,
            row_bytes=group.row_bytes,
        )

    # --- loads ---------------------------------------------------------------------------------------------------

    def _settle_loads(self, output: Any, failed: set[str]) -> None:
        """A reported load has brought every byte of its blocks, save those that are reported as failed.

        `failed`: requests whose loads have failed as a whole.
        """
        invalid = output.invalid_block_ids
        self.failed_blocks |= invalid
        self.failed_requests |= failed
        for req_id in output.finished_recving or ():
            done = [job_id for job_id, load in self.loads.items() if load.req_id == req_id]
            assert done, f"the load of {req_id} is reported, but there is none"
            for job_id in done:
                for one in self.loads.pop(job_id).blocks:
                    self._settle_block(req_id, one, failed=one.block in invalid or req_id in failed)

    def _settle_block(self, req_id: str, one: LoadedBlock, *, failed: bool) -> None:
        group = self._shape.groups[one.group]
        for layer in group.layers:
            if failed:
                self.memory.accept(layer, one.block)
                continue
            first = one.index * group.block_tokens
            wanted = self.content(req_id, layer, first, first + group.block_tokens)
            self.memory.expect(layer, one.block, wanted)
            if not np.array_equal(self.memory.rows(layer, one.block), wanted):
                raise PagesError(f"{req_id}: the load of {layer}, block {one.block} (number {one.index}) is wrong")


def load_of(job: Any) -> Load:
    """A load's blocks are consecutive in each group, from `block_indices` on (CONTRACT: group sizes, indices)."""
    destination = job.dst_spec
    ids = [int(block) for block in destination.block_ids]
    blocks = []
    for group, (size, index) in enumerate(zip(destination.group_sizes, destination.block_indices, strict=True)):
        blocks += [LoadedBlock(group, int(index) + at, ids.pop(0)) for at in range(int(size))]
    assert not ids
    return Load(job.req_id, tuple(blocks))
