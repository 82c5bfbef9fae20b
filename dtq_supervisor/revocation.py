"""Tells the main loop that a delivery is not ours any more, but only while the row still executes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from dtq_supervisor.events import Level, Revoked
from dtq_supervisor.holdings import Holding, still_executing
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat


def revoke(seat: Seat, answers: Iterable[tuple[Holding, str]]) -> list[Revoked]:
    """`answers`: what Redis says of each holding. The main loop may be told twice; it steps once."""
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


def tell_revoked(event: Revoked) -> None:
    level: Level = "info" if event.why == "cancelled" else "warning"
    say(level, "revoked", {"slot": event.slot, "life": event.life, "why": event.why})
