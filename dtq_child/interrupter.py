"""Delivers an order of the supervisor into the handler that it is meant for, and nowhere else (R26).

A soft signal says "look at your row". Its Python handler runs between any two bytecodes of the main thread,
also of our own code, so raising is tied to a state and not to a moment:

- `_deliver` is set only while user code of one execution runs; the order must name that execution's number.
- The value of the handler is caught by C code, list.extend over starmap, between whose steps no signal
  handler runs. So "has returned" is one fact, `returned`, without a gap between the return and an
  assignment, in which the exception would take the place of a value already computed.
- What arrives before user code starts is found by the look when it starts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import starmap
from types import FrameType
from typing import Any

from dtq_child.errors import Interruption, ShutdownRequested, SoftTimeout, TaskCancelled
from dtq_child.scoreboard import ChildRow, Order
from dtq_child.signals import SOFT_SIGNAL

_ORDERS: dict[int, tuple[type[Interruption], str]] = {
    Order.SOFT_TIMEOUT: (
        SoftTimeout,
        "the soft timeout passed: clean up and end, the hard timeout kills the process",
    ),
    Order.CANCELLED: (TaskCancelled, "the task was cancelled: clean up and end, or the process is killed"),
    Order.SHUTDOWN: (
        ShutdownRequested,
        "the supervisor is stopping: clean up and end, or the process is killed",
    ),
}
_ONCE: tuple[tuple[()]] = ((),)

Deliver = Callable[[Interruption], None]


def raise_here(interruption: Interruption) -> None:
    raise interruption


class Interrupter:
    """One execution after another under the eye of the soft signal.

    After `run`: `returned` holds the handler's value, or is empty; then `error` holds what it raised."""

    __slots__ = ("_deliver", "_row", "_seq", "delivered", "error", "returned")

    def __init__(self, row: ChildRow) -> None:
        self._row = row
        self._deliver: Deliver | None = None
        self._seq = 0
        self.delivered: tuple[Interruption, ...] = ()
        self.returned: list[Any] = []
        self.error: BaseException | None = None

    def install(self) -> None:
        signal.signal(SOFT_SIGNAL, self._on_signal)

    def expect(self, seq: int) -> None:
        """A new execution begins: orders count only if they name `seq`."""
        self._seq, self.delivered = seq, ()

    def run(
        self,
        handler: Callable[[], Any],
        prepare: Callable[[], None] | None = None,
        deliver: Deliver = raise_here,
    ) -> None:
        """Calls `prepare`, then `handler`. Interruptions are raised in `prepare`, and given to `deliver`
        during `handler`."""
        self.returned, self.error = [], None
        try:
            self._deliver = raise_here
            self._look()
            if prepare is not None:
                prepare()
            self._deliver = deliver
            self.returned.extend(starmap(handler, _ONCE))
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like are failures of the task
            # Plain stores, no calls: signal handlers that the task left behind run at calls and could raise
            # there.
            self.error = error
            self._deliver = None
        self._deliver = None

    def disarm(self) -> None:
        """From now on nothing is delivered, until the next `run`."""
        self._deliver = None

    def interrupted_by(self, kind: type[Interruption]) -> bool:
        """Whether such an order reached this execution; anybody may raise the class."""
        return any(type(one) is kind for one in self.delivered)

    def forget(self) -> None:
        """Lets go of what the handler made."""
        self.returned, self.error = [], None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._look()

    def _look(self) -> None:
        """Delivers the order in the row if it is meant for the code that is running now; each kind once."""
        deliver = self._deliver
        if deliver is None or self.returned:
            return
        number, seq = self._row.order()
        order = _ORDERS.get(number)
        if order is None or seq != self._seq:
            return
        kind, text = order
        if self.interrupted_by(kind):
            return
        interruption = kind(text)
        self.delivered += (interruption,)
        deliver(interruption)
