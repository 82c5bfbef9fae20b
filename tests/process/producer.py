"""A producer for stories about supervisors: enqueues by name, and reads records."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from dtq_child.broker import Broker
from dtq_child.settings import defaults
from dtq_child.task import TERMINAL, Call, Record, Status
from tests.support.servers import RedisServer
from tests.support.waiting import until


class Producer:
    def __init__(self, server: RedisServer) -> None:
        self._broker = Broker(defaults(redis_url=server.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.close()

    def send(
        self, name: str, arguments: dict[str, Any] | None = None, *, timeout: float = 60.0, **options: Any
    ) -> str:
        """Enqueues one probe task and returns its id."""
        call = self._call(name, arguments, timeout, **options)
        self._broker.enqueue([call])
        return call.task_id

    def send_together(
        self, tasks: Iterable[tuple[str, dict[str, Any]]], *, timeout: float = 60.0, **options: Any
    ) -> list[str]:
        """Enqueues some in one step: a child finds all or none of them. Returns their ids in order."""
        calls = [self._call(name, arguments, timeout, **options) for name, arguments in tasks]
        self._broker.enqueue(calls)
        return [call.task_id for call in calls]

    def _call(self, name: str, arguments: dict[str, Any] | None, timeout: float, **options: Any) -> Call:
        payload = json.dumps(arguments or {}).encode()
        timeout_ms = round(timeout * 1000)
        return Call(uuid.uuid4().hex, "default", name, payload, timeout_ms=timeout_ms, **options)

    def cancel(self, task_id: str) -> str:
        return self._broker.cancel(task_id)

    def depth(self) -> int:
        """Tasks that wait or run."""
        return self._broker.depth("default")

    def record(self, task_id: str) -> Record:
        record = self._broker.record(task_id)
        assert record is not None, f"no record of {task_id}"
        return record

    def status(self, task_id: str) -> Status | None:
        return self.record(task_id).status

    def wait(self, task_id: str, status: Status, timeout: float = 10.0) -> Record:
        """Waits until the task has that status; a record that has ended otherwise is shown."""

        def reached() -> bool:
            found = self.status(task_id)
            assert found == status or found not in TERMINAL, self.record(task_id).as_dict()
            return found == status

        until(reached, timeout, lambda: f"{status} never came: {self.record(task_id).as_dict()}")
        return self.record(task_id)
