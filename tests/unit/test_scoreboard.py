"""The scoreboard carries what its one writer wrote, whole, or says that it cannot be read."""

from __future__ import annotations

import os
import string
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtq_child import row as layout
from dtq_child import scoreboard
from dtq_child.retry import RetryPolicy
from dtq_child.scoreboard import Counters, Execution, Order, Phase, Row, Scoreboard

NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
TIMES = st.floats(min_value=0, max_value=1e9)
SMALL = st.integers(0, 2**32 - 1)
EXECUTIONS = st.builds(
    Execution,
    seq=st.integers(1, 2**56 - 1),
    task_id=NAMES,
    task_type=st.text(min_size=1, max_size=50).filter(lambda text: text.isprintable()),
    stream=NAMES,
    entry_id=st.from_regex(r"[0-9]{13}-[0-9]{1,6}", fullmatch=True),
    delivery=SMALL,
    attempt=SMALL,
    max_attempts=SMALL,
    crashes=SMALL,
    max_crashes=SMALL,
    timeout_ms=st.integers(0, 2**63),
    started=TIMES,
    soft_deadline=TIMES,
    hard_deadline=TIMES,
    policy=st.builds(RetryPolicy, TIMES, TIMES, TIMES, st.floats(0, 1)),
    claim_sent=TIMES,
)
FIRST = Execution(
    seq=1,
    task_id="018f-1",
    task_type="shop.tasks.resize",
    stream="dtq:stream:images:p5",
    entry_id="1700000000000-0",
    delivery=1,
    attempt=1,
    max_attempts=3,
    crashes=0,
    max_crashes=3,
    timeout_ms=30_000,
    started=100.0,
    soft_deadline=0.0,
    hard_deadline=130.0,
    policy=RetryPolicy(10.0, 2.0, 3600.0, 0.25),
    claim_sent=99.5,
)


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    made = Scoreboard.create(3)
    yield made
    made.close()
    os.close(made.fd)


def read(board: Scoreboard, index: int) -> Row:
    row = board.read_row(index)
    assert row is not None
    return row


@given(EXECUTIONS)
def test_an_execution_is_read_as_it_was_written(execution: Execution) -> None:
    board = Scoreboard.create(1)
    try:
        board.child_row(0).executing(execution)

        row = read(board, 0)

        assert row.execution == execution
        assert row.seq == execution.seq
        assert row.phase is Phase.EXECUTING
    finally:
        board.close()
        os.close(board.fd)


@given(st.lists(st.tuples(NAMES, NAMES.map(lambda name: name[:40])), max_size=layout.MAX_HELD))
def test_held_entries_are_read_as_they_were_written(pairs: list[tuple[str, str]]) -> None:
    board = Scoreboard.create(1)
    try:
        child = board.child_row(0)
        child.held([("dtq:stream:other:p0", "9-9")] * 3)
        child.held(pairs)

        assert read(board, 0).held == tuple(pairs)
    finally:
        board.close()
        os.close(board.fd)


def test_a_task_is_followed_from_claim_to_claim(board: Scoreboard) -> None:
    board.reset_row(1, 7, may_claim=True)
    child = board.child_row(1)
    assert read(board, 1).phase is Phase.BOOTING

    child.born(4711)
    child.ready(10.0)
    row = read(board, 1)
    assert (row.life, row.pid, row.phase, row.idle_since) == (7, 4711, Phase.READY, 10.0)

    child.claiming(11.0)
    row = read(board, 1)
    assert (row.phase, row.last_claim) == (Phase.CLAIMING, 11.0)

    child.executing(FIRST)
    row = read(board, 1)
    assert (row.phase, row.execution, row.idle_since, row.settling_since) == (
        Phase.EXECUTING,
        FIRST,
        0.0,
        0.0,
    )

    child.settling(12.0)
    row = read(board, 1)
    assert (row.phase, row.execution, row.settling_since) == (Phase.SETTLING, FIRST, 12.0)

    child.idle(13.0)
    row = read(board, 1)
    assert (row.phase, row.execution, row.seq, row.idle_since) == (Phase.READY, None, 1, 13.0)
    assert row.settling_since == 0.0

    child.exiting(14.0)
    row = read(board, 1)
    assert (row.phase, row.idle_since) == (Phase.EXITING, 14.0)


def test_looking_for_work_in_vain_makes_a_child_no_less_idle(board: Scoreboard) -> None:
    child = board.child_row(0)
    child.ready(10.0)
    for now in (11.0, 12.0):
        child.claiming(now)
        child.idle(now + 0.5)

    assert read(board, 0).idle_since == 10.0


