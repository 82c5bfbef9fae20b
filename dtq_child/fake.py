"""An App on fakeredis[lua]: the real broker, the real scripts, and `work()` in the place of a worker. For
tests."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

try:
    import fakeredis
except ModuleNotFoundError as error:
    text_of_error = "this part of dtq_child.testing needs fakeredis: pip install 'fakeredis[lua]'"
    raise ModuleNotFoundError(text_of_error, name=error.name) from error

from dtq_child import payload
from dtq_child import settings as settings_module
from dtq_child.app import App
from dtq_child.broker import Broker
from dtq_child.connection import Link, ServerReply
from dtq_child.context import CurrentTask
from dtq_child.declaration import Task
from dtq_child.errors import DtqError
from dtq_child.in_process import attempt
from dtq_child.keys import GROUP, consumer, new_worker_id
from dtq_child.limits import Limits, declared_limits, limits_of
from dtq_child.outcome import Facts, Happening, Returned, UnknownType, decide
from dtq_child.settings import Settings
from dtq_child.task import text
from dtq_child.turns import Delivery, Outcome, Turns, Want
from dtq_child.wire import RawConnection

MAX_LOOKS_IN_VAIN = 10_000
# Older versions of fakeredis know only the second name.
_Connection: Any = getattr(fakeredis, "FakeRedisConnection", None) or fakeredis.FakeConnection


class LocalBroker(Broker):
    """The real one, whose tasks `work()` may execute. `connect` makes its connections."""

    def __init__(self, settings: Settings, connect: Callable[[], RawConnection]) -> None:
        super().__init__(settings, lambda: Link(connect))
        self.connect = connect


def fake_broker(settings: Settings) -> LocalBroker:
    """On an empty server of its own, in this process."""
    server = fakeredis.FakeServer(version=(7, 0))
    return LocalBroker(settings, lambda: _Connection(server=server, protocol=2))


def fake_app(include: Iterable[str] = (), **settings: Any) -> App:
    """A new App on an empty fakeredis of its own. `settings`: any, a worker's too; the environment is not
    read."""
    app = App(include=include)
    _put_on_fake(app, settings)
    return app


@contextlib.contextmanager
def faked(app: App, **settings: Any) -> Iterator[App]:
    """Puts an existing App on an empty fakeredis until the block ends."""
    was = _put_on_fake(app, settings)
    try:
        yield app
    finally:
        app.swap(*was)


def _put_on_fake(app: App, settings: dict[str, Any]) -> Any:
    made = settings_module.defaults(**settings)
    return app.swap(made, fake_broker(made))


def work(app: App, limit: int | None = None, *, due: bool = False) -> int:
    """Executes what is waiting, one task after the other in this thread, until nothing is left or `limit`
    tasks were executed. Returns how many were; attempts count one by one.

    `due`: what is scheduled (delay, eta, the next attempt) is taken to be due now."""
    broker = app.broker
    if not isinstance(broker, LocalBroker):
        raise DtqError("work() is for an App on fakeredis: make one by fake_app(), or use `with faked(app)`")
    executed, link = 0, Link(broker.connect)
    worker = _Worker(app, broker, link)
    try:
        while True:
            executed += worker.drain(None if limit is None else limit - executed)
            if executed == limit or not (due and worker.promote()):
                return executed
    finally:
        link.close()


class _Worker:
    """The loop of one child, in the caller's thread: claim, execute, settle with the next claim."""

    def __init__(self, app: App, broker: LocalBroker, link: Link) -> None:
        self._app, self._broker, self._link = app, broker, link
        self._worker_id = new_worker_id()

    def drain(self, limit: int | None) -> int:
        """Executes what is in the queues, those included that come up meanwhile. Returns how many tasks."""
        executed, looks_in_vain, outcome, turns = 0, 0, None, self._turns()
        while True:
            may_claim = executed != limit
            reply = turns.turn(outcome, Want(claim=may_claim, park=True, everywhere=True))
            if reply.problems:
                raise DtqError("; ".join(reply.problems))
            outcome = None
            if reply.claimed is not None:
                outcome = self._execute(reply.claimed)
                executed += 1
            elif not may_claim:
                return executed
            elif reply.more:
                looks_in_vain += 1
                if looks_in_vain > MAX_LOOKS_IN_VAIN:
                    raise DtqError("Redis goes on saying that there is more, and hands out nothing")
            else:
                known, turns = turns.queues, self._turns()
                if turns.queues == known:
                    return executed

    def _execute(self, delivery: Delivery) -> Outcome:
        task = self._app.find(delivery.task_type)
        declared = declared_limits(None if task is None else task.options_declared, self._broker.settings)
        limits, begun = limits_of(delivery, declared), time.monotonic()
        happening = self._happening(task, delivery, limits)
        facts = Facts(
            delivery.attempt,
            limits.max_attempts,
            delivery.crashes,
            limits.max_crashes,
            limits.policy,
            round(self._broker.settings.unknown_task_ttl_s * 1000),
        )
        return Outcome(
            token=delivery.token,
            queue=delivery.queue,
            decision=decide(happening, facts, random.random()),
            result=happening.result if isinstance(happening, Returned) else None,
            execution={"pid": os.getpid(), "duration_ms": round((time.monotonic() - begun) * 1000, 3)},
            max_attempts=limits.max_attempts,
        )

    def _happening(self, task: Task[..., Any] | None, delivery: Delivery, limits: Limits) -> Happening:
        if task is None:
            return UnknownType(delivery.first_unknown_ms or 0)
        current = CurrentTask(
            id=delivery.token.task_id,
            task_type=delivery.task_type,
            queue=delivery.queue,
            attempt=delivery.attempt,
            max_attempts=limits.max_attempts,
            crashes=delivery.crashes,
            delivery=delivery.token.delivery,
            redelivered=delivery.redelivered,
            deadline=time.monotonic() + limits.timeout_ms / 1000,
            metadata=payload.loads(delivery.metadata) if delivery.metadata else {},
        )
        return attempt(self._app, task, delivery.payload, current, delivery.store_result)[0]

    def promote(self) -> bool:
        """Makes everything in the schedule due and promotes it, but for types that this App doesn't know,
        which would come back for ever. Whether anything was promoted."""
        call, keys = self._link.call, self._broker.keys
        now_ms = self._now_ms()
        known = [
            task_id for task_id in map(text, call("ZRANGE", keys.schedule, 0, -1)) if self._is_known(task_id)
        ]
        for task_id in known:
            call("HSET", keys.task(task_id), "due_at_ms", now_ms)
            call("ZADD", keys.schedule, "XX", now_ms, task_id)
        call("SET", keys.lock, self._worker_id, "PX", 10_000)
        run, most = self._broker.scripts.run, max(1, len(known))
        run(self._link, "promote_claim", [keys.lock, keys.schedule, keys.claimed], [self._worker_id, most])
        added = [keys.lock, keys.claimed, keys.schedule, keys.cancelled, keys.queues]
        promoted = run(self._link, "promote_add", added, [self._worker_id, most])[1]
        call("DEL", keys.lock)
        return bool(promoted > 0)

    def _is_known(self, task_id: str) -> bool:
        task_type = self._link.call("HGET", self._broker.keys.task(task_id), "task_type")
        return task_type is not None and self._app.find(text(task_type)) is not None

    def _now_ms(self) -> int:
        seconds, microseconds = self._link.call("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def _turns(self) -> Turns:
        broker = self._broker
        queues = sorted(text(queue) for queue in self._link.call("SMEMBERS", broker.keys.queues)) or [
            "default"
        ]
        for queue in queues:
            self._make_groups(queue)
        name = consumer(self._worker_id, 0, 1)
        return Turns(self._link, broker.keys, broker.settings, self._worker_id, name, queues)

    def _make_groups(self, queue: str) -> None:
        """The script that claims makes missing groups; fakeredis reports them by other words than Redis."""
        for stream in self._broker.keys.bands(queue):
            try:
                self._link.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
            except ServerReply as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
