"""Does what the pool decides. For the main thread; nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dtq_child.keys import consumer
from dtq_child.row import Order, Row
from dtq_supervisor import death
from dtq_supervisor.configuration import Configuration
from dtq_supervisor.crew import Crew, Remains
from dtq_supervisor.duties import Duties
from dtq_supervisor.events import (
    Action,
    AdoptSettings,
    AllowClaims,
    BeginDuties,
    CloseClaims,
    DumpStack,
    Fork,
    HardKill,
    HoldClaims,
    KillStray,
    KillTemplate,
    LeaveLoop,
    OpenClaims,
    OrderStop,
    ReadSettings,
    RetireTemplate,
    Say,
    Settle,
    ShowStack,
    SoftKill,
    StartTemplate,
)
from dtq_supervisor.judgement import Death
from dtq_supervisor.logs import say, set_level
from dtq_supervisor.nursery import Nursery, how
from dtq_supervisor.process import Child
from dtq_supervisor.seat import Seat, summed

FIRST_TO_STOP = ("preflight", "leader", "reaper", "burst")
"""Told to end as soon as a stop begins; the others keep leases and outcomes until the last child is gone."""

_ORDERS = {
    Order.SOFT_TIMEOUT: "soft timeout",
    Order.CANCELLED: "cancellation",
    Order.SHUTDOWN: "shutdown warning",
}


class Mourner(Protocol):
    """Whoever ends the leases of the dead."""

    def put(self, death: Death) -> None: ...


class Hands:
    """One method an action. `exit_code` is set by the last one."""

    def __init__(
        self,
        seat: Seat,
        crew: Crew,
        nursery: Nursery,
        duties: Duties,
        settler: Mourner,
        configuration: Configuration,
    ) -> None:
        self._seat, self._crew, self._nursery = seat, crew, nursery
        self._duties, self._settler, self._configuration = duties, settler, configuration
        self._remains: dict[Child, Remains] = {}
        self.exit_code: int | None = None
        self.contact = False
        """Redis was reached."""
        self._deeds: dict[type, Callable[[Any], None]] = {
            ReadSettings: self._read_settings,
            AdoptSettings: self._adopt_settings,
            StartTemplate: self._start_template,
            KillTemplate: self._kill_template,
            RetireTemplate: self._retire_template,
            Fork: self._fork,
            AllowClaims: self._allow_claims,
            KillStray: self._kill_stray,
            SoftKill: self._soft_kill,
            DumpStack: self._dump_stack,
            ShowStack: self._show_stack,
            HardKill: self._hard_kill,
            OrderStop: self._order_stop,
            BeginDuties: self._begin_duties,
            OpenClaims: self._open_claims,
            HoldClaims: self._hold_claims,
            CloseClaims: self._close_claims,
            Settle: self._settle,
            LeaveLoop: self._leave_loop,
            Say: self._say,
        }

    def do(self, action: Action) -> None:
        self._deeds[type(action)](action)

    def keep(self, who: Child, remains: Remains) -> None:
        """Until its Settle, which the same step orders."""
        self._remains[who] = remains

    # Settings.

    def _read_settings(self, action: ReadSettings) -> None:
        self._seat.inbox.put(self._configuration.read())

    def _adopt_settings(self, action: AdoptSettings) -> None:
        self._configuration.adopt()
        settings = self._configuration.settings
        self._seat.adopt(settings)
        set_level(settings.log_level)

    # Templates and children.

    def _start_template(self, action: StartTemplate) -> None:
        self._nursery.start(action.generation, candidate=action.candidate)

    def _kill_template(self, action: KillTemplate) -> None:
        self._nursery.kill(action.generation)

    def _retire_template(self, action: RetireTemplate) -> None:
        self._nursery.retire(action.generation)

    def _fork(self, action: Fork) -> None:
        slot, life, row = action.slot, action.life, action.row
        self._crew.enlist(slot, life, row, may_claim=action.may_claim, stop_after=action.stop_after)
        self._nursery.fork(action.generation, slot, life, row)

    def _allow_claims(self, action: AllowClaims) -> None:
        self._crew.allow_claims(action.slot, action.life)

    def _kill_stray(self, action: KillStray) -> None:
        say("warning", "stray", {"slot": action.slot, "life": action.life, "pid": action.pid})
        self._crew.kill(action.slot, action.life)

    def _order_stop(self, action: OrderStop) -> None:
        self._crew.order_stop(action.slot, action.life)

    def _soft_kill(self, action: SoftKill) -> None:
        row = self._crew.order(action.slot, action.life, action.seq, action.order)
        if row is not None:
            facts = _doing(row)
            say("info", "soft_kill", {"order": _ORDERS[action.order], "slot": action.slot, **facts})

    def _dump_stack(self, action: DumpStack) -> None:
        self._crew.ask_stack(action.slot, action.life, action.seq)

    def _show_stack(self, action: ShowStack) -> None:
        self._crew.ask_stack(action.slot, action.life, shown=True)

    def _hard_kill(self, action: HardKill) -> None:
        if not self._crew.kill(action.slot, action.life):
            return  # already dead: its exit will be collected
        row, verdict = self._crew.seen(action.slot, action.life), action.verdict
        facts = {"slot": action.slot, "life": action.life, "verdict": verdict.kind, **_doing(row)}
        facts["pid"] = self._nursery.processes.pid(action.slot, action.life)  # its row may not say it yet
        facts["why"] = verdict.why
        say("warning", "killed" if facts.get("task_id") else "killed_idle", facts)

    # The dead.

    def _settle(self, action: Settle) -> None:
        who = Child(action.slot, action.life)
        remains = self._remains.pop(who)
        self._count(remains.row)
        end, row, stack = remains.end, remains.row, remains.stack
        evidence = death.cause(end, row, action.verdict, remains.oom, stack)
        self._settler.put(
            Death(
                action.slot,
                action.life,
                consumer(self._seat.worker_id, action.slot, action.life),
                row,
                action.verdict,
                evidence,
                stack,
                action.code,
                action.signal,
                end.at,
            )
        )
        self._tell_death(action, remains, evidence)

    def _count(self, row: Row | None) -> None:
        if row is not None:
            published = self._seat.published
            published.past = summed([published.past, row.counters])

    def _tell_death(self, action: Settle, remains: Remains, evidence: dict[str, Any]) -> None:
        facts = {"slot": action.slot, "life": action.life, **_doing(remains.row), "pid": remains.end.pid}
        if self._is_told(action, remains):
            say("debug", "ended", facts)
            return
        facts |= {"how": how(remains.end), "killed_by": str(evidence.get("killed_by", "unknown sender"))}
        facts |= {"exit_code": action.code, "signal": action.signal}
        say("error", "died" if facts.get("task_id") else "died_idle", facts)

    def _is_told(self, action: Settle, remains: Remains) -> bool:
        """A clean end is no news, a kill was told when it was ordered, and a boot that failed as such."""
        clean = action.code == 0 and not remains.was_busy
        return clean or action.verdict is not None or not (remains.was_ready or remains.oom)

    # The whole.

    def _begin_duties(self, action: BeginDuties) -> None:
        self.contact = True
        self._duties.start()

    def _open_claims(self, action: OpenClaims) -> None:
        self._seat.scoreboard.set_claiming(True)
        self._seat.scoreboard.park_changed()  # what lay there while claims were held

    def _hold_claims(self, action: HoldClaims) -> None:
        self._seat.scoreboard.set_claiming(False)

    def _close_claims(self, action: CloseClaims) -> None:
        self._seat.scoreboard.set_claiming(False)
        self._seat.scoreboard.set_stopping(True)
        self._duties.stop(*FIRST_TO_STOP)

    def _leave_loop(self, action: LeaveLoop) -> None:
        self.exit_code = action.exit_code

    def _say(self, action: Say) -> None:
        say(action.level, action.key, action.facts)


def _doing(row: Row | None) -> dict[str, Any]:
    """The facts of what it was executing or settling, if it was."""
    if row is None:
        return {}
    e = row.execution
    task = {"task_type": e.task_type, "task_id": e.task_id, "attempt": e.attempt} if e else {}
    return {"pid": row.pid, **task}
