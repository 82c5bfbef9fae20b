"""Runs one handler under its guards and says what happened; what becomes of it, `outcome.decide` says (R26).

The row says `executing`, with the deadlines, before any code of the application runs, and `settling` only
when the outcome is bytes in hand. So whatever hangs in between, a hook and the writing of the result
included, is inside the deadline, and a task whose outcome exists is never blamed for a Redis that is away.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import random
import re
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from types import CoroutineType
from typing import Any

from dtq_child import context, forked, hooks, payload
from dtq_child.app import App
from dtq_child.context import CurrentTask
from dtq_child.declaration import Task
from dtq_child.error_text import error_text
from dtq_child.errors import Interruption, PayloadError
from dtq_child.guards import Guards
from dtq_child.interrupter import Interrupter
from dtq_child.limits import Limits, declared_limits, limits_of
from dtq_child.loop import AsyncCall, HandlerLoop
from dtq_child.outcome import BadArgs, Decision, Facts, Happening, Returned, UnknownType, decide
from dtq_child.raised import what_was_raised
from dtq_child.retry import DEFAULT_RETRY
from dtq_child.scoreboard import ChildRow, Execution
from dtq_child.settings import Settings
from dtq_child.turns import Delivery, Outcome

_usage: Callable[[int], resource.struct_rusage] = resource.getrusage
_COUNT_MAX = 2**32 - 1
_KILL_PATIENCE_S = 10.0
_NO_ESCAPES = re.compile(r"[A-Za-z0-9_.:-]+")
_SELF = resource.RUSAGE_SELF
# The generator that `random` shares with handlers may have been seeded by one of them, alike in every child.
_dice = random.SystemRandom()

# What most tasks come to; that a return is a success depends on no facts.
_NOTHING = Returned(payload.dump_result(None, 16))
_SUCCEEDED = decide(Returned(), Facts(1, 1, 0, 1, DEFAULT_RETRY, 0), 0.0)

log = logging.getLogger("dtq.child")


class Runner:
    """Executes deliveries, one at a time, in the main thread of a child."""

    def __init__(
        self,
        app: App,
        settings: Settings,
        row: ChildRow,
        should_stop: Callable[[], bool],
        dump_fd: int | None = None,
    ) -> None:
        """Takes the soft signal, and the state of the process as the one to go back to after each task.

        `should_stop` answers `current_task().stopping`; stacks are written to `dump_fd`."""
        self._app, self._settings, self._row = app, settings, row
        self._should_stop = should_stop
        self._interrupter = Interrupter(row)
        self._interrupter.install()
        self._guards = Guards(dump_fd)
        self._loop = HandlerLoop()
        self._pid = os.getpid()
        self._seq = 0
        self._delivery: Delivery | None = None
        self._declared: dict[str, Limits] = {}
        self._plain_types: set[str] = set()
        self._unknown: set[str] = set()
        self._result_max_bytes = settings.result_max_bytes
        self._unknown_ttl_ms = round(settings.unknown_task_ttl_s * 1000)

    def close(self) -> None:
        self._loop.close()
        self._guards.close()

    def run(self, delivery: Delivery, claim_sent: float) -> Outcome:
        """Executes `delivery`, claimed by a command sent at `claim_sent` (monotonic seconds). Whatever the
        handler does short of ending the process, there is an outcome."""
        task = self._app.find(delivery.task_type)
        limits = self._limits(task, delivery)
        started, cpu_before = time.monotonic(), time.process_time()
        deadline = started + limits.timeout_ms / 1000
        self._begin(delivery, limits, started, deadline, claim_sent)
        if task is None:
            happening: Happening = self._unknown_type(delivery)
        else:
            happening = self._happening(task, delivery, limits, deadline)
        ended, cpu_s = time.monotonic(), time.process_time() - cpu_before
        outcome = Outcome(
            token=delivery.token,
            queue=delivery.queue,
            decision=self._decision(happening, delivery, limits),
            result=happening.result if isinstance(happening, Returned) else None,
            execution=self._execution(ended - started, cpu_s),
            max_attempts=limits.max_attempts,
            task_type=delivery.task_type,
            attempt=delivery.attempt,
            escaped=delivery.task_type not in self._plain_types,
        )
        if self._row.condemned == self._seq:
            self._await_the_kill()
        self._row.settling(ended)
        return outcome

    def _await_the_kill(self) -> None:
        """The handler was at its deadline when its stacks were asked for, which ends many a wait in C code
        that nothing else would have ended. The supervisor kills what it still finds executing. If it is
        stopped or dead itself, the outcome stands against the record like any late one."""
        give_up = time.monotonic() + _KILL_PATIENCE_S
        while time.monotonic() < give_up:
            time.sleep(0.05)

    def _limits(self, task: Task[..., Any] | None, delivery: Delivery) -> Limits:
        if task is None:
            return limits_of(delivery, declared_limits(None, self._settings))
        declared = self._declared.get(task.name)
        if declared is None:
            declared = self._declared[task.name] = declared_limits(task.options_declared, self._settings)
            if _NO_ESCAPES.fullmatch(task.name):
                self._plain_types.add(task.name)
        return limits_of(delivery, declared)

    def _begin(
        self, delivery: Delivery, limits: Limits, started: float, deadline: float, claim_sent: float
    ) -> None:
        self._seq += 1
        self._delivery = delivery
        self._interrupter.expect(self._seq)
        token = delivery.token
        # The counts come from a record that other programs may write, and a row has 32 bits for each.
        self._row.executing(
            Execution(
                seq=self._seq,
                task_id=token.task_id,
                task_type=delivery.task_type,
                stream=token.stream,
                entry_id=token.entry_id,
                delivery=token.delivery,
                attempt=_counted(delivery.attempt),
                max_attempts=limits.max_attempts,
                crashes=_counted(delivery.crashes),
                max_crashes=limits.max_crashes,
                timeout_ms=limits.timeout_ms,
                started=started,
                soft_deadline=started + limits.soft_timeout_ms / 1000 if limits.soft_timeout_ms else 0.0,
                hard_deadline=deadline,
                policy=limits.policy,
                claim_sent=claim_sent,
            )
        )

    def _happening(
        self, task: Task[..., Any], delivery: Delivery, limits: Limits, deadline: float
    ) -> Happening:
        try:
            arguments = payload.load_arguments(delivery.payload)
            task.check_arguments(arguments)
        except (PayloadError, TypeError) as error:
            return BadArgs(error_text(error))
        token = delivery.token
        current = CurrentTask(
            id=token.task_id,
            task_type=delivery.task_type,
            queue=delivery.queue,
            attempt=delivery.attempt,
            max_attempts=limits.max_attempts,
            crashes=delivery.crashes,
            delivery=token.delivery,
            redelivered=delivery.redelivered,
            deadline=deadline,
            metadata=_metadata(delivery.metadata) if delivery.metadata else {},
            should_stop=self._should_stop,
        )
        was_async = self._execute(task, arguments, current)
        if self._interrupter.returned:
            return self._returned(delivery.store_result)
        return what_was_raised(self._interrupter, was_async)

    def _execute(self, task: Task[..., Any], arguments: dict[str, Any], current: CurrentTask) -> bool:
        """Calls the hooks and the handler; the interrupter holds what came of it. Whether it was async."""
        interrupter, our_hooks = self._interrupter, self._app.hooks
        space = contextvars.copy_context()
        space.run(context.enter, current)
        prepare = (
            functools.partial(self._start_hooks, space, our_hooks.task_start, current)
            if our_hooks.task_start
            else None
        )
        was_async = task.is_async
        if was_async:
            self._guarded_async(functools.partial(task.fn, **arguments), space, prepare)
        else:
            self._guarded(interrupter.run, functools.partial(space.run, task.fn, **arguments), prepare)
            if interrupter.returned and type(interrupter.returned[0]) is CoroutineType:
                # A plain function around an async one, as many decorators make them.
                coroutine, was_async = interrupter.returned[0], True
                self._guarded_async(lambda: coroutine, space, None)
        if our_hooks.task_end:
            self._guarded(_end_hooks, space, our_hooks.task_end, current, interrupter.error)
        return was_async

    def _start_hooks(self, space: contextvars.Context, starts: list[Any], current: CurrentTask) -> None:
        try:
            space.run(hooks.run, starts, current)
        except Interruption:
            if self._interrupter.delivered:
                raise
            log.exception("a hook at the start of a task failed; it changes no outcome")

    def _guarded_async(
        self,
        start: Callable[[], Awaitable[Any]],
        space: contextvars.Context,
        prepare: Callable[[], None] | None,
    ) -> None:
        call = AsyncCall(self._loop, start, space)
        self._guarded(self._interrupter.run, call, prepare, call.cancel)

    def _guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """Runs a step that calls code of the application, then puts back what that changed.

        A signal handler that the application left behind may raise anywhere in here. Each retry gets further,
        the second with all signals held; what a third one raised would end the process, which is a crash and
        recovered as one."""
        try:
            step(*arguments)
            changed = self._guards.restore()
        except BaseException as stray:  # noqa: BLE001
            try:
                changed = self._recovered(stray)
            except BaseException as again:  # noqa: BLE001
                changed = self._recovered(again)
        if os.getpid() != self._pid:
            forked.end_here(self._interrupter.error)
        if changed:
            self._warn("left behind, and it was put back: %s", ", ".join(changed))
        threads = self._guards.new_threads()
        if threads:
            self._warn("left threads running: %s", ", ".join(threads))

    def _warn(self, words: str, *facts: str) -> None:
        about = self._delivery.about if self._delivery is not None else {}
        head = (about.get("task_id", "?"), about.get("task_type", "?"))
        log.warning(f"task %s (%s) {words}", *head, *facts, extra=about)

    def _recovered(self, stray: BaseException) -> tuple[str, ...]:
        if not self._interrupter.returned and self._interrupter.error is None:
            self._interrupter.error = stray
        self._interrupter.disarm()
        self._guards.hold_signals()
        return self._guards.restore()

    def _returned(self, stored: bool) -> Returned:
        value = self._interrupter.returned[0]
        self._interrupter.forget()
        if not stored:
            return Returned(None)
        return _NOTHING if value is None else Returned(payload.dump_result(value, self._result_max_bytes))

    def _unknown_type(self, delivery: Delivery) -> UnknownType:
        if delivery.task_type not in self._unknown:
            self._unknown.add(delivery.task_type)
            self._row.count("unknown_types")
            log.warning(
                "unknown task type %r of task %s; known here: %s; import its module by App(include=[…])",
                delivery.task_type,
                delivery.token.task_id,
                ", ".join(sorted(self._app.tasks)) or "none",
                extra=delivery.about,
            )
        return UnknownType(delivery.first_unknown_ms or 0)

    def _decision(self, happening: Happening, delivery: Delivery, limits: Limits) -> Decision:
        if type(happening) is Returned:
            return _SUCCEEDED
        facts = Facts(
            attempt=delivery.attempt,
            max_attempts=limits.max_attempts,
            crashes=delivery.crashes,
            max_crashes=limits.max_crashes,
            policy=limits.policy,
            unknown_ttl_ms=self._unknown_ttl_ms,
        )
        return decide(happening, facts, _dice.random())

    def _execution(self, seconds: float, cpu_s: float) -> dict[str, Any]:
        return {
            "pid": self._pid,
            "duration_ms": int(seconds * 1e6) / 1000,
            "cpu_ms": int(cpu_s * 1e6) / 1000,
            # The process's highest so far, not this task's; a forked process starts at its parent's size.
            "max_rss_bytes": _usage(_SELF).ru_maxrss * 1024,
        }


def _end_hooks(
    space: contextvars.Context, ends: list[Any], current: CurrentTask, error: BaseException | None
) -> None:
    try:
        space.run(hooks.run, ends, current, error)
    except Interruption:
        # None is delivered at this time: the hook made it up.
        log.exception("a hook at the end of a task failed; it changes no outcome")


def _counted(number: int) -> int:
    return number if 0 <= number <= _COUNT_MAX else min(max(0, number), _COUNT_MAX)


def _metadata(raw: bytes) -> Mapping[str, Any]:
    """What the producer gave; another program may have written anything."""
    try:
        value = payload.loads(raw)
    except PayloadError:
        return {}
    return value if isinstance(value, dict) else {}
