"""An App on fakeredis[lua]: the real broker, the real scripts, and `work()` in the place of a worker. For
tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

try:
    import fakeredis
except ModuleNotFoundError as error:
    text_of_error = "this part of dtq_child.testing needs fakeredis: pip install 'fakeredis[lua]'"
    raise ModuleNotFoundError(text_of_error, name=error.name) from error

from dtq_child import settings as settings_module
from dtq_child.app import App
from dtq_child.broker import Broker
from dtq_child.connection import Link, RawConnection, ServerReply
from dtq_child.errors import DtqError
from dtq_child.guards import Guards
from dtq_child.keys import GROUP, consumer, new_worker_id
from dtq_child.runner import Runner
from dtq_child.scoreboard import Scoreboard
from dtq_child.settings import Settings
from dtq_child.task import text
from dtq_child.turns import Turns, Want

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


class _NoGuards(Guards):
    """The process is the test's: its signals, its directory and its threads are left alone."""

    def __init__(self) -> None:
        pass

    def restore(self) -> tuple[str, ...]:
        return ()

    def hold_signals(self) -> None:
        pass

    def new_threads(self) -> tuple[str, ...]:
        return ()


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
    executed = 0
    with _worker(app, broker) as worker:
        while True:
            executed += worker.drain(None if limit is None else limit - executed)
            if executed == limit or not (due and worker.promote()):
                return executed


@contextlib.contextmanager
def _worker(app: App, broker: LocalBroker) -> Iterator[_Worker]:
    board = Scoreboard.create(1)
    runner = Runner(app, broker.settings, board.child_row(0), _NoGuards(), lambda: False)
    link = Link(broker.connect)
    try:
        yield _Worker(app, broker, runner, link)
    finally:
        link.close()
        runner.close()
        board.close()
        os.close(board.fd)


class _Worker:
    """One child's loop without its processes: claim, run, settle with the next claim."""

    def __init__(self, app: App, broker: LocalBroker, runner: Runner, link: Link) -> None:
        self._app, self._broker, self._runner, self._link = app, broker, runner, link
        self._worker_id = new_worker_id()

    def drain(self, limit: int | None) -> int:
        """Executes what is in the queues, those included that come up meanwhile. Returns how many tasks."""
        executed, outcome, turns = 0, None, self._turns()
        while True:
            may_claim, sent = executed != limit, time.monotonic()
            reply = turns.turn(outcome, Want(claim=may_claim, park=True, everywhere=True))
            if reply.problems:
                raise DtqError("; ".join(reply.problems))
            outcome = None
            if reply.claimed is not None:
                outcome = self._runner.run(reply.claimed, sent)
                executed += 1
            elif not may_claim:
                return executed
            elif not reply.more:
                known, turns = turns.queues, self._turns()
                if turns.queues == known:
                    return executed

    def promote(self) -> bool:
        """Makes everything in the schedule due and promotes it, but for types that this App doesn't know,
        which would come back for ever. Whether there was anything."""
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
        run(self._link, "promote_add", added, [self._worker_id, most])
        call("DEL", keys.lock)
        return bool(known)

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
