"""The threads that talk to Redis: started together, stopped one by one, never silently gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dtq_child.connection import Pause
from dtq_supervisor.logs import say

STALE_S = 10.0
"""Duties pause while the main loop's stamp is older: then nobody would act on what they find (R4)."""
RESTART_FIRST_S = 0.5
RESTART_MOST_S = 30.0

log = logging.getLogger("dtq.supervisor")


class Duty(Protocol):
    """What one thread does for a living. `run` loops until `stop`, and pauses while `healthy()` is false; a
    return without that means that its work is done."""

    @property
    def name(self) -> str: ...

    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None: ...


class Watch:
    """One duty, its thread, and its order to stop."""

    def __init__(self, duty: Duty, healthy: Callable[[], bool]) -> None:
        self.duty = duty
        self.stop = threading.Event()
        self._healthy = healthy
        self._pause = Pause(RESTART_FIRST_S, RESTART_MOST_S)
        # A daemon: whatever hangs in a call to a dead server must not keep the process from its end.
        self.thread = threading.Thread(target=self._keep, name=f"dtq-{duty.name}", daemon=True)

    def _keep(self) -> None:
        while not self._lived():
            delay = self._pause.next()
            say("error", "duty_died", {"duty": self.duty.name, "delay_s": delay})
            if self.stop.wait(delay):
                return

    def _lived(self) -> bool:
        """False: it died of an error."""
        try:
            self.duty.run(self.stop, self._healthy)
        except BaseException:
            log.exception("%s failed", self.duty.name)
            return False
        return True


class Duties:
    """All of them, by name, in the order in which they are started."""

    def __init__(self, duties: Sequence[Duty], healthy: Callable[[], bool]) -> None:
        self._watches = {duty.name: Watch(duty, healthy) for duty in duties}

    def start(self, *names: str) -> None:
        """Of these (without names: of all) those that exist and were neither started nor stopped before."""
        for name in names or self._watches:
            watch = self._watches.get(name)
            if watch is not None and not watch.thread.ident and not watch.stop.is_set():
                watch.thread.start()

    def stop(self, *names: str) -> None:
        """Tells these to end (without names: all), and does not wait."""
        for name in names or self._watches:
            if name in self._watches:
                self._watches[name].stop.set()

    def join(self, deadline: float, names: Iterable[str] = ()) -> list[str]:
        """Waits for these (without names: all) until `deadline`, monotonic seconds. Returns the unended."""
        wanted = [self._watches[name] for name in names or self._watches if name in self._watches]
        for watch in wanted:
            if watch.thread.ident:
                watch.thread.join(max(0.0, deadline - time.monotonic()))
        return [watch.duty.name for watch in wanted if watch.thread.is_alive()]
