"""Whatever is put in, comes out of a handler or is done to its process: the stated error, once, and nobody
else is disturbed (R17 to R21, R26)."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtq_child import (
    App,
    Handle,
    IdempotencyConflict,
    PayloadError,
    PayloadTooLarge,
    ResultTruncated,
    ResultUnavailable,
    TaskFailed,
)
from dtq_child.broker import Actor, Broker
from dtq_child.task import Call, Record, Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import refilled, started
from tests.support.ledger import Ledger
from tests.support.odd_handlers import ODD_ERRORS, ODD_RESULTS
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until

ODD = "tests.support.odd_handlers:app"
DEAD_LETTERS = "dtq:stream:dead-letter"
ANN = Actor("ann", "test")
PATIENCE_S = 20.0


class Shop:
    """A pool of two children, a producer that knows tasks by name only, and other programs' access."""

    def __init__(self, pool: SupervisorProcess, app: App, ledger: Ledger) -> None:
        assert isinstance(app.broker, Broker)
        self.pool, self.app, self.ledger, self.broker = pool, app, ledger, app.broker
        self.server = pool.server
        self.redis: Any = pool.server.client()

    def send(self, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> Handle:
        return self.app.enqueue(name, arguments, **options)

    def dead(self, task: Handle) -> Record:
        """Waits until it has failed for good."""
        with pytest.raises(TaskFailed):
            task.result(timeout=PATIENCE_S)
        return task.record()

    def letters(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.redis.xrange(DEAD_LETTERS)]

    def letter_of(self, task_id: str) -> dict[bytes, bytes]:
        (letter,) = (fields for fields in self.letters() if fields[b"task_id"] == task_id.encode())
        return letter

    def words(self, task: Handle) -> list[str]:
        return [entry.word for entry in self.ledger.notes(task.id)]

    def rested(self) -> bool:
        return snapshot(self.redis).at_rest()


@pytest.fixture(scope="module")
def shop_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("bad-input")
    ledger = Ledger(folder / "ledger")
    with (
        RedisServer(shared=True) as server,
        SupervisorProcess(
            ODD, server=server, folder=folder, ledger=ledger, flags=["--shutdown-grace", "0"], shared=True
        ) as pool,
    ):
        shop = Shop(pool.wait_ready(), App(redis_url=server.url), ledger)
        yield shop
        shop.broker.close()


@pytest.fixture
def shop(shop_of_all: Shop) -> Iterator[Shop]:
    """Afterwards the same processes stand, nothing is left to do, and a good task goes through."""
    shop = shop_of_all
    before = [process.pid for process in shop.pool.tree()]
    yield shop
    assert shop.send("note", {"value": "good"}).result(timeout=5) == "good"
    until(shop.rested, 5, shop.pool.describe)
    assert [process.pid for process in shop.pool.tree()] == before


# --- entries that are no tasks


def good_entry(task_id: str, band: int) -> dict[str | bytes, Any]:
    """As another program would write it that follows the documented layout."""
    return {
        "task_id": task_id,
        "queue": "default",
        "task_type": "note",
        "payload": "{}",
        "attempt": "1",
        "max_attempts": "",
        "priority": str(band),
        "timeout_ms": "",
        "idempotency_key": "",
    }


def unreadable_entries(band: int) -> list[dict[str | bytes, Any]]:
    """One for each thing that can be wrong."""
    wrong: list[dict[str | bytes, Any]] = [
        {"task_id": "spaces are not allowed"},
        {"task_id": b"\xff\xfe"},
        {"task_id": "x" * 65},
        {"queue": "another"},
        {"task_type": ""},
        {"task_type": b"not utf-8 \xc3("},
        {"task_type": "two\nlines"},
        {"attempt": "0"},
        {"attempt": "first"},
        {"attempt": "1.5"},
        {"attempt": "inf"},
        {"max_attempts": "many"},
        {"timeout_ms": "-1"},
        {"timeout_ms": str(8 * 86_400_000)},
        {"priority": str((band + 1) % 10)},
        {"idempotency_key": "k" * 257},
        {"idempotency_key": b"\xc3("},
    ]
    entries = [{**good_entry("unreadable", band), **fields} for fields in wrong]
    for name in ("task_id", "queue", "task_type", "payload", "attempt", "priority"):
        without = good_entry("unreadable", band)
        del without[name]
        entries.append(without)
    entries.append({b"\x00\xff": b"\x00" * 1000, "no": "task at all"})
    return entries


def test_entries_that_are_no_tasks_become_dead_letters_with_their_bytes_and_good_ones_beside_them_run(
    shop: Shop,
) -> None:
    shop.redis.delete(DEAD_LETTERS)
    shop.broker.pause("default", ANN)
    good: list[Handle] = []
    sent: dict[tuple[str, str], dict[bytes, bytes]] = {}
    for band in range(10):
        stream, unreadable = f"dtq:stream:default:p{band}", unreadable_entries(band)
        for number in range(10):
            good.append(shop.send("note", {"value": number}, priority=band))
            for entry in unreadable[number::10]:
                entry_id = shop.redis.xadd(stream, entry)
                sent[stream, entry_id.decode()] = {as_bytes(k): as_bytes(v) for k, v in entry.items()}
    shop.broker.resume("default", ANN)
    assert [task.result(timeout=PATIENCE_S) for task in good] == list(range(10)) * 10
    until(shop.rested, 10, shop.pool.describe)
    letters = shop.letters()
    assert len(letters) == len(sent) == 10 * len(unreadable_entries(0))
    for letter in letters:
        cause = json.loads(letter[b"cause"])
        raw = {k.removeprefix(b"raw:"): v for k, v in letter.items() if k.startswith(b"raw:")}
        assert raw == sent.pop((cause["stream"], cause["entry_id"]))
        assert (letter[b"last_error_class"], letter[b"retryable"]) == (b"UnreadableEntry", b"0")
        assert letter[b"last_error"].decode() == cause["unreadable"]
    assert {len(shop.ledger.starts(task.id)) for task in good} == {1}
    assert not shop.redis.exists("dtq:task:unreadable")


def as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def test_an_entry_of_another_program_without_a_record_is_a_task_like_any_other(shop: Shop) -> None:
    shop.redis.xadd("dtq:stream:default:p4", {**good_entry("from-elsewhere", 4), "payload": '{"value": 3}'})
    task = shop.app.handle("from-elsewhere")
    until(lambda: shop.redis.exists("dtq:task:from-elsewhere"), 5, shop.pool.describe)
    assert task.result(timeout=5) == 3
    assert json.loads(task.record().get("metadata")) == {"rebuilt": True}


# --- payloads

NO_PAYLOADS = {
    "a list": b"[1, 2]",
    "text": b'"text"',
    "null": b"null",
    "nothing": b"",
    "no JSON": b"{value: 1}",
    "half of it": b'{"value": ',
    "NaN": b'{"value": NaN}',
    "no UTF-8": b'{"value": "\xff"}',
    "1000 levels": b'{"value": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "65 bits": b'{"value": 18446744073709551616}',
    "zeros": b"\x00" * 100,
}


def test_a_payload_that_is_no_json_object_is_dead_at_once_with_its_bytes(shop: Shop) -> None:
    """Written by another program: ours refuse them."""
    calls = [Call(f"no-payload-{n}", "default", "note", data) for n, data in enumerate(NO_PAYLOADS.values())]
    shop.broker.enqueue(calls)
    for call in calls:
        task = shop.app.handle(call.task_id)
        record = shop.dead(task)
        assert record.get("last_error_class") == "BadArguments", record.as_dict()
        assert "JSON" in record.get("last_error") or "$" in record.get("last_error"), record.as_dict()
        letter = shop.letter_of(call.task_id)
        assert letter[b"payload"] == call.payload
        assert (letter[b"attempts_made"], letter[b"retryable"]) == (b"0", b"0")
        assert (record.number("delivery"), record.number("crashes")) == (1, 0)
        assert shop.words(task) == []


NO_ARGUMENTS = {
    "a wrong name": ("sleep", {"secs": 1}),
    "one too many": ("sleep", {"seconds": 0, "more": 1}),
    "none at all": ("sleep", {}),
    "no name of Python's": ("sleep", {"seconds": 0, "": 1, "a b": 2}),
    "of an async handler": ("async_sleep", {"minutes": 1}),
}


def test_arguments_that_do_not_fit_the_handler_are_dead_at_once_and_it_is_not_called(shop: Shop) -> None:
    sent = [shop.send(name, arguments, max_attempts=5) for name, arguments in NO_ARGUMENTS.values()]
    for task in sent:
        record = shop.dead(task)
        assert record.get("last_error_class") == "BadArguments"
        assert "argument" in record.get("last_error"), record.as_dict()
        assert (record.number("delivery"), record.number("attempt")) == (1, 1)
        assert shop.words(task) == []


def test_what_a_producer_is_refused_was_never_written(shop: Shop) -> None:
    before = sorted(shop.redis.scan_iter("dtq:task:*"))
    with pytest.raises(PayloadError, match=r"\$\.value\[1\]"):
        shop.send("note", {"value": [1.0, float("nan")]})
    with pytest.raises(PayloadError, match="surrogate"):
        shop.send("note", {"value": "\ud800"})
    with pytest.raises(PayloadTooLarge):
        shop.send("note", {"value": "x" * (1 << 20)})
    assert sorted(shop.redis.scan_iter("dtq:task:*")) == before


# --- task types that nobody knows


def test_an_unknown_task_type_waits_unspent_for_a_worker_that_knows_it_or_for_its_time_to_be_over(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, ledger: Ledger
) -> None:
    old = start_supervisor(server=redis_server, procs=1).wait_ready()
    with Producer(redis_server) as producer:
        deployed, misspelt = producer.send("known_later"), producer.send("misspelt", max_attempts=1)
        for task_id in (deployed, misspelt):
            record = producer.wait(task_id, Status.RETRY_SCHEDULED)
            assert (record.number("attempt"), record.number("crashes")) == (1, 0)
            due_in = int(record.get("due_at_ms")) - int(record.get("first_unknown_at_ms"))
            assert 2_000 < due_in <= 7_500
        (told,) = (line for line in old.log().splitlines() if "unknown task type 'misspelt'" in line)
        assert "include=" in told
        assert "wait_for_file" in told
        # As in a deploy; with both at work either might be the next to meet them.
        assert old.stop(timeout=5) == 0
        env = {"DTQ_UNKNOWN_TASK_TTL_S": "1"}
        new = start_supervisor(ODD, server=redis_server, procs=1, env=env).wait_ready()
        check_run_when_due(producer, ledger, deployed, new)
        record = producer.wait(misspelt, Status.DEAD_LETTERED)
        assert record.get("last_error_class") == "UnknownTaskType"
        assert (record.number("attempt"), record.number("crashes")) == (1, 0)


def check_run_when_due(producer: Producer, ledger: Ledger, task_id: str, pool: SupervisorProcess) -> None:
    ready, due = time.time(), int(producer.record(task_id).get("due_at_ms")) / 1000
    start = started(ledger, task_id)
    assert start.pid in pool.child_pids()
    assert due <= start.wall < max(ready, due) + 1.0
    record = producer.wait(task_id, Status.SUCCEEDED)
    assert (record.number("attempt"), record.number("crashes"), record.number("delivery")) == (1, 0, 2)


# --- results


def test_a_result_that_json_cannot_carry_is_left_out_and_the_task_has_succeeded(shop: Shop) -> None:
    sent = {kind: shop.send("return_odd", {"kind": kind}) for kind in ODD_RESULTS}
    for kind, task in sent.items():
        with pytest.raises(ResultUnavailable, match=r"\$|cycle|deep") as raised:
            task.result(timeout=PATIENCE_S)
        print(kind, "→", raised.value)
        assert task.status() == Status.SUCCEEDED
        assert shop.words(task) == ["start", "end"]
        assert not shop.redis.exists(f"dtq:result:{task.id}")


@pytest.mark.parametrize("megabytes", [0.02, 600])
def test_a_result_that_is_too_large_is_cut_and_says_so(shop: Shop, megabytes: float) -> None:
    task = shop.send("big_result", {"mb": megabytes})
    with pytest.raises(ResultTruncated) as raised:
        task.result(timeout=PATIENCE_S)
    size = int(megabytes * (1 << 20)) + 2
    assert raised.value.size == size
    assert raised.value.part == b'"' + b"x" * 8191
    assert shop.redis.strlen(f"dtq:result:{task.id}") == 8192
    assert task.record().number("result_size") == size


# --- errors


def test_an_error_that_cannot_be_written_down_is_still_told_within_bounds(shop: Shop) -> None:
    sent = {kind: shop.send("raise_odd", {"kind": kind}) for kind in ODD_ERRORS}
    told = {}
    for kind, task in sent.items():
        record = shop.dead(task)
        assert len(record.get("last_error").encode()) <= 4096
        assert 0 < len(record.get("traceback").encode()) <= 16384
        assert "in raise_odd" in record.get("traceback"), record.get("traceback")
        assert shop.words(task) == ["start", "raised"]
        told[kind] = (record.get("last_error_class"), record.get("last_error"), record.get("traceback"))
    ours = "tests.support.odd_handlers"
    assert told["unprintable"][0] == told["exits when printed"][0] == f"{ours}.Unprintable"
    assert "__str__ raised ValueError" in told["unprintable"][1]
    assert "__str__ raised SystemExit" in told["exits when printed"][1]
    assert told["lone surrogates"][1] == "before \\ud800 after"
    assert told["50 MB of text"][1].startswith("éééé")
    assert told["50 MB of text"][1].endswith("[cut]")
    assert "link 2999" in told["3000 causes"][2]
    assert "the last of the chain" in told["3000 causes"][2]
    assert told["a group in groups"][0] == "ExceptionGroup"
    assert "level 29" in told["a group in groups"][2]


def test_a_handler_chooses_another_try_none_or_leaves_it_to_the_policy(shop: Shop) -> None:
    again = shop.send("retry_task", {"delay": 0.4, "times": 2})
    rejected = shop.send("reject", {"message": "not this one"}, max_attempts=5)
    never, retried = (shop.send("never_retried", {"kind": kind}) for kind in ("KeyError", "ValueError"))
    assert again.result(timeout=PATIENCE_S) == 3
    starts = [e.monotonic_ns / 1e9 for e in shop.ledger.starts(again.id)]
    assert all(second - first >= 0.4 for first, second in itertools.pairwise(starts))
    for task, error, attempts in [
        (rejected, "RejectTask", 1),
        (never, "KeyError", 1),
        (retried, "ValueError", 3),
    ]:
        record = shop.dead(task)
        assert record.get("last_error_class") == error
        assert len(shop.ledger.starts(task.id)) == attempts
        assert shop.letter_of(task.id)[b"attempts_made"] == b"%d" % attempts


# --- idempotency


def test_one_task_a_key_while_it_runs_and_after_it_succeeded_and_a_new_one_after_a_dead_letter(
    shop: Shop, tmp_path: Path
) -> None:
    gate, key = tmp_path / "gate", {"idempotency_key": "order 7"}
    first = shop.send("hold", {"path": str(gate)}, **key)
    started(shop.ledger, first.id)
    while_running = shop.send("hold", {"path": str(gate)}, **key)
    with pytest.raises(IdempotencyConflict, match=first.id):
        shop.send("hold", {"path": "/another"}, **key)
    gate.touch()
    first.result(timeout=5)
    completed = shop.send("hold", {"path": str(gate)}, **key)
    with pytest.raises(IdempotencyConflict):
        shop.send("hold", {"path": "/another"}, **key)
    for again in (while_running, completed):
        assert (again.id, again.deduplicated) == (first.id, True)
    assert len(shop.ledger.starts(first.id)) == 1
    failed = shop.send("reject", {"message": "a"}, idempotency_key="order 8")
    shop.dead(failed)
    another = shop.send("reject", {"message": "b"}, idempotency_key="order 8")
    assert (another.deduplicated, another.id == failed.id) == (False, False)
    shop.dead(another)


# --- what a task does to its process


def on_the_same_child(shop: Shop, pid: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What an observer returns that was executed by that process."""
    for _ in range(50):
        shown: dict[str, Any] = shop.send(name, arguments).result(timeout=5)
        if shown["pid"] == pid:
            return shown
    raise AssertionError(f"none of 50 tasks came to the child {pid}")


def test_handlers_mask_and_directory_are_put_back_and_the_rest_is_as_documented(shop: Shop) -> None:
    before = shop.send("show_state").result(timeout=5)
    leak = shop.send("leak_state")
    assert leak.result(timeout=5) is None
    pid = shop.ledger.starts(leak.id)[0].pid
    after = on_the_same_child(shop, pid, "show_state", {})
    assert (after["cwd"], after["ignored"], after["blocked"]) == (before["cwd"], [], [])
    assert after["leak"] == "1"  # the environment is not put back
    until(lambda: "and it was put back" in shop.pool.log(), 5, shop.pool.describe)


def test_traps_that_a_task_leaves_for_signals_hurt_nobody_after_it(shop: Shop) -> None:
    for _ in range(3):
        pid = shop.send("leave_traps", {"seconds": 0.05}).result(timeout=5)
        shown = on_the_same_child(shop, pid, "wait_and_show", {"seconds": 0.1})
        assert shown["slept"] >= 0.1
        assert (shown["alarm"], shown["blocked"]) == (0.0, [])


def test_an_alarm_of_its_own_is_a_tasks_own_error(shop: Shop) -> None:
    record = shop.dead(shop.send("own_alarm", {"seconds": 0.05}))
    assert record.get("last_error_class") == "tests.support.odd_handlers.Alarmed"
    assert record.get("last_error") == "SIGALRM"


@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_process_that_a_task_forks_is_no_second_child(shop: Shop, how: str) -> None:
    """It comes out of the handler with our token and our connection."""
    said = len(shop.pool.log())
    for _ in range(5):
        task = shop.send("fork_and_come_back", {"how": how})
        assert task.result(timeout=3) == "the first"
        assert [e.get("outcome") for e in task.record().executions()] == ["succeeded"]
    heard = shop.pool.log()[said:]
    assert heard.count("a process that a task has forked failed") == (5 if how == "raises" else 0)
    assert "Redis did not do it" not in heard


def test_processes_that_a_task_forks_end_when_they_are_told_to(shop: Shop) -> None:
    """They have none of the handlers by which the process of the task hears nothing."""
    ended = shop.send("terminate_processes", {"count": 20}).result(timeout=8)
    assert ended == [-signal.SIGTERM] * 20
    record = shop.dead(shop.send("fail_in_pool"))
    assert record.get("last_error_class") == "tests.support.handlers.ProbeFailure"
    assert shop.send("interrupt_fork").result(timeout=5) == 7


@pytest.mark.parametrize("which", ["stderr", "all others"])
def test_files_that_a_task_closes_cost_no_process(shop: Shop, which: str) -> None:
    for _ in range(3):
        record = shop.dead(shop.send("close_files", {"which": which}))
        assert record.get("last_error_class") == "tests.support.handlers.ProbeFailure"
        assert (record.number("crashes"), record.number("delivery")) == (0, 1)


# --- async handlers


def test_an_async_handler_knows_its_task_wherever_it_awaits(shop: Shop) -> None:
    task = shop.send("show_async", metadata={"for": "ann"})
    told = {"id": task.id, "attempt": 1, "queue": "default", "metadata": {"for": "ann"}}
    assert task.result(timeout=5) == [told] * 4


def test_a_soft_timeout_is_a_cancellation_for_async_handlers(shop: Shop) -> None:
    tidy = shop.send("tidy_async", {"seconds": 60}, soft_timeout=0.2, timeout=30)
    lets_it_pass = shop.send("async_sleep", {"seconds": 60}, soft_timeout=0.2, timeout=30, max_attempts=1)
    assert tidy.result(timeout=5) == "told"
    (told,) = shop.ledger.notes(tidy.id, "told")
    assert told.facts["why"].startswith("SoftTimeout: ")
    assert shop.dead(lets_it_pass).get("last_error_class") == "SoftTimeout"
    (raised,) = shop.ledger.notes(lets_it_pass.id, "raised")
    assert raised.facts["error"] == "CancelledError"


def test_an_async_handler_that_is_deaf_to_cancellation_is_killed_at_its_timeout(shop_of_all: Shop) -> None:
    shop = shop_of_all
    task = shop.send("deaf_async", {"seconds": 60}, soft_timeout=0.1, timeout=0.5)
    begun = started(shop.ledger, task.id)
    record = shop.dead(task)
    assert record.get("last_error_class") == "TaskTimeout"
    assert time.monotonic() - begun.monotonic_ns / 1e9 < 0.5 + 1.5
    refilled(shop.pool, {begun.pid}, 5)


# --- hooks


@pytest.mark.parametrize("name", ["hooked", "hooked_async"])
def test_hooks_stand_around_every_handler_and_their_own_failures_change_nothing(
    shop: Shop, name: str
) -> None:
    works = shop.send(name, metadata={"hooks": True})
    fails = shop.send(name, {"failing": True}, metadata={"hooks": True})
    assert works.result(timeout=5) == "done"
    assert shop.dead(fails).get("last_error_class") == "tests.support.handlers.ProbeFailure"
    assert shop.words(works) == ["at start", "start", "end", "at end"]
    assert shop.words(fails) == ["at start", "start", "raised", "at end"]
    (at_start,) = shop.ledger.notes(works.id, "at start")
    assert at_start.facts["same"]
    (at_end,) = shop.ledger.notes(fails.id, "at end")
    assert at_end.facts["error"] == "ProbeFailure"
