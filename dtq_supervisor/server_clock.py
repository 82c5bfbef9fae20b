"""How Redis's clock runs beside our monotonic one, and whether it has jumped (R30). Pure.

A lease is idle time by the server's wall clock: while that clock jumps, idle times say nothing about anybody.
The offset between the two clocks is only known within the time that a call took."""

from __future__ import annotations

PATIENCE_MS = 1000
"""A call that the server executes later than this is too old to judge by."""


class ServerClock:
    """`tolerance_ms`: what still counts as one clock running on. Times of ours are monotonic seconds."""

    def __init__(self, tolerance_ms: int) -> None:
        self._tolerance = tolerance_ms
        self._low = self._high = 0.0
        self._known = False
        self.steady_since = 0.0
        """When the last jump was seen; 0.0 if there was none."""

    def observe(self, sent: float, received: float, server_ms: int) -> float:
        """A call's reply told the server's time. Returns the jump in ms, 0.0 if there was none."""
        low, high = server_ms - received * 1000, server_ms - sent * 1000
        jump = 0.0
        if self._known and low > self._high + self._tolerance:
            jump = low - self._high
        elif self._known and high < self._low - self._tolerance:
            jump = high - self._low
        self._low, self._high, self._known = low, high, True
        if jump:
            self.steady_since = received
        return jump

    def window(self, now: float) -> tuple[int, int] | None:
        """The server times, ms, within which a call sent now is executed if nothing odd happens; None before
        the first observation."""
        if not self._known:
            return None
        low = self._low + now * 1000 - self._tolerance
        high = self._high + now * 1000 + self._tolerance + PATIENCE_MS
        return round(low), round(high)
