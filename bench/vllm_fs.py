"""The I/O functions of vLLM's own file system tier, driven from outside: the other side of `loads`.

Owns: their files, their buffer, their thread pool as their manager makes it, and the seconds and CPU seconds of a
store or a load. Runs in a release's environment.
Must not know: xkv, what its answers are compared with.

    python bench/vllm_fs.py FOLDER BUFFER_BYTES    (requests and answers: lines of JSON)
"""

import json
import mmap
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

THREADS = 16  # of each kind, their manager's default
POLL_S = 0.0005


class Files:
    """Their functions on one folder, as their manager calls them: a job is one task, and here one object."""

    def __init__(self, folder: Path, buffer_bytes: int) -> None:
        self._folder = folder
        memory = mmap.mmap(-1, buffer_bytes)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, buffer_bytes, np.uint8)
        self._view = memoryview(memory)
        self._direct = io.probe_o_direct(str(folder))
        self._pool = DualQueueThreadPool(THREADS, THREADS)
        self.description = {"direct": self._direct, "native": io._HAS_FSIO_C}  # noqa: SLF001 - which of their two it is

    def run(self, request: dict[str, Any]) -> dict[str, float]:
        """Store or load `count` objects of `size` bytes, `depth` at a time, each in its place of the buffer."""
        work = {"store": io.batch_store_block, "load": io.batch_load_block}[request["op"]]
        enqueue = {"store": self._pool.enqueue_store, "load": self._pool.enqueue_load}[request["op"]]
        size, count, depth = request["size"], request["count"], request["depth"]
        places = len(self._view) // size
        began, cpu = time.monotonic(), time.process_time()
        begun = done = 0
        while done < count:
            while begun < count and begun - done < depth:
                path = str(self._folder / f"{size}" / f"{begun % 64:02x}" / f"{begun:08x}.bin")
                place = begun % places * size
                enqueue(begun, 1, [partial(work, [path], self._view, [place], size, self._direct)])
                begun += 1
            finished = self._pool.get_finished()
            if any(not success for _, success, _ in finished):
                raise OSError("a job of the file system tier has failed: see its log")
            done += len(finished)
            if not finished:
                time.sleep(POLL_S)
        return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}


def main(folder: str, buffer_bytes: str) -> None:
    """Answer until the input ends; answers go where stdout led before vLLM could write there."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    files = Files(Path(folder), int(buffer_bytes))
    answers.write(json.dumps(files.description) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(files.run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
