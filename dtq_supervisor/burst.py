"""`--burst`: stops the supervisor when its queues hold nothing that is undelivered or pending."""

from __future__ import annotations

from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.events import Stop, StopMode
from dtq_supervisor.logs import say

EVERY_S = 0.2


class Burst(RedisDuty):
    """An entry is in its band until its task is settled, so bands of length 0 say that nothing is left."""

    name = "burst"

    def beat(self) -> float:
        if not any(self.line.call("XLEN", stream) for stream in self.line.streams()):
            say("info", "burst_over", {"queues": ", ".join(self.line.queues)})
            self.done = True  # once: a second request would mean "at once"
            self.seat.inbox.put(Stop(StopMode.GRACEFUL))
        return EVERY_S
