"""The loop of a task process: settle and claim in one round trip, execute; wait at a bell when idle.

busy            turn(outcome in hand, claim) → execute → turn …
idle            wait at the bells → turn(claim)
after an error  settle what is in hand, nothing else, until that is answered (R10);
                then a turn that also looks for what is pending under our own name
may not claim   settle, hand back what is held, look at the flags
end             settle, hand back, exit
"""

from __future__ import annotations

import codecs
import logging
import os
import time
from math import inf

import setproctitle

from dtq_child import forked, hooks, logs, tally
from dtq_child.connection import Pause, open_link
from dtq_child.errors import BrokerError
from dtq_child.guards import quiet_strays
from dtq_child.keys import Keys, consumer
from dtq_child.leash import Leash
from dtq_child.memory import resident_bytes
from dtq_child.oddities import Oddities
from dtq_child.protocol import ChildContext
from dtq_child.runner import Runner
from dtq_child.settings import Settings
from dtq_child.task import Token
from dtq_child.turns import Delivery, Outcome, Pair, Reply, Turns, Want

_LOOK_S = 0.05
_WAIT_SLICE_S = 0.5
_PAUSED_WAIT_S = 0.5
_QUIET_S = 5.0
"""After a word about Redis: one that comes and goes must not fill the log."""
_EVERYWHERE_S = 1.0
_MANY_QUEUES = 10

# What a busy child wants, thousands of times a second.
_NEXT = Want()

log = logging.getLogger("dtq.child")


def rehearse(settings: Settings) -> None:
    """What every child would do alike before its first task, done once in the process that they are forked
    of: scripts are put together, the URL is parsed, late imports are made. It is more than half of a birth.
    Nothing connects. Raises BadConfiguration."""
    for late in ("ascii", "idna"):  # of /proc, of host names
        codecs.lookup(late)
    Turns(open_link(settings.redis_url), Keys(settings.key_prefix), settings, "", "", settings.queues)


def main(context: ChildContext) -> int:
    """The life of a child after its birth. Returns its exit code, 0: it was told to stop, or is an orphan."""
    settings, app = context.settings, context.app
    logs.set_up(settings, worker=context.worker_id, slot=context.slot, pid=os.getpid())
    quiet_strays()
    app.configure(settings)
    pid = os.getpid()
    hooks.run(app.hooks.child_start)
    if os.getpid() != pid:
        forked.end_copy("a hook at the start of a child", None)
    child = Child(context)
    child.work()
    hooks.run(app.hooks.child_stop)
    child.close()
    return 0


