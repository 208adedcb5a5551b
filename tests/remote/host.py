"""One host of a run: its gateway with its part of the pool, and its engine.

Owns: a batch and its judgement, what was counted by gateways that were killed. Must not know: other hosts, the parts.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from remote.library import environment as library_environment
from remote.outcome import SEGMENT_MIB
from stand.engines import EngineError, Request, StandError, counted
from stand.gateways import Gateway
from stand.models import LLAMA
from stand.pools import Pool, is_right

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from remote.network import Network
    from remote.outcome import Outcome
    from stand.cases import Stand

CAPACITY: Final = "24MiB"  # of a card: twelve prompts, so that what it has dropped comes from the remote
SLOT_BYTES: Final = 65_536
BLOCKS_PER_CHUNK: Final = 4
OUTPUT_TOKENS: Final = 12
STUCK_S: Final = 60.0
ANSWER_S_MAX: Final = 150.0
PUT_S_MAX: Final = 30.0


class Host:
    """Use it in `with`. `lost`: counters of gateways that were killed."""

    def __init__(
        self,
        name: str,
        *,
        stand: Stand,
        folder: Path,
        network: Network,
        master: str,
        pool: Pool,
        outcome: Outcome,
        alone: bool = False,
    ) -> None:
        """`alone`: its gateway's card is the remote, and nothing else."""
        self.name = f"{name}, alone" if alone else name
        self._alone = alone
        self._pool = pool
        self._outcome = outcome
        self._asked = 0
        self.lost: Counter[str] = Counter()
        url = f"mooncake://{master}?host={network.address(name)}&segment={SEGMENT_MIB}MiB&memory=16MiB"
        with ExitStack() as stack:
            self.gateway = stack.enter_context(
                Gateway(
                    folder,
                    capacity=CAPACITY,
                    databases=0 if alone else 1,
                    slot_bytes=SLOT_BYTES,
                    options=("--remote", url),
                    prefix=network.on(name),
                    environment=library_environment(),
                )
            )
            config = stand.offloading(LLAMA, self.gateway, blocks_per_chunk=BLOCKS_PER_CHUNK)
            self.engine = stack.enter_context(stand.engine(config))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, trace)

    def ask(self, numbers: list[int]) -> int:
        """Serve these prompts of the pool, the engine's own prefixes forgotten; objects that were restored."""
        requests = []
        right = {}
        for number in numbers:
            self._asked += 1
            requests.append(Request(id=f"r{self._asked}", prompt=self._pool.prompts[number]))
            right[requests[-1].id] = self._pool.answers[number]
        began = time.monotonic()
        try:
            self.engine.begin_serve(requests, max_tokens=OUTPUT_TOKENS, seconds_max=STUCK_S, reset_prefix=True)
            service = self.engine.finish_serve(ANSWER_S_MAX)
        except (EngineError, StandError, OSError) as error:
            self._outcome.engine_deaths += 1
            self._outcome.complain(f"{self.name}: the engine died: {error}")
            raise
        self._outcome.slowest_s = max(self._outcome.slowest_s, time.monotonic() - began)
        for name, answer in service.answers.items():
            self._outcome.requests += 1
            if answer.finish_reason is None:
                self._outcome.stuck += 1
                self._outcome.complain(f"{self.name}: {name} did not end; {counted(service)}")
            elif answer.finish_reason == "error" or not is_right(answer, right[name]):
                self._outcome.wrong += 1
                self._outcome.wrong_alone += self._alone
                got = f"{answer.tokens}, not {right[name]}"
                self._outcome.complain(f"{self.name}: {name} got {got}; {counted(service)}")
        objects = service.counters.product["load_objects"]
        self._outcome.restored[self.name] += objects
        return objects

    def fetched(self) -> int:
        """Objects that its gateway has had from the remote."""
        return int(self.gateway.status()["counters"].get("remote_fetches", 0))

    def put_bytes(self) -> int:
        """What its gateway has put to the remote."""
        return int(self.gateway.status()["counters"].get("remote_store_bytes", 0))

    def await_put(self) -> None:
        """Until everything that the card has confirmed was put, or given up."""
        self.engine.settle()
        deadline = time.monotonic() + PUT_S_MAX
        while self.gateway.status()["remote"]["storing"] and time.monotonic() < deadline:
            time.sleep(0.05)

    def kill_gateway(self) -> None:
        """SIGKILL: its processes for the remote end with it, and with them its part of the pool."""
        counters = self.gateway.status()["counters"]
        self.lost.update({name: counters[name] for name in counters if name.startswith("remote_")})
        self.gateway.kill()

    def holder_pid(self) -> int:
        """The process that holds its part of the pool."""
        return self._pid(calls=False)

    def caller_pid(self) -> int:
        """The process that calls the library for it."""
        return self._pid(calls=True)

    def _pid(self, *, calls: bool) -> int:
        pid = self.gateway.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        words = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        (found,) = (
            child for child, said in words.items() if b"remote_child" in said and (b"--memory-fd" in said) is calls
        )
        return found
