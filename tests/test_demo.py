"""What the demo concludes from two processes' reports: a wrong verdict would show a product that does not work.

Owns: cases for the pure parts of demo/, and for taking down what it started. Must not know: engines.
"""

import json
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the demo is run from the tree

from demo import processes, run
from demo.outcome import Outcome, Served

NOTHING = MappingProxyType(
    dict.fromkeys(
        ("load_objects", "load_bytes", "lookup_hits", "lookup_misses", "lookup_denied", "lookup_no_gateway"), 0
    )
)
COLD = Served(
    pid=10,
    chunk_tokens=512,
    seconds=20.0,
    tokens=tuple(range(16)),
    cached_tokens=0,
    computed_tokens=4100,
    counters={**NOTHING, "lookup_misses": 8},
)
WARM = Served(
    pid=11,
    chunk_tokens=512,
    seconds=2.0,
    tokens=tuple(range(16)),
    cached_tokens=4096,
    computed_tokens=4,
    counters={**NOTHING, "load_objects": 8, "load_bytes": 1024, "lookup_hits": 8},
)
GOOD = Outcome(target="1.2.3", prompt_tokens=4100, cold=COLD, warm=WARM)


def _warm(**changes: Any) -> Outcome:
    return replace(GOOD, warm=replace(WARM, **changes))


def _loads(objects: int) -> dict[str, int]:
    return {**WARM.counters, "load_objects": objects}


def test_a_whole_restore_is_no_fault_and_its_line_has_the_promised_fields_in_order() -> None:
    assert GOOD.fault() is None
    assert GOOD.line() == (
        '{"target": "1.2.3", "prompt_tokens": 4100, "restored_tokens": 4096, "identical": true, '
        '"objects": 8, "bytes": 1024}'
    )


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (_warm(tokens=(*range(15), 99)), "the answers differ"),
        (_warm(tokens=tuple(range(15))), "the answers differ"),
        (replace(GOOD, cold=replace(COLD, tokens=(1,)), warm=replace(WARM, tokens=(1,))), "the answer has 1 tokens"),
        (_warm(pid=10), "both engines ran in process 10"),
        (replace(GOOD, cold=replace(COLD, computed_tokens=4)), "it was not cold"),
        (replace(GOOD, cold=replace(COLD, counters=_loads(1))), "it was not cold"),
        (_warm(counters=_loads(7), cached_tokens=3584, computed_tokens=516), "every whole chunk is 4096"),
        (_warm(counters=_loads(0), cached_tokens=4096), "0 tokens were restored"),
        (_warm(cached_tokens=4064), "vLLM skipped 4064"),
        (_warm(computed_tokens=4100), "but 4100 computed"),
        (_warm(seconds=10.1), "only 2.0 times as fast"),
    ],
)
def test_whatever_is_missing_is_a_fault_of_one_line(outcome: Outcome, reason: str) -> None:
    fault = outcome.fault()
    assert fault is not None
    assert reason in fault
    assert "\n" not in fault


def test_restored_tokens_come_from_counted_loads_and_not_from_what_vllm_skipped() -> None:
    assert _warm(counters=_loads(3)).warm.restored_tokens == 3 * 512
    assert json.loads(_warm(counters=_loads(3)).line())["restored_tokens"] == 3 * 512


def test_the_table_and_the_sentences_name_both_processes_and_where_tokens_came_from() -> None:
    rows = dict(GOOD.rows())
    assert rows["speed-up"] == "10.0 times"
    assert rows["tokens restored"] == "4,096 of 4,100"
    assert rows["hit rate"] == "100% (8 of 8 lookups)"
    text = "\n".join(GOOD.sentences())
    assert "process 10 (ended): computed 4,100 of 4,100" in text
    assert "process 11 (new):   computed 4 of 4,100" in text
    assert "4,096 came from the card, 0 from vLLM's own prefix cache" in text


def test_a_table_without_lookups_divides_by_nothing() -> None:
    assert dict(_warm(counters=NOTHING).rows())["hit rate"] == "no lookups"


def test_a_report_becomes_what_was_served() -> None:
    event = {name: getattr(COLD, name) for name in Served.__slots__}
    assert Served.of(json.loads(json.dumps({"event": "result", **event}))) == COLD


def test_the_prompt_has_more_than_its_whole_chunks_and_the_warm_up_has_none() -> None:
    """A prompt of whole chunks alone would leave nothing to compute; a warm-up chunk would be looked up."""
    assert run.PROMPT_TOKENS >= 4_000
    assert 0 < run.PROMPT_TOKENS % run.CHUNK_TOKENS < run.BLOCK_SIZE
    assert run.WARM_UP_TOKENS + run.WARM_UP_NEW_TOKENS < run.CHUNK_TOKENS
    assert run.prompt(tokens=50, seed=1) == run.prompt(tokens=60, seed=1)[:50] != run.prompt(tokens=50, seed=2)


def test_both_processes_get_the_same_hash_seed_and_the_engine_stays_in_them(tmp_path: Path) -> None:
    environment = processes.child_environment(
        {"PATH": "/bin", "PYTHONHASHSEED": "random"}, processes.Place(tmp_path), "1.2.3"
    )
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CACHE_ROOT"].endswith("1.2.3") or str(tmp_path) in environment["VLLM_CACHE_ROOT"]
    assert environment["PATH"] == "/bin"


@pytest.mark.parametrize("text", ["../x", "", "a/b", "-1"])
def test_what_names_a_folder_is_a_release_number(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        run.release(text)


@pytest.fixture
def kept_signals() -> Any:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_process_that_still_names_the_folder_is_ended_and_the_folder_goes(
    kept_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that does not answer would otherwise outlive the demo."""
    monkeypatch.setattr(processes, "GATEWAY_STOP_S_MAX", 0.2)
    with processes.temporary_place() as place:
        stubborn = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(place.folder)])
        _until(lambda: processes.processes_naming(place.folder) == [stubborn.pid])
    assert stubborn.wait(10) == -signal.SIGKILL
    assert not place.folder.exists()


def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> processes.Place:
    script = tmp_path / "serve.py"
    script.write_text(f"import os, sys\nout = os.fdopen(int(sys.argv[3]), 'w')\n{text}\n")
    monkeypatch.setattr(processes, "SERVE", script)
    return processes.Place(tmp_path)


def test_a_process_that_ends_before_its_result_is_a_failure_and_its_log_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = _script(tmp_path, monkeypatch, "print('what went wrong')")
    with (
        pytest.raises(processes.DemoError, match="ended before its result"),
        processes.child("serve", {}, place, "1.2.3") as process,
    ):
        list(process.events())
    assert "what went wrong" in capsys.readouterr().err


def test_events_arrive_up_to_the_result_and_the_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = _script(
        tmp_path,
        monkeypatch,
        """out.write('{"event": "started"}\\n{"event": "result", "pid": %d}\\n' % os.getpid()); out.flush()""",
    )
    with processes.child("serve", {}, place, "1.2.3") as process:
        first, last = process.events()
        process.wait()
    assert (first["event"], last["event"]) == ("started", "result")
    assert not Path(f"/proc/{last['pid']}").exists()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