def test_redis_counts_as_there_since_its_first_answer(board: Scoreboard) -> None:
    child = board.child_row(0)
    child.redis_ok(5.0)
    child.redis_ok(6.0)
    assert read(board, 0).redis_ok_since == 5.0

    child.redis_lost()
    assert read(board, 0).redis_ok_since == 0.0

    child.redis_ok(9.0)
    assert read(board, 0).redis_ok_since == 9.0


def test_every_counter_counts_for_itself(board: Scoreboard) -> None:
    child = board.child_row(2)
    names = [field.name for field in fields(Counters)]
    for number, name in enumerate(names, 1):
        child.count(name)
        child.count(name, number)

    assert read(board, 2).counters == Counters(*range(2, len(names) + 2))


def test_a_row_is_its_own(board: Scoreboard) -> None:
    board.child_row(0).executing(FIRST)
    board.order(2, Order.CANCELLED, 5)
    board.renewed(2, 44.0)

    middle = read(board, 1)

    assert (middle.phase, middle.execution, middle.order_kind, middle.renewed) == (
        Phase.BOOTING,
        None,
        0,
        0.0,
    )
    with pytest.raises(IndexError):
        board.read_row(3)
    with pytest.raises(IndexError):
        board.child_row(-1)


def test_a_new_life_finds_nothing_of_the_last_one(board: Scoreboard) -> None:
    board.reset_row(0, 1, may_claim=True)
    child = board.child_row(0)
    child.born(4711)
    child.ready(9.0)
    child.redis_ok(9.0)
    child.count("processed", 5)
    child.held([("dtq:stream:images:p5", "1-0")])
    child.executing(FIRST)
    board.order(0, Order.SOFT_TIMEOUT, 1)
    board.stop_row(0)
    board.renewed(0, 77.0)

    board.reset_row(0, 2, may_claim=False)

    row = read(board, 0)
    assert row == Row(
        life=2,
        pid=0,
        phase=Phase.BOOTING,
        seq=0,
        execution=None,
        held=(),
        settling_since=0.0,
        counters=Counters(),
        idle_since=0.0,
        redis_ok_since=0.0,
        last_claim=0.0,
        stop=False,
        may_claim=False,
        renewed=0.0,
        order_kind=0,
        order_seq=0,
    )


def test_a_child_that_may_execute_three_is_spent_when_the_third_has_begun(board: Scoreboard) -> None:
    board.reset_row(0, 1, may_claim=True, stop_after=3)
    child = board.child_row(0)
    child.sized(40_000_000)
    for seq in (1, 2, 3):
        assert not child.spent
        child.executing(replace(FIRST, seq=seq))
    assert child.spent
    row = read(board, 0)
    assert (row.stop_after, row.seq, row.ready_bytes) == (3, 3, 40_000_000)
    board.reset_row(0, 2, may_claim=True)
    assert not board.child_row(0).spent
    assert read(board, 0).ready_bytes == 0


def test_the_child_sees_what_its_supervisor_wants(board: Scoreboard) -> None:
    board.reset_row(1, 1, may_claim=False)
    child = board.child_row(1)
    assert (child.stop, child.may_claim, child.order()) == (False, False, (0, 0))

    board.allow_claim(1)
    board.stop_row(1)
    board.order(1, Order.SHUTDOWN, 2**55 + 1)

    assert (child.stop, child.may_claim) == (True, True)
    assert child.order() == (Order.SHUTDOWN, 2**55 + 1)
    board.clear_order(1)
    assert child.order() == (Order.NONE, 0)


def test_all_children_see_the_header(board: Scoreboard) -> None:
    child = board.child_row(0)
    assert child.board.claiming
    assert not child.board.stopping

    board.stamp(123.25)
    board.set_claiming(False)
    board.set_stopping(True)
    board.park_changed()

    assert child.board.header() == scoreboard.Header(
        rows=3, supervisor_pid=os.getpid(), stamp=123.25, park_counter=1, claiming=False, stopping=True
    )


def test_no_park_change_is_lost_between_threads(board: Scoreboard) -> None:
    def change() -> None:
        for _ in range(2000):
            board.park_changed()

    with switching_often():
        run_together(change, change, change)

    assert board.park_counter == 6000


def test_another_process_reads_the_same_memory(board: Scoreboard) -> None:
    theirs = Scoreboard.attach(board.fd, 3)
    theirs.child_row(1).executing(FIRST)

    assert read(board, 1).execution == FIRST
    theirs.close()


