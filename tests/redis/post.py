"""A supervisor's seat without its processes: the test writes the rows, real duties work in real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from dtq_child.connection import REPLY_TIMEOUT_S, Link, open_link
from dtq_child.keys import Keys, consumer
from dtq_child.retry import DEFAULT_RETRY
from dtq_child.row import Execution
from dtq_child.scoreboard import ChildRow, Scoreboard
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import defaults
from dtq_child.task import Token
from dtq_supervisor.inbox import Inbox
from dtq_supervisor.seat import Life, RedisPulse, Seat
from tests.redis.scene import US


class Runs(Protocol):
    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None: ...


class Post:
    """Ends its threads and closes everything at exit."""

    def __init__(self, url: str, worker: str = US, procs: int = 2, **settings: Any) -> None:
        configured = defaults(redis_url=url, **settings)
        keys = Keys(configured.key_prefix)
        self.board = Scoreboard.create(procs)
        self.well = True
        self._stops: dict[int, tuple[threading.Event, threading.Thread]] = {}
        self.seat = Seat(
            settings=configured,
            procs=procs,
            worker_id=worker,
            keys=keys,
            scripts=Scripts(keys, Constants.of(configured)),
            scoreboard=self.board,
            inbox=Inbox(),
            redis_ok=RedisPulse(),
            make_link=self._link,
            started_at=time.monotonic(),
        )
        self._url = url

    def _link(self, name: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Link:
        return open_link(self._url, reply_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stop, _ in self._stops.values():
            stop.set()
        for _, thread in self._stops.values():
            thread.join(20)
            assert not thread.is_alive(), thread.name
        self.seat.inbox.close()

    def child(self, slot: int = 0, life: int = 1) -> ChildRow:
        """A living child, ready; its row is the test's to write."""
        self.board.reset_row(slot, life, may_claim=True)
        name = consumer(self.seat.worker_id, slot, life)
        others = tuple(each for each in self.seat.lives() if each.slot != slot)
        self.seat.published.lives = (*others, Life(slot, slot, life, name))
        self.seat.published.at_work = len(self.seat.published.lives)
        row = self.board.child_row(slot)
        row.born(4711)
        row.ready(time.monotonic())
        return row

    def begin(self, row: ChildRow, token: Token, seq: int = 1) -> None:
        """The child's row says that it executes this delivery."""
        now = time.monotonic()
        row.executing(
            Execution(
                seq=seq,
                task_id=token.task_id,
                task_type="probe",
                stream=token.stream,
                entry_id=token.entry_id,
                delivery=token.delivery,
                attempt=1,
                max_attempts=3,
                crashes=0,
                max_crashes=3,
                timeout_ms=60_000,
                started=now,
                soft_deadline=0.0,
                hard_deadline=now + 60,
                policy=DEFAULT_RETRY,
                claim_sent=now,
            )
        )

    def start(self, duty: Runs) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=duty.run, args=(stop, lambda: self.well), daemon=True)
        self._stops[id(duty)] = (stop, thread)
        thread.start()

    def stop(self, duty: Runs) -> None:
        """Tells it to end and waits."""
        stop, thread = self._stops.pop(id(duty))
        stop.set()
        thread.join(20)
        assert not thread.is_alive()
