"""A run: two hosts with a gateway and an engine each, one pool between them, and what may happen to it, part by part.

Owns: the parts and their order, what is stored where, when something is back. Must not know: how an answer is made.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final

from remote.host import Host
from remote.master import Master
from remote.network import HOSTS, SWITCH, Network
from remote.outcome import AFTER, Outcome
from stand.cases import Stand, target
from stand.models import LLAMA, prompt
from stand.pools import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stand.runs import Options

PROMPTS: Final = 48
PROMPT_TOKENS: Final = 600  # four chunks of 128 tokens, of half a MiB each, and a rest
FRESH: Final = 2  # prompts that are stored by one host to be restored by the other
DOWN_S: Final = 3.0  # the master, a node
CUT_S: Final = 10.0
STOPPED_S: Final = 5.0
HEAL_S_MAX: Final = 60.0  # until something comes across again; the gateway tries again after 10 s at the latest
OUTPUT_TOKENS: Final = 12


class Run:
    """All of it. `say` gets a line now and then."""

    def __init__(self, stand: Stand, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self._stand = stand
        self._folder = folder
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._outcome = Outcome(target().release, options, "?")
        self._pool = Pool([], [], 0)
        self._fresh: Iterator[int] = count()
        self._part_s = max(5.0, options.seconds / len(AFTER))

    def run(self) -> Outcome:
        """Clean answers first, then part by part."""
        with self._stand.engine(self._stand.config(LLAMA)) as engine:
            coming = (prompt(LLAMA, tokens=PROMPT_TOKENS, seed=self._options.seed + number) for number in count(5_000))
            self._pool = Pool.ask(engine, coming, wanted=PROMPTS, output_tokens=OUTPUT_TOKENS)
        self._fresh = iter(range(len(self._pool.prompts)))
        with ExitStack() as stack:
            network = stack.enter_context(Network())
            self._outcome.network = "namespaces" if network.is_real else "loopback"
            self._say(f"{len(self._pool.prompts)} prompts; hosts are {self._outcome.network}")
            master = stack.enter_context(Master(self._folder, network.address(SWITCH), network.on(SWITCH)))
            with self._hosts(network, master, alone=False) as hosts:
                self._parts(network, master, hosts)
            with self._hosts(network, master, alone=True) as hosts:
                self._alone(*hosts)
        return self._outcome

    @contextmanager
    def _hosts(self, network: Network, master: Master, *, alone: bool) -> Iterator[list[Host]]:
        with ExitStack() as stack:
            hosts = [
                stack.enter_context(
                    Host(
                        name,
                        stand=self._stand,
                        folder=self._folder / (f"{name}-alone" if alone else name),
                        network=network,
                        master=master.address,
                        pool=self._pool,
                        outcome=self._outcome,
                        alone=alone,
                    )
                )
                for name in HOSTS[1:]
            ]
            yield hosts
            for host in hosts:
                counters = host.gateway.status()["counters"]
                self._outcome.remote.update({name: counters[name] for name in counters if name.startswith("remote_")})
                self._outcome.remote.update(host.lost)

    def _alone(self, a: Host, b: Host) -> None:
        """Without a card; also while the processes that put from the rings, and load into them, are killed."""
        if self._options.canary:
            b.engine.zero_loads(on=True)
            self._across("alone", a, b)
            return
        self._across("alone", a, b)
        with self._serving([a, b]):
            for host in (a, b, a):
                os.kill(host.caller_pid(), signal.SIGKILL)
                time.sleep(self._part_s / 3)
        self._across("alone, killed", b, a)

    def _parts(self, network: Network, master: Master, hosts: list[Host]) -> None:
        a, b = hosts
        if self._options.canary:
            b.engine.zero_loads(on=True)
            self._across("across", a, b)
            return
        self._across("across", a, b)
        self._across("across", b, a)
        with self._serving(hosts):
            master.kill()
            time.sleep(DOWN_S)
            master.start()
            time.sleep(self._part_s)
        self._across("master", a, b)
        with self._serving(hosts):
            holder = a.holder_pid()
            os.kill(holder, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(holder, signal.SIGCONT)
            time.sleep(1.0)
            a.kill_gateway()
            time.sleep(DOWN_S)
            a.gateway.start()
            time.sleep(self._part_s)
        self._across("node", b, a)
        with self._serving(hosts):
            self._cut(network, master)
            time.sleep(self._part_s)
        self._across("partition", a, b)
        self._pressure(hosts)
        self._across("pressure", b, a)

    def _cut(self, network: Network, master: Master) -> None:
        """Host b alone; where hosts are addresses of one machine: everybody from the master."""
        if network.is_real:
            network.cut("b")
        else:
            os.kill(master.pid, signal.SIGSTOP)
        time.sleep(CUT_S)
        if network.is_real:
            network.mend("b")
        else:
            os.kill(master.pid, signal.SIGCONT)

    def _pressure(self, hosts: list[Host]) -> None:
        """More than the pool takes: every prompt by every host, so that the pool drops what was stored before."""
        before = sum(host.put_bytes() for host in hosts)
        for number in range(len(self._pool.prompts)):
            for host in hosts:
                host.ask([number])
        self._outcome.pressed_bytes = sum(host.put_bytes() for host in hosts) - before
        self._say(f"all {len(self._pool.prompts)} prompts by both hosts")

    def _across(self, part: str, store: Host, restore: Host) -> None:
        """One stores what the other then restores; again with other prompts until something has come across."""
        began = time.monotonic()
        while time.monotonic() - began < HEAL_S_MAX:
            numbers = [self._next() for _ in range(FRESH)]
            store.ask(numbers)
            store.await_put()
            before = restore.fetched()
            objects = restore.ask(numbers)
            came = restore.fetched() - before
            if came and objects:
                self._outcome.across[part] += came
                self._outcome.healed_s.setdefault(part, round(time.monotonic() - began, 1))
                self._say(f"{part}: {came} objects of {store.name} came to {restore.name}, {objects} were restored")
                return
            time.sleep(0.5)
        self._outcome.complain(f"{part}: nothing of {store.name} came to {restore.name} within {HEAL_S_MAX:.0f} s")

    def _next(self) -> int:
        """A prompt that was not asked for on purpose yet; after the last one, any, with what it left forgotten."""
        number = next(self._fresh, None)
        return self._rng.randrange(len(self._pool.prompts)) if number is None else number

    def _serving(self, hosts: list[Host]) -> _Serving:
        return _Serving(hosts, self._rng)


class _Serving:
    """While it lasts, both engines are asked for this and that."""

    def __init__(self, hosts: list[Host], rng: random.Random) -> None:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(host, random.Random(rng.random()))) for host in hosts
        ]

    def _serve(self, host: Host, rng: random.Random) -> None:
        while not self._over.is_set():
            host.ask([rng.randrange(PROMPTS) for _ in range(rng.randint(1, 3))])

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