def test_only_a_scoreboard_is_attached(board: Scoreboard) -> None:
    with pytest.raises(ValueError, match="no scoreboard of 4 rows"):
        Scoreboard.attach(board.fd, 4)

    fd = os.memfd_create("other")
    os.ftruncate(fd, os.fstat(board.fd).st_size)
    with pytest.raises(ValueError, match=f"no scoreboard of layout {scoreboard.LAYOUT}"):
        Scoreboard.attach(fd, 3)
    os.close(fd)


def test_a_name_that_does_not_fit_is_refused_and_nothing_is_written(board: Scoreboard) -> None:
    child = board.child_row(0)
    child.executing(FIRST)

    for too_long in (
        replace(FIRST, seq=2, task_id="x" * 65),
        replace(FIRST, seq=2, stream="ü" * 51),
        replace(FIRST, seq=2, entry_id="1" * 49),
    ):
        with pytest.raises(ValueError, match="has room for"):
            child.executing(too_long)
    with pytest.raises(ValueError, match="room for 100"):
        child.held([("x" * 101, "1-0")])
    with pytest.raises(ValueError, match="17 entries held, a row has room for 16"):
        child.held([("s", "1-0")] * 17)

    row = read(board, 0)
    assert (row.execution, row.held) == (FIRST, ())


def test_the_longest_names_fit(board: Scoreboard) -> None:
    longest = replace(FIRST, task_id="i" * 64, task_type="t" * 200, stream="s" * 100, entry_id="1" * 40)
    pairs = [(f"{number:03}" + "s" * 97, f"{number:02}" + "1" * 38) for number in range(16)]
    child = board.child_row(0)
    child.executing(longest)
    child.held(pairs)

    row = read(board, 0)
    assert row.execution == longest
    assert row.held == tuple(pairs)


def test_a_foreign_task_type_is_cut_between_characters(board: Scoreboard) -> None:
    board.child_row(0).executing(replace(FIRST, task_type="ü" * 150))
    execution = read(board, 0).execution
    assert execution is not None
    assert execution.task_type == "ü" * 100

    board.child_row(0).executing(replace(FIRST, task_type="x" + "ü" * 150))
    execution = read(board, 0).execution
    assert execution is not None
    assert execution.task_type == "x" + "ü" * 99


def test_a_row_is_read_whole_while_its_child_writes(board: Scoreboard) -> None:
    """Both executions differ in every field: a mixture of them would equal neither."""
    other = replace(
        FIRST, seq=2, task_id="018f-2", stream="dtq:stream:mail:p9", entry_id="2-7", claim_sent=7.0, attempt=2
    )
    seen: set[int] = set()
    stop = threading.Event()

    def write() -> None:
        child = board.child_row(0)
        while not stop.is_set():
            for execution in (FIRST, other):
                child.executing(execution)
                child.held([(execution.stream, execution.entry_id)] * execution.seq)
                child.settling(float(execution.seq))

    def look() -> None:
        try:
            for _ in range(4000):
                row = board.read_row(0)
                if row is None or row.execution is None:
                    continue
                assert row.execution == (FIRST if row.seq == 1 else other)
                assert len(set(row.held)) <= 1
                if row.phase is Phase.SETTLING:
                    assert row.settling_since == row.seq
                    assert row.held == ((row.execution.stream, row.execution.entry_id),) * row.seq
                seen.add(row.seq)
        finally:
            stop.set()

    with switching_often():
        run_together(write, look)

    assert seen == {1, 2}


def test_a_row_whose_child_died_while_writing_cannot_be_read_until_it_is_reset(board: Scoreboard) -> None:
    child = board.child_row(0)
    child.executing(FIRST)
    board._words[board._word(0) + layout.VERSION] += 1

    assert board.read_row(0) is None

    board.reset_row(0, 2, may_claim=True)
    assert read(board, 0).life == 2
    board.child_row(0).executing(FIRST)
    assert read(board, 0).execution == FIRST


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.PHASE, 99),
        (layout.HELD_COUNT, 2**60),
        # The length and first bytes of the task's id: no UTF-8.
        ((layout.EXECUTION_AT + 100) // 8, 0xFFFF_FFFF_FFFF_FFFF),
    ],
    ids=["phase", "held", "text"],
)
def test_a_row_ruined_by_a_task_is_no_row_and_no_error(board: Scoreboard, word: int, value: int) -> None:
    board.child_row(0).executing(FIRST)
    board._words[board._word(0) + word] = value

    assert board.read_row(0) is None


@contextmanager
def switching_often() -> Iterator[None]:
    """Lets threads change places after almost every bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(*work: Callable[[], None]) -> None:
    """Runs each in a thread of its own; an assertion that fails in one fails the test."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
