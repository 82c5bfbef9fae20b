"""What the supervisor lets its child do: read from the scoreboard and from who the parent is (R7, R24)."""

from __future__ import annotations

import os
import time

from dtq_child.scoreboard import ChildRow

STAMP_AGE_S = 5.0
"""A main loop that has not ticked for so long is stopped or hung: nobody would enforce a timeout."""


class Leash:
    """`parent`: the pid of the supervisor, as the child was told before it could have changed."""

    __slots__ = ("_board", "_parent", "_row")

    def __init__(self, row: ChildRow, parent: int) -> None:
        self._row, self._board, self._parent = row, row.board, parent

    def orphaned(self) -> bool:
        return os.getppid() != self._parent

    def told_to_end(self) -> bool:
        """At the next task boundary; an orphan does so unasked."""
        return self._row.stop or self._board.stopping or self.orphaned()

    def may_claim(self) -> bool:
        board = self._board
        return self._row.may_claim and board.claiming and time.monotonic() - board.stamp_value < STAMP_AGE_S

    def may_begin(self) -> bool:
        """Whether what a claim brought may be executed: the leave may have gone while Redis answered."""
        return self.may_claim() and not self.told_to_end()
