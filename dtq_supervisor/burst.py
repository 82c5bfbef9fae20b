"""`--burst`: stops the supervisor when its queues hold nothing that is undelivered or pending."""

from __future__ import annotations

from dtq_supervisor.duty import Duty
from dtq_supervisor.events import Stop, StopMode

EVERY_S = 0.2


class Burst(Duty):
    """An entry is in its band until its task is settled, so bands of length 0 say that nothing is left."""

    name = "burst"

    def beat(self) -> float:
        if not any(self.line.call("XLEN", stream) for stream in self.line.streams()):
            self.seat.inbox.put(Stop(StopMode.GRACEFUL))
        return EVERY_S
