"""The main loop: gather what has happened, step the pool, do what it says, sleep until the next deadline.

It does local things only. It never waits for Redis, for a pipe or for a child: whatever may take time is a
duty's, the log's, or is looked at again in the next round.
"""

from __future__ import annotations

import logging
import math
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dtq_child.keys import consumer
from dtq_child.memory import resident_bytes
from dtq_child.row import Phase, Row
from dtq_supervisor import snapshot
from dtq_supervisor.crew import Crew, Dumped, watched
from dtq_supervisor.deadlines import (
    NO_GAP,
    confirmed,
    gap_between,
    leave_alarms,
    next_look,
    overdue,
    row_alarms,
)
from dtq_supervisor.death import OomEvidence, OomWatch
from dtq_supervisor.duties import Duties
from dtq_supervisor.ending import Ending
from dtq_supervisor.events import (
    Alarm,
    Begin,
    ChildReady,
    Concerning,
    DumpDone,
    Event,
    ExecutionOver,
    Exited,
    MemorySeen,
    QuietAsked,
    ResizeAsked,
    ResumeAsked,
    StayedIdle,
    Stop,
    StopMode,
)
from dtq_supervisor.hands import Hands
from dtq_supervisor.logs import say
from dtq_supervisor.notice import Notice, Told, told_of
from dtq_supervisor.notify import Notifier, Standing, standing
from dtq_supervisor.nursery import Nursery, how
from dtq_supervisor.pool import Pool, step
from dtq_supervisor.process import Child, Exit, Other, TemplateProcess
from dtq_supervisor.seat import Life, Seat, Shown
from dtq_supervisor.signals import MEANINGS, SignalNotes
from dtq_supervisor.slot import RUNNING, Slot, State

IDLE_S = 1.0
"""The longest sleep: children look at the stamp of each round."""
LOOK_S = 0.15
"""With children at work: they begin tasks without telling us, and short timeouts are to be seen in time."""
BOOT_S = 0.02
"""While a child boots: nothing but its row says when it is ready."""
DUMP_S = 0.005
"""While stacks are written."""
SLOW_S = 0.5
ANNOUNCE_S = 0.5
OOM_EVERY_S = 1.0
WEIGH_EVERY_S = 0.1
"""With a limit of memory: a look at a child takes some 20 µs, and what eats memory eats it fast."""
EXIT_LOST_REDIS = 69
FIRST_TO_START = ("endpoint", "preflight")
"""The others wait for Redis to be found fit."""

Crowd = tuple[tuple[int, int, bool], ...]

log = logging.getLogger("dtq.supervisor")


class Pacemaker(Protocol):
    """Whoever sends heartbeats."""

    def send_now(self) -> None: ...


@dataclass(slots=True)
class Clocks:
    """When the loop last ticked, by the monotonic clock and by the one that counts suspended time (R8)."""

    tick: float
    boot: float
    oom: float = 0.0
    weighed: float = 0.0

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))


