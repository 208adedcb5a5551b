"""The copy queue: order, hurrying, bound, end."""

import threading

import pytest

from xkv_offload import jobs
from xkv_offload.jobs import CopyQueue, Priority


def drain(queue: CopyQueue) -> list[str]:
    queue.close()
    ran: list[str] = []
    order.clear()
    while (work := queue.pop()) is not None:
        work()
    ran.extend(order)
    return ran


order: list[str] = []


def nothing() -> None:
    """A copy of no bytes."""


def push(queue: CopyQueue, priority: Priority, job: int, name: str) -> None:
    assert queue.push(priority, job, lambda: order.append(name))


def test_loads_run_before_stores_and_each_in_order() -> None:
    queue = CopyQueue()
    for number in range(3):
        push(queue, Priority.STORE, 1, f"s{number}")
        push(queue, Priority.LOAD, 2, f"l{number}")
    assert drain(queue) == ["l0", "l1", "l2", "s0", "s1", "s2"]


def test_what_is_waited_for_runs_first_and_once() -> None:
    queue = CopyQueue()
    push(queue, Priority.STORE, 1, "a")
    push(queue, Priority.LOAD, 2, "b")
    push(queue, Priority.STORE, 3, "c")
    queue.hurry({3, 99})
    queue.hurry({3})
    assert drain(queue) == ["c", "b", "a"]


def test_a_full_or_closed_queue_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "COPY_QUEUE_MAX", 1)
    queue = CopyQueue()
    push(queue, Priority.STORE, 1, "a")
    assert not queue.push(Priority.LOAD, 2, nothing)
    assert drain(queue) == ["a"]
    assert not queue.push(Priority.LOAD, 2, nothing)


def test_a_waiting_thread_hears_of_work_and_of_the_end() -> None:
    queue = CopyQueue()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend(queue.pop() for _ in range(2)))
    thread.start()
    push(queue, Priority.STORE, 1, "x")
    queue.close()
    thread.join(5)
    assert not thread.is_alive()
    assert seen[1] is None
