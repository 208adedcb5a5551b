"""One rank of an engine: the release's real worker-side connector, and a stand-in for the model runner.

Owns: the calls that a model runner makes on the connector in one step, in their order; the proof that a load brought
exactly its blocks.
Must not know: how requests are scheduled, what pages hold (forward), the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import release
from harness.forward import Model, Turn
from harness.memory import PagesError, RankMemory
from xkv_compat.vllm_symbols import connector_workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """A load job as the worker was told of it. `end`: the request's tokens that are there once it has ended."""

    req_id: str
    blocks: tuple[LoadedBlock, ...]
    end: int


class Rank:
    """One worker process's part of an engine."""

    def __init__(self, shape: Shape, launch: release.Launch, *, rank: int, stories: Mapping[str, Story]) -> None:
        names = release.names()
        self.rank = rank
        self._shape = shape
        self._config = release.vllm_config(shape, launch, rank=rank)
        self.memory = RankMemory(shape, seed=rank)
        self._model = Model(shape, rank=rank, stories=stories, memory=self.memory)
        self.loads: dict[int, Load] = {}
        self.failed_blocks: set[int] = set()
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
        (worker,) = connector_workers(self.connector)
        return worker

    def close(self) -> None:
        """What a worker process does at its orderly end."""
        self.connector.shutdown()

    # --- one step ------------------------------------------------------------------------------------------------

    def execute(self, scheduled: Any, turn: Turn, load_ends: Mapping[int, int]) -> Any:
        """One execute_model, as the model runners call it: the ModelRunnerOutput of this rank.

        `load_ends`: by load job, the tokens of its request that are there once it has ended.
        """
        names = release.names()
        metadata = scheduled.kv_connector_metadata
        # The dictionaries are the connector's, which takes jobs out of them.
        for job_id, job in metadata.load_jobs.items():
            self.loads[job_id] = load_of(job, groups=release.offloaded_groups(self._shape), end=load_ends[job_id])
        self.connector.handle_preemptions(metadata)
        self._model.update(scheduled)
        self.connector.bind_connector_metadata(metadata)
        inside = [job_id for job_id, job in metadata.load_jobs.items() if release.loads_inside_step(job)]
        after_forward = release.loads_after_forward() and not scheduled.has_sync_kv_loads
        assert not inside or not after_forward
        if not after_forward:
            self.connector.start_load_kv(None)
        unfilled = self._settle_inside(inside)
        sampled = self._model.forward(scheduled, turn, unfilled)
        if after_forward:
            self.connector.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            self.connector.wait_for_save()
        output = names.KVConnectorOutput()
        failed = release.take_transfer_results(self.connector, scheduled.finished_req_ids, output)
        output.invalid_block_ids = self.connector.get_block_ids_with_load_errors()
        assert unfilled <= output.invalid_block_ids, "the forward pass has read blocks that are not reported as failed"
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

    # --- loads ---------------------------------------------------------------------------------------------------

    def _settle_inside(self, job_ids: Sequence[int]) -> set[int]:
        """Loads inside a step are over when its forward pass begins: the blocks that they have not filled."""
        loads = [self.loads.pop(job_id) for job_id in job_ids]
        return {one.block for load in loads for one in load.blocks if not self._has_filled(load, one)}

    def _has_filled(self, load: Load, one: LoadedBlock) -> bool:
        try:
            self._settle_block(load, one, failed=False)
        except PagesError:
            self._settle_block(load, one, failed=True)
            return False
        return True

    def _settle_loads(self, output: Any, failed: set[str]) -> None:
        """A reported load has brought every byte of its blocks, save those that are reported as failed.

        `failed`: requests whose loads have failed as a whole.
        """
        invalid = output.invalid_block_ids
        self.failed_blocks |= invalid
        for req_id in output.finished_recving or ():
            done = [job_id for job_id, load in self.loads.items() if load.req_id == req_id]
            assert done, f"the load of {req_id} is reported, but there is none"
            for job_id in done:
                load = self.loads.pop(job_id)
                for one in load.blocks:
                    self._settle_block(load, one, failed=one.block in invalid or req_id in failed)

    def _settle_block(self, load: Load, one: LoadedBlock, *, failed: bool) -> None:
        for layer in self._shape.groups[one.group].layers:
            if failed:
                self.memory.accept(layer, one.block)
                continue
            wanted = self._model.loaded(load.req_id, layer, one.index, load.end)
            self.memory.expect(layer, one.block, wanted)
            if not np.array_equal(self.memory.page(layer, one.block)[: wanted.size], wanted.reshape(-1)):
                raise PagesError(f"{load.req_id}: the load of {layer}, block {one.block} (number {one.index}) is wrong")


def load_of(job: Any, *, groups: Sequence[int], end: int) -> Load:
    """A load's blocks are consecutive in each group, from `block_indices` on (CONTRACT: group sizes, indices)."""
    _, destination = release.sides(job)
    ids = [int(block) for block in destination.block_ids]
    blocks = []
    for group, size, index in zip(groups, destination.group_sizes, destination.block_indices, strict=True):
        blocks += [LoadedBlock(group, int(index) + at, ids.pop(0)) for at in range(int(size))]
    assert not ids
    return Load(job.req_id, tuple(blocks), end)
