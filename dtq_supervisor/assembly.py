"""Puts a supervisor together from its settings. Nothing runs before `Supervisor.run`."""

from __future__ import annotations

import os
import time
from typing import Any

from dtq_child.connection import REPLY_TIMEOUT_S, Link, open_link
from dtq_child.keys import Keys
from dtq_child.scoreboard import Scoreboard
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import Settings
from dtq_supervisor.answers import Answers
from dtq_supervisor.burst import Burst
from dtq_supervisor.cancels import CancelWatch
from dtq_supervisor.configuration import Configuration, Read, policy_of
from dtq_supervisor.crew import Crew
from dtq_supervisor.duties import Duties, Duty
from dtq_supervisor.embedded import EmbeddedRedis
from dtq_supervisor.ending import Ending
from dtq_supervisor.endpoint import Endpoint
from dtq_supervisor.hands import Hands
from dtq_supervisor.heartbeat import Heartbeat
from dtq_supervisor.idlers import Idlers
from dtq_supervisor.inbox import Inbox
from dtq_supervisor.leader import Leader
from dtq_supervisor.listener import Listener
from dtq_supervisor.notice import Notice
from dtq_supervisor.notify import Notifier
from dtq_supervisor.nursery import Nursery
from dtq_supervisor.pool import Pool
from dtq_supervisor.preflight import Preflight
from dtq_supervisor.reaper import Reaper
from dtq_supervisor.reconcile import Reconciler
from dtq_supervisor.scheduler import Scheduler
from dtq_supervisor.seat import RedisPulse, Seat
from dtq_supervisor.settler import Settler
from dtq_supervisor.signals import SignalNotes
from dtq_supervisor.supervisor import Supervisor
from dtq_supervisor.templates import TemplateHandle, start_template
from dtq_supervisor.term import Term


def assemble(
    settings: Settings,
    *,
    procs: int,
    most: int,
    worker_id: str,
    signals: SignalNotes,
    notifier: Notifier,
    read: Read,
    embedded: EmbeddedRedis | None = None,
    listener: Listener | None = None,
    descriptor_limit: int | None = None,
) -> Supervisor:
    """`most`: how many children there may ever be. `signals` are installed already; `embedded` runs already,
    and the settings' URL is its. `listener`: for the endpoint, if there is to be one. `read` reads the
    settings anew for a reload. `descriptor_limit`: what children get, if it is not ours."""
    configuration = Configuration(settings, read)
    pool = Pool.of(procs, policy_of(settings), rows_for(most), most)
    board = Scoreboard.create(rows_for(most))
    board.set_claiming(False)  # before Redis has been found fit
    seat = take_seat(settings, procs, worker_id, board)

    def begin(generation: int, candidate: bool) -> TemplateHandle:
        terms = configuration.candidate if candidate else configuration.settings
        return begin_template(seat, crew, generation, terms, descriptor_limit)

    nursery = Nursery(begin, settings.app or "")
    crew = Crew(board, nursery.processes)
    if embedded is not None:
        nursery.processes.add_other("redis", embedded.pid)
    settler, heartbeat = Settler(seat), Heartbeat(seat)
    duties = Duties(duties_of(seat, heartbeat, settler, listener), seat.healthy)
    return Supervisor(
        seat=seat,
        pool=pool,
        crew=crew,
        nursery=nursery,
        duties=duties,
        hands=Hands(seat, crew, nursery, duties, settler, configuration),
        pacemaker=heartbeat,
        ending=Ending(nursery, duties, settler, heartbeat, embedded),
        signals=signals,
        notifier=notifier,
        notice=Notice(),
    )


def take_seat(settings: Settings, procs: int, worker_id: str, board: Scoreboard) -> Seat:
    def make_link(name: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Link:
        return open_link(settings.redis_url, reply_timeout_s)

    keys = Keys(settings.key_prefix)
    return Seat(
        settings=settings,
        procs=procs,
        worker_id=worker_id,
        keys=keys,
        scripts=Scripts(keys, Constants.of(settings)),
        scoreboard=board,
        inbox=Inbox(),
        redis_ok=RedisPulse(),
        make_link=make_link,
        started_at=time.monotonic(),
    )


def duties_of(
    seat: Seat, heartbeat: Heartbeat, settler: Settler, listener: Listener | None = None
) -> list[Duty]:
    """In the order in which they start: leases first."""
    term, idlers = Term(), Idlers(seat)
    duties: list[Duty] = [
        Preflight(seat),
        heartbeat,
        settler,
        CancelWatch(seat),
        Reaper(seat, settler.unsettled),
        Leader(seat, term),
        Scheduler(seat, term),
        Reconciler(seat, term),
        idlers,
    ]
    if listener is not None:
        duties.append(Endpoint(listener, Answers(seat, idlers, term, listener.host).to))
    return [*duties, Burst(seat)] if seat.settings.burst else duties


def rows_for(procs: int) -> int:
    """A reload boots successors beside the children they are to replace: at most a quarter, at least one."""
    return procs + max(1, procs // 4)


def begin_template(
    seat: Seat, crew: Crew, generation: int, settings: Settings, descriptor_limit: int | None
) -> TemplateHandle:
    """Raises OSError."""
    board = seat.scoreboard
    hello: dict[str, Any] = {
        "supervisor_pid": os.getpid(),
        "worker_id": seat.worker_id,
        "generation": generation,
        "app": settings.app,
        "preload": settings.preload,
        "settings": settings.to_json(),
        "scoreboard": {"fd": board.fd, "rows": board.rows},
        "dump_fds": crew.dumps.fds,
        "descriptor_limit": descriptor_limit,
    }
    return start_template(generation, hello)
