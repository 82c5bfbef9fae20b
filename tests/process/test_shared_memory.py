"""Two processes, one scoreboard: what is read was written so, while the other one writes without pause."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

from dtq_child.retry import RetryPolicy
from dtq_child.scoreboard import Execution, Scoreboard
from tests.process.stand import ROOT

ONE = Execution(
    seq=1,
    task_id="1" * 64,
    task_type="1" * 200,
    stream="1" * 100,
    entry_id="1" * 40,
    delivery=1,
    attempt=1,
    max_attempts=1,
    crashes=1,
    max_crashes=1,
    timeout_ms=1,
    started=1.0,
    soft_deadline=1.0,
    hard_deadline=1.0,
    policy=RetryPolicy(1.0, 1.0, 1.0, 1.0),
    claim_sent=1.0,
)
TWO = replace(
    ONE,
    seq=2,
    task_id="2" * 64,
    task_type="2" * 200,
    stream="2" * 100,
    entry_id="2" * 40,
    delivery=2,
    attempt=2,
    max_attempts=2,
    crashes=2,
    max_crashes=2,
    timeout_ms=2,
    started=2.0,
    soft_deadline=2.0,
    hard_deadline=2.0,
    policy=RetryPolicy(2.0, 2.0, 2.0, 2.0),
    claim_sent=2.0,
)
WRITER = """
import sys
from dtq_child.scoreboard import Scoreboard
from tests.process.test_shared_memory import ONE, TWO
row = Scoreboard.attach(int(sys.argv[1]), 1).child_row(0)
while True:
    for execution in (ONE, TWO):
        row.executing(execution)
        row.held([(execution.stream, execution.entry_id)] * (17 - execution.seq))
"""


def test_a_row_is_read_whole_while_another_process_writes_it() -> None:
    board = Scoreboard.create(1)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(board.fd)], pass_fds=[board.fd], cwd=ROOT)
    try:
        seen, unread = {1: 0, 2: 0}, 0
        end = time.monotonic() + 60
        while (time.monotonic() < end and not all(seen.values())) or sum(seen.values()) < 8000:
            row = board.read_row(0)
            if row is None:
                unread += 1
            elif row.execution is not None:
                assert row.execution == (ONE if row.seq == 1 else TWO)
                # Sixteen entries of the one, or fifteen of the other: how many is written first, then which.
                assert row.held in ((), *(((e.stream, e.entry_id),) * (17 - e.seq) for e in (ONE, TWO)))
                seen[row.seq] += 1
        assert min(seen.values()) > 0
        assert unread < sum(seen.values())
    finally:
        writer.kill()
        writer.wait()
        board.close()
        os.close(board.fd)
