"""What the endpoint answers, path by path. Any thread may ask; nothing that the main loop uses is written."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import orjson

from dtq_child.broker import Actor, Broker
from dtq_child.errors import DtqError
from dtq_child.row import Phase
from dtq_child.setting import mask_url
from dtq_child.version import VERSION
from dtq_supervisor import health
from dtq_supervisor.events import StackAsked
from dtq_supervisor.idleness import Idler
from dtq_supervisor.metrics import CONTENT_TYPE, Metrics
from dtq_supervisor.seat import Seat
from dtq_supervisor.snapshot import SlotView
from dtq_supervisor.status import About, status
from dtq_supervisor.term import Term
from dtq_supervisor.visitor import Visitor, host_is_ours, why_not_act

TEXT = "text/plain; charset=utf-8"
STACK_S = 2.0
"""The main loop asks the child, and waits 0.2 s for its stacks at most."""
LOOK_S = 0.01
LOOKING = ("GET", "HEAD")
NO_PAGE = "there are /healthz, /readyz, /status, /metrics, and to POST /slots/N/stack and /slots/N/cancel"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    visitor: Visitor


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    body: bytes
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, code: int, text: str, **headers: str) -> Answer:
        return cls(code, f"{text}\n".encode(), headers={n.replace("_", "-"): v for n, v in headers.items()})


class Looks(Protocol):
    """What the look for idle children has found last."""

    found: tuple[Idler, ...]
    paused: tuple[str, ...] | None


class Answers:
    """`bound_to`: the host that is listened on, "" for a unix socket."""

    def __init__(
        self, seat: Seat, looks: Looks, term: Term, bound_to: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seat, self._looks, self._term, self._bound_to, self._clock = seat, looks, term, bound_to, clock
        self._metrics = Metrics()
        self._broker = Broker(seat.settings)
        self._pages: Mapping[str, Callable[[Visitor], Answer]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
            "/metrics": self._metrics_page,
        }
        self._verbs: Mapping[str, Callable[[SlotView, Request], Answer]] = {
            "stack": self._stack,
            "cancel": self._cancel,
        }

    def to(self, request: Request) -> Answer:
        if not host_is_ours(request.visitor.headers.get("host"), self._bound_to):
            return Answer.of(403, "this Host is none of this endpoint's names")
        page = self._pages.get(request.path)
        if page is not None:
            return page(request.visitor) if request.method in LOOKING else _not_allowed("GET, HEAD")
        verb = re.fullmatch(r"/slots/(\d{1,6})/(stack|cancel)", request.path)
        if verb is None:
            return Answer.of(404, NO_PAGE)
        if request.method != "POST":
            return _not_allowed("POST")
        return self._act(int(verb[1]), verb[2], request)

    # Looking.

    def _facts(self) -> health.Facts:
        seat = self._seat
        return health.Facts(
            now=self._clock(),
            tick=seat.scoreboard.stamp_value,
            snapshot=seat.published.snapshot,
            redis_ok_since=seat.redis_ok.ok_since(),
            redis_heard_at=seat.redis_ok.heard_at(),
            redis_away=seat.troubles.redis_away(),
            idlers=self._looks.found,
        )

    def _healthz(self, visitor: Visitor) -> Answer:
        return _verdict(health.live(self._facts()))

    def _readyz(self, visitor: Visitor) -> Answer:
        return _verdict(health.ready(self._facts()))

    def _status(self, visitor: Visitor) -> Answer:
        facts = self._facts()
        told = status(facts, self._about(facts.now), with_ids=visitor.near)
        return _json(200, told)

    def _metrics_page(self, visitor: Visitor) -> Answer:
        return Answer(200, self._metrics.text(), CONTENT_TYPE)

    def _about(self, now: float) -> About:
        seat = self._seat
        return About(
            worker_id=seat.worker_id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            app=seat.settings.app or "",
            queues=tuple(seat.queues),
            redis_url=mask_url(seat.settings.redis_url),
            started_at=seat.started_at,
            leader=self._term.trusted(now),
            paused=self._looks.paused,
            redis_errors=seat.redis_ok.errors,
            counted=seat.counted(),
            replaced=seat.published.replaced,
        )

    # Acting.

    def _act(self, number: int, verb: str, request: Request) -> Answer:
        reason = why_not_act(request.visitor, self._seat.settings.metrics_token)
        if reason:
            return Answer.of(403, reason)
        slot = next((s for s in self._seat.published.snapshot.slots if s.number == number), None)
        if slot is None:
            return Answer.of(404, f"there is no slot {number}")
        return self._verbs[verb](slot, request)

    def _stack(self, slot: SlotView, request: Request) -> Answer:
        """The main loop asks for it, and puts it into the log, too."""
        if not slot.pid:
            return Answer.of(409, f"slot {slot.number} has no child")
        asked = self._clock()
        self._seat.inbox.put(StackAsked(slot.number, slot.life))
        while self._clock() - asked < STACK_S:
            shown = self._seat.published.shown.get(slot.number)
            if shown is not None and shown.life == slot.life and shown.at >= asked:
                if shown.text:
                    return Answer(200, shown.text.encode())
                return Answer.of(503, f"child {slot.number} (pid {slot.pid}) did not show its stacks")
            time.sleep(LOOK_S)
        return Answer.of(503, "the main loop did not come to it")

    def _cancel(self, slot: SlotView, request: Request) -> Answer:
        execution = slot.row.execution if slot.row and slot.row.phase is Phase.EXECUTING else None
        if execution is None:
            return Answer.of(409, f"slot {slot.number} executes nothing")
        meant = request.query.get("task_id", execution.task_id)
        if meant != execution.task_id:
            return Answer.of(409, f"slot {slot.number} executes another task, {execution.task_id}")
        visitor = request.visitor
        actor = Actor(
            visitor.actor(), visitor.via(socket.gethostname()), visitor.request_id(), f"slot {slot.number}"
        )
        try:
            word = self._broker.cancel(execution.task_id, actor)
        except DtqError as error:
            return Answer.of(503, str(error))
        told = {"task_id": execution.task_id, "task_type": execution.task_type, "answer": word}
        return _json(200 if word in ("stopping", "cancelled") else 409, told)


def _verdict(verdict: health.Health) -> Answer:
    return Answer(200 if verdict.well else 503, verdict.text().encode())


def _json(code: int, told: object) -> Answer:
    return Answer(code, orjson.dumps(told) + b"\n", "application/json")


def _not_allowed(allow: str) -> Answer:
    return Answer.of(405, f"allowed are {allow}", Allow=allow)
