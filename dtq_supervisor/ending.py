"""The end of a supervisor, after its last child (R36).

The lock was resigned when the stop began. Now helpers are killed, deaths are settled, the duties end, the
heartbeat with them, and the record of ourselves goes last. All of it has a budget: a Redis that is away must
not keep us.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dtq_child.errors import DtqError
from dtq_supervisor.duties import Duties
from dtq_supervisor.embedded import EmbeddedRedis
from dtq_supervisor.logs import say
from dtq_supervisor.nursery import Nursery
from dtq_supervisor.process import Exit, Other, TemplateProcess
from dtq_supervisor.roster import Pool

SETTLE_S = 1.0
BUDGET_S = 1.7
"""From the end of the grace, or from now, whichever comes first: everything is gone by grace + 2 s."""
LEAST_S = 0.5
STRANGERS_S = 0.3
PROCESSES_S = 0.3

log = logging.getLogger("dtq.supervisor")


class Settling(Protocol):
    def pending(self) -> int: ...

    def flush(self, deadline: float) -> bool: ...


class Parting(Protocol):
    def farewell(self) -> int: ...


class Ending:
    """`end` once, from the main thread."""

    def __init__(
        self,
        nursery: Nursery,
        duties: Duties,
        settler: Settling,
        heartbeat: Parting,
        embedded: EmbeddedRedis | None = None,
    ) -> None:
        self._nursery, self._duties, self._settler = nursery, duties, settler
        self._heartbeat, self._embedded = heartbeat, embedded
        self._processes = nursery.processes

    def end(self, exit_code: int, pool: Pool, *, contact: bool) -> int:
        """Returns the exit code. `contact`: Redis was reached once, so there is something to tell it."""
        deadline = _deadline(pool)
        self._kill_strangers()
        if contact:
            self._tell_redis(deadline)
        self._end_processes()
        say("info", "stopped", {"exit_code": exit_code})
        return exit_code

    def other_ended(self, end: Exit) -> None:
        """A program of ours has ended by itself."""
        if self._embedded is not None and end.pid == self._embedded.pid:
            self._embedded.collected(-(end.signal or 0) or end.code or 0)
            self._embedded.cleanup()
            self._embedded = None

    def _kill_strangers(self) -> None:
        """What tasks started in sessions of their own is ours by now; what those started becomes ours."""
        killed = 0
        until = time.monotonic() + STRANGERS_S
        while (some := self._processes.kill_strangers()) and time.monotonic() < until:
            killed += some
            self._collect()
            time.sleep(0.005)
        if killed:
            say("warning", "strangers_killed", {"count": killed})

    def _tell_redis(self, deadline: float) -> None:
        if not self._settler.flush(min(time.monotonic() + SETTLE_S, deadline - 0.4)):
            say("warning", "unsettled", {"count": self._settler.pending()})
        self._duties.stop()
        late = self._duties.join(deadline - 0.2)
        if late:
            say("warning", "unfinished", {"duties": ", ".join(late)})
        if "heartbeat" not in late:
            within(deadline - time.monotonic(), self._farewell)

    def _farewell(self) -> None:
        try:
            self._heartbeat.farewell()
        except DtqError as error:
            log.warning("the record of this worker stays until it expires: %s", error)

    def _end_processes(self) -> None:
        self._nursery.kill_all()
        if self._embedded is not None:
            self._embedded.terminate()
        until = time.monotonic() + PROCESSES_S
        while self._collect() and time.monotonic() < until:
            time.sleep(0.002)
        if self._embedded is not None:
            self._embedded.kill()
            self._embedded.cleanup()

    def _collect(self) -> bool:
        """True: some that we started have not ended yet."""
        for end in self._processes.collect():
            match end.who:
                case Other():
                    self.other_ended(end)
                case TemplateProcess(generation):
                    self._nursery.collected(generation, end)
        return self._embedded is not None or self._nursery.running()


def _deadline(pool: Pool) -> float:
    now = time.monotonic()
    grace_over = pool.stopping.over_at if pool.stopping else now
    return max(now + LEAST_S, min(now, grace_over) + BUDGET_S)


def within(seconds: float, call: Callable[[], None]) -> bool:
    """Makes a call that may hang in a thread of its own, and waits at most so long. True: it has ended."""
    thread = threading.Thread(target=call, name="dtq-farewell", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return not thread.is_alive()