class Supervisor:
    """One run from the first template to the exit code."""

    def __init__(
        self,
        *,
        seat: Seat,
        pool: Pool,
        crew: Crew,
        nursery: Nursery,
        duties: Duties,
        hands: Hands,
        pacemaker: Pacemaker,
        ending: Ending,
        signals: SignalNotes,
        notifier: Notifier,
        notice: Notice,
    ) -> None:
        self._seat, self._pool, self._crew, self._nursery = seat, pool, crew, nursery
        self._duties, self._hands, self._pacemaker = duties, hands, pacemaker
        self._ending, self._signals, self._notifier, self._notice = ending, signals, notifier, notice
        self._processes = nursery.processes
        self._oom = OomWatch()
        self._gap = NO_GAP
        self._clocks = Clocks.now()
        self._rows: list[tuple[Slot, Row]] = []
        self._announced: tuple[Crowd, Told] = ((), Told())
        self._announced_at = 0.0

    def run(self) -> int:
        """Returns the exit code, after everything is gone."""
        self._clocks = Clocks.now()
        self._seat.scoreboard.stamp(self._clocks.tick)
        self._duties.start(*FIRST_TO_START)
        self._step(Begin())
        while self._hands.exit_code is None:
            self._round()
        return self._ending.end(self._hands.exit_code, self._pool, contact=self._hands.contact)

    def _round(self) -> None:
        self._tick()
        for event in self._happenings():
            self._step(event)
        self._publish()
        self._notifier.tell(time.monotonic(), self._standing())
        busy = time.monotonic() - self._clocks.tick
        if busy > SLOW_S:
            say("warning", "slow_tick", {"seconds": busy})
        if self._hands.exit_code is None:
            self._sleep()

    def _step(self, event: Event) -> None:
        for action in step(self._pool, time.monotonic(), event):
            self._hands.do(action)

    # Gather.

    def _tick(self) -> None:
        now = Clocks.now()
        gap = gap_between(self._clocks.tick, now.tick, now.boot - self._clocks.boot)
        if gap is not None:
            self._gap = gap
            self._pacemaker.send_now()
            say("warning", "gap", {"seconds": now.boot - self._clocks.boot})
        now.oom, now.weighed = self._clocks.oom, self._clocks.weighed
        self._clocks = now
        self._seat.scoreboard.stamp(now.tick)

    def _happenings(self) -> Iterator[Event]:
        """Each event is stepped before the next one is looked for. What happened outside comes before what is
        due by the clock: after a gap, the news first."""
        yield from self._signalled()
        self._nursery.drain()
        yield from self._nursery.take()
        yield from self._ends()
        yield from self._readings()
        yield from self._weights()
        for dumped in self._crew.dumped():
            yield from self._dump(dumped)
        for event in self._seat.inbox.take():
            yield from self._confirm(event)
        for event in overdue(self._alarms(), time.monotonic()):
            yield from self._confirm(event)

    def _signalled(self) -> Iterator[Event]:
        for number, times in self._signals.take():
            name, meaning = signal.Signals(number).name, MEANINGS.get(signal.Signals(number))
            if isinstance(meaning, ResizeAsked):
                yield ResizeAsked(meaning.by * times, self._busy())
            elif isinstance(meaning, QuietAsked | ResumeAsked):
                yield meaning
            elif meaning is not None:
                say("info", "signal", {"name": name})
                yield meaning
            elif number != signal.SIGCHLD:
                say("warning", "signal_ignored", {"name": name})

    def _busy(self) -> frozenset[int]:
        """The slots that execute at this moment."""
        rows = {slot.number: self._crew.look(slot.number, slot.life) for slot in self._pool.living()}
        return frozenset(number for number, row in rows.items() if row is not None and row.execution)

    def _ends(self) -> Iterator[Event]:
        ends = self._processes.collect()
        yield from self._nursery.take()  # collecting may have read reports, and a birth comes before a death
        evidence = self._oom_evidence(ends)
        for end in ends:
            match end.who:
                case Child():
                    yield from self._child_ended(end, end.who, evidence)
                case TemplateProcess(generation):
                    self._nursery.collected(generation, end)
                    yield from self._nursery.take()
                case Other(name):
                    say("error", "embedded_gone", {"name": name, "reason": how(end)})
                    self._ending.other_ended(end)
                    yield Stop(StopMode.GRACEFUL, EXIT_LOST_REDIS)

    def _oom_evidence(self, ends: list[Exit]) -> OomEvidence | None:
        """Asked for regularly, too: so a kill for want of memory is not blamed for a later death."""
        strange = sum(end.signal == signal.SIGKILL and self._unordered(end) for end in ends)
        if not strange and self._clocks.tick - self._clocks.oom < OOM_EVERY_S:
            return None
        self._clocks.oom = self._clocks.tick
        return self._oom.evidence(strange)

    def _unordered(self, end: Exit) -> bool:
        """A child that we have not killed."""
        if not isinstance(end.who, Child):
            return False
        slot = self._pool.find(end.who.slot, end.who.life)
        return slot is not None and slot.verdict is None

    def _child_ended(self, end: Exit, who: Child, oom: OomEvidence | None) -> Iterator[Event]:
        remains = self._crew.bury(end, who, oom)
        self._hands.keep(who, remains)
        if remains.was_ready:
            yield ChildReady(who.slot, who.life)  # between two looks it got ready and died
        began = remains.row.seq if remains.row else 0
        busy, released = remains.was_busy, remains.has_released
        spent = remains.is_spent
        yield Exited(who.slot, who.life, end.pid, end.code, end.signal, began, busy, released, spent)

    def _readings(self) -> Iterator[Event]:
        """Reads every row once a round."""
        self._rows = []
        for slot in self._pool.living():
            row = self._crew.look(slot.number, slot.life) if slot.pid else None
            if row is None:
                continue
            self._rows.append((slot, row))
            if slot.state is State.STARTING and row.phase is not Phase.BOOTING:
                yield ChildReady(slot.number, slot.life, row.ready_bytes)

    def _weights(self) -> Iterator[Event]:
        """The children that are larger than a limit, each with what it executed before and after the look."""
        least = self._pool.policy.limits.least()
        if not least or self._clocks.tick - self._clocks.weighed < WEIGH_EVERY_S:
            return
        self._clocks.weighed = self._clocks.tick
        for slot, row in self._rows:
            if slot.state in RUNNING and slot.is_now(row.life) and (size := resident_bytes(slot.pid)) > least:
                yield MemorySeen(slot.number, slot.life, size, self._in_course(slot, row))

    def _in_course(self, slot: Slot, before: Row) -> int:
        """The execution that the row was in, if it still is; else 0."""
        after = self._crew.look(slot.number, slot.life)
        if after is None or not before.phase is after.phase is Phase.EXECUTING:
            return 0
        return before.seq if before.seq == after.seq else 0

    def _dump(self, dumped: Dumped) -> Iterator[Event]:
        slot, life = dumped.slot, dumped.life
        if dumped.shown is not None:
            facts = {
                "slot": slot,
                "life": life,
                "pid": self._processes.pid(slot, life),
                "stack": dumped.shown,
            }
            say("info", "stack" if dumped.shown else "no_stack", facts)
            shown = Shown(life, time.monotonic(), dumped.shown)
            self._seat.published.shown = {**self._seat.published.shown, slot: shown}
        if dumped.seq:
            yield from self._confirm(DumpDone(slot, life, dumped.seq))
        else:
            self._crew.drop_stack(slot, life)

    def _confirm(self, event: Event) -> Iterator[Event]:
        """An event about one execution counts only if its row, read again now, still says so."""
        if isinstance(event, StayedIdle):
            if self._crew.idles(event.slot, event.life, event.seq):
                yield event
            return
        if not isinstance(event, Concerning):
            yield event
            return
        slot, row = self._pool.find(event.slot, event.life), self._crew.look(event.slot, event.life)
        if slot is None or row is None:
            if isinstance(event, DumpDone):  # a row that is torn at this moment: ask for the stacks once more
                self._crew.ask_stack(event.slot, event.life, event.seq)
            return
        checked = confirmed(event, watched(slot, row))
        if isinstance(event, DumpDone) and isinstance(checked, ExecutionOver):
            self._crew.drop_stack(event.slot, event.life)
        yield checked

    def _alarms(self) -> list[Alarm]:
        ok_since = self._seat.redis_ok.ok_since()
        # A slot may have died, or been given away, since its row was read.
        seen = [
            watched(slot, row) for slot, row in self._rows if slot.state in RUNNING and slot.is_now(row.life)
        ]
        alarms = self._pool.alarms() + [a for row in seen for a in row_alarms(row, ok_since, self._gap)]
        if not self._pool.stopping:
            alarms += [alarm for row in seen for alarm in leave_alarms(row, self._gap)]
        return alarms

    # Tell the duties, and sleep.

    def _publish(self) -> None:
        pool, published, worker = self._pool, self._seat.published, self._seat.worker_id
        living = pool.living()
        self._crew.keep({Child(slot.number, slot.life) for slot in living})
        published.lives = tuple(
            Life(slot.row, slot.number, slot.life, consumer(worker, slot.number, slot.life))
            for slot in living
        )
        published.at_work = pool.at_work()
        published.replaced = dict(pool.replaced)
        published.procs = pool.procs()
        types = self._nursery.task_types(pool.template.generation)
        published.task_types = published.task_types if types is None else types
        told = told_of(pool)
        published.generation = told.generation
        published.reload = told.last.as_json() if told.last else ""
        self._notice.tell(told)
        claiming = self._seat.scoreboard.claiming
        published.snapshot = snapshot.take(pool, self._rows, self._clocks.tick, claiming=claiming)
        crowd = [(slot.life, slot.pid, slot.state in RUNNING) for slot in pool.everyone()]
        self._announce((((pool.procs(), 0, pool.quiet), *crowd), told))

    def _standing(self) -> Standing:
        return standing(self._pool, redis_away=self._seat.troubles.redis_away())

    def _announce(self, news: tuple[Crowd, Told]) -> None:
        """The record of ourselves names the children, so it is written anew when they change."""
        if news != self._announced and self._clocks.tick - self._announced_at >= ANNOUNCE_S:
            self._announced, self._announced_at = news, self._clocks.tick
            self._pacemaker.send_now()

    def _pause(self) -> float:
        """Seconds to sleep if nothing happens."""
        states = {slot.state for slot in self._pool.everyone()}
        longest = LOOK_S if states & RUNNING else IDLE_S
        if State.STARTING in states:
            longest = BOOT_S
        if self._crew.dumping:
            longest = DUMP_S
        # Never less: an alarm that cannot be confirmed yet must not make us spin.
        now = time.monotonic()
        return max(DUMP_S, min(longest, self._notifier.rest_s(now), next_look(self._alarms(), now)))

    def _sleep(self) -> None:
        poll = select.poll()
        inbox, signals = self._seat.inbox, self._signals
        for source in (signals, inbox, self._processes):
            poll.register(source.fileno(), select.POLLIN)
        for fileno in self._nursery.filenos():
            poll.register(fileno, select.POLLIN)
        poll.poll(math.ceil(self._pause() * 1000))
