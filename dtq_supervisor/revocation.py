"""Tells the main loop that a delivery is not ours any more, but only while the row still executes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from dtq_supervisor.events import Revoked
from dtq_supervisor.holdings import Holding, still_executing
from dtq_supervisor.seat import Seat


def revoke(seat: Seat, answers: Iterable[tuple[Holding, str]]) -> list[Revoked]:
    """`answers`: what Redis says of each holding. Told as long as it is so: the main loop steps once."""
    told = []
    for holding, word in answers:
        if word not in ("superseded", "cancelled") or not holding.executing:
            continue
        if still_executing(seat, holding):
            why: Literal["cancelled", "superseded"] = "cancelled" if word == "cancelled" else "superseded"
            told.append(Revoked(holding.slot, holding.life, holding.seq, why))
    for event in told:
        seat.inbox.put(event)
    return told
