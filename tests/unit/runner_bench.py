"""A runner over real shared memory, with the supervisor's hand on the other half of the row."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dtq_child.app import App
from dtq_child.guards import quiet_strays
from dtq_child.runner import Runner
from dtq_child.scoreboard import Execution, Order, Phase, Row, Scoreboard
from dtq_child.settings import defaults
from dtq_child.signals import SOFT_SIGNAL
from dtq_child.task import Token
from dtq_child.turns import Delivery, Outcome
from tests.support.waiting import until

STREAM = "dtq:stream:default:p5"

DELIVERY = Delivery(
    token=Token("018f", STREAM, "1-0", 1, "host-1-ab:0.1"),
    queue="default",
    priority=5,
    task_type="handler",
    payload=b"{}",
    attempt=1,
    max_attempts=None,
    crashes=0,
    max_crashes=None,
    timeout_ms=None,
    soft_timeout_ms=None,
    retry=b"",
    metadata=b"",
    trace="",
    first_unknown_ms=None,
    redelivered=False,
    idempotency_key="",
    store_result=True,
    waited_ms=0,
)


@dataclass
class Bench:
    """`stopping` is what `current_task().stopping` answers."""

    app: App
    board: Scoreboard
    runner: Runner
    stopping: bool = False

    def handle(self, handler: Callable[..., Any], name: str = "handler", **options: Any) -> None:
        self.app.tasks.pop(name, None)
        self.app.task(name=name, **options)(handler)

    def run(self, handler: Callable[..., Any] | None = None, **changes: Any) -> Outcome:
        if handler is not None:
            self.handle(handler)
        return self.runner.run(replace(DELIVERY, **changes), claim_sent=1.5)

    def row(self) -> Row:
        row = self.board.read_row(0)
        assert row is not None
        return row

    def now(self) -> Execution:
        """What the supervisor sees in the row while a task executes."""
        row = self.row()
        assert row.phase is Phase.EXECUTING
        assert row.execution is not None
        return row.execution

    def order(self, kind: Order, seq: int | None = None) -> None:
        """As the supervisor does it: the order into the row, then the signal."""
        self.board.order(0, kind, self.now().seq if seq is None else seq)
        os.kill(os.getpid(), SOFT_SIGNAL)


@contextmanager
def runner_bench() -> Iterator[Bench]:
    """The process is as before afterwards."""
    threads = threading.active_count()
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    quiet_strays()
    board = Scoreboard.create(1)
    board.reset_row(0, 1, may_claim=True)
    app = App()

    def stopping() -> bool:
        return bench.stopping

    bench = Bench(app, board, Runner(app, defaults(), board.child_row(0), stopping))
    try:
        yield bench
    finally:
        bench.runner.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.close(board.fd)
        until(lambda: threading.active_count() <= threads, 5, "a thread of the event loop's pool stays")


def value_of(outcome: Outcome) -> Any:
    assert outcome.decision.kind == "succeed", outcome
    assert outcome.result is not None
    return json.loads(outcome.result.data)