class Child:
    """One child: what it has in hand, and what it knows about the places where work may be."""

    def __init__(self, context: ChildContext) -> None:
        settings = context.settings
        self._board, self._row = context.scoreboard, context.scoreboard.child_row(context.row)
        self._leash = Leash(self._row, context.supervisor_pid)
        self._name = f"dtq-child[{context.slot}] g{context.generation}"
        self._idle_title, self._title = f"{self._name}: idle", ""
        self._queues = settings.queues
        self._block_s = settings.block_ms / 1000
        self._lease_s = settings.visibility_timeout_s
        self._link = open_link(settings.redis_url)
        me = consumer(context.worker_id, context.slot, context.life)
        keys = Keys(settings.key_prefix)
        self._turns = Turns(self._link, keys, settings, context.worker_id, me, settings.queues)
        self._runner = Runner(context.app, settings, self._row, self._leash.told_to_end, context.dump_fd)
        # In hand.
        self._outcome: Outcome | None = None
        self._held: tuple[Pair, ...] = ()
        self._unwanted: tuple[Token, ...] = ()
        # About Redis. Unsure: an error came since the last answer, so a claim may have come through unheard.
        self._unsure = False
        self._reached = False
        self._pause = Pause()
        self._told = False
        self._quiet_until = 0.0
        # About the places.
        self._park_seen = -1
        self._look_at_park = self._woken = False
        self._paused: frozenset[str] = frozenset()
        self._many = len(settings.queues) > _MANY_QUEUES
        self._looked_everywhere = 0.0
        self._problems: set[str] = set()
        self._oddities = Oddities()

    def work(self) -> None:
        """Until told to end, or for as many executions as it is given; then nothing is left in hand."""
        self._row.sized(resident_bytes())
        self._idle()
        while not self._leash.told_to_end() and not self._row.spent:
            if self._unsure and self._outcome is not None:
                self._settle()
            elif not self._leash.may_claim():
                self._stand_by()
            else:
                self._work_once()
        self._leave()
        self._row.exiting(time.monotonic())

    def close(self) -> None:
        self._oddities.tell(inf)
        self._runner.close()
        self._link.close()

    # Busy.

    def _work_once(self) -> None:
        sent = time.monotonic()
        reply = self._turn(sent)
        if reply is None:
            return
        delivery = reply.claimed
        if delivery is None:
            if not reply.more:
                self._wait()
        elif self._leash.may_begin() and time.monotonic() - sent < self._lease_s / 2:
            self._execute(delivery, sent)
        else:
            # Too late: nobody would enforce its timeout, or its lease may be lost.
            self._unwanted += (delivery.token,)
            self._hand_back()

    def _turn(self, sent: float) -> Reply | None:
        """Settles what is in hand and claims. None: Redis did not do it, or did and was not heard."""
        if self._outcome is None:
            self._row.claiming(sent)
        parked_so_far = self._board.park_counter
        want, held = self._want(sent, parked_so_far), self._held
        try:
            reply = self._turns.turn(self._outcome, want, held)
        except BrokerError as error:
            self._failed(error)
            return None
        self._answered()
        self._settled(reply.settled)
        self._row.count("claims")
        # What was pending under our name has been asked for, and has come back as a new delivery if it was
        # there.
        self._unsure, self._unwanted = False, ()
        self._look_at_park = self._woken = False
        # The park is not looked at when what was pending or held began before it.
        if want.park and not reply.park_left and (reply.claimed is None or not (want.own or held)):
            self._park_seen = parked_so_far
        if want.everywhere:
            self._looked_everywhere = sent
        self._note(reply)
        return reply

    def _want(self, now: float, parked_so_far: int) -> Want:
        park = self._look_at_park or parked_so_far > self._park_seen
        everywhere = self._many and now - self._looked_everywhere >= _EVERYWHERE_S
        if park or everywhere or self._unsure or self._woken:
            return Want(own=self._unsure, park=park, woken=self._woken, everywhere=everywhere)
        return _NEXT

    def _note(self, reply: Reply) -> None:
        self._paused = reply.paused
        if reply.held != self._held:
            self._hold(reply.held)
        if reply.counts:
            self._row.count("absorbed", reply.counts.get("absorbed", 0))
            self._oddities.note(reply.counts)
            self._oddities.tell(time.monotonic())
        for problem in reply.problems:
            if problem not in self._problems:
                self._problems.add(problem)
                log.error("a band cannot be read, and is passed over: %s", problem)

    def _hold(self, held: tuple[Pair, ...]) -> None:
        self._held = held
        self._row.held(held)

    def _execute(self, delivery: Delivery, sent: float) -> None:
        self._show(f"{self._name}: {_printable(delivery.task_type)} {delivery.token.task_id[-8:]}")
        self._outcome = self._runner.run(delivery, sent)

    # Settling.

    def _settle(self) -> bool:
        """Settles and nothing else, which may be repeated. Whether nothing is in hand any more."""
        if self._outcome is None:
            return True
        try:
            answer = self._turns.settle(self._outcome)
        except BrokerError as error:
            self._failed(error)
            return False
        self._answered()
        self._settled(answer)
        return True

    def _settled(self, answer: str) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            tally.add(self._row, outcome, answer)

    # Redis.

    def _answered(self) -> None:
        if self._reached:
            return
        self._reached = True
        self._pause.reset()
        self._row.redis_ok(time.monotonic())
        if self._told:
            self._told = False
            log.info("Redis answers again")

    def _failed(self, error: BrokerError) -> None:
        """Redis did not do it. Waits a little; whoever called tries again."""
        now = time.monotonic()
        if not self._told and now >= self._quiet_until:
            self._told, self._quiet_until = True, now + _QUIET_S
            log.warning("Redis did not do it, trying again: %s", error)
        self._unsure, self._reached = True, False
        self._row.redis_lost()
        self._row.count("redis_errors")
        if self._outcome is None:
            self._idle()
        until = time.monotonic() + self._pause.next()
        while (left := until - time.monotonic()) > 0:
            if self._outcome is None and self._leash.told_to_end():
                return
            time.sleep(min(left, _LOOK_S))

    # Idle.

    def _idle(self) -> None:
        now = time.monotonic()
        self._row.ready(now)
        self._oddities.tell(now)
        if self._title != self._idle_title:
            self._show(self._idle_title)

    def _show(self, title: str) -> None:
        self._title = title
        setproctitle.setproctitle(title)

    def _wait(self) -> None:
        """Until a bell rings, or for DTQ_BLOCK_MS; in slices, between which the flags are looked at."""
        self._idle()
        queues = [queue for queue in self._queues if queue not in self._paused]
        # Resuming a queue rings the bell that is left out here.
        wait_s = min(self._block_s, _PAUSED_WAIT_S) if self._paused else self._block_s
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            try:
                rang = self._turns.wait(queues, min(left, _WAIT_SLICE_S))
            except BrokerError as error:
                self._failed(error)
                return
            self._answered()
            if rang is not None:
                self._rung(rang)
                return
            if self._leash.told_to_end() or not self._leash.may_claim():
                return
        self._look_at_park = True

    def _rung(self, queue: str) -> None:
        """A token of the queue's bell was taken, or of the supervisor's (`""`)."""
        if self._leash.told_to_end() or not self._leash.may_claim():
            try:
                self._turns.ring_back(queue)
            except BrokerError as error:
                self._failed(error)
            return
        self._woken = True
        if not queue:
            self._look_at_park = True

    # Not working.

    def _stand_by(self) -> None:
        """While it may not claim: waits at no bell, keeps nothing, looks at the flags."""
        if self._settle() and self._hand_back():
            self._idle()
            time.sleep(_LOOK_S)

    def _hand_back(self) -> bool:
        """Releases what was claimed and is not begun. Whether nothing of that kind is left."""
        if not self._unwanted and not self._held:
            return True
        try:
            self._turns.release(self._unwanted, self._held)
        except BrokerError as error:
            self._failed(error)
            return False
        self._answered()
        self._unwanted = ()
        self._hold(())
        return True

    def _leave(self) -> None:
        """Settles however long it takes: whoever told us to end kills us when its patience ends. An orphan
        has nobody who would, and stops trying when its lease is over."""
        give_up = time.monotonic() + self._lease_s
        while not self._settle():
            if time.monotonic() > give_up and self._leash.orphaned():
                log.error("Redis has not answered for a whole lease: the task in hand will run again")
                return
        # What cannot be handed back now, the supervisor does after our exit, or the reaper.
        if self._reached:
            self._hand_back()


def _printable(task_type: str) -> str:
    """Another program may have enqueued anything, and a title ends at a zero byte."""
    return task_type if task_type.isprintable() else ascii(task_type)
