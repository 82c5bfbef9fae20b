"""Listens to the lifecycle events of a server: what was said of each task, and how often."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self, cast

from tests.support.servers import RedisServer

TERMINAL = frozenset({"TASK_SUCCEEDED", "TASK_DEAD_LETTERED", "TASK_CANCELLED", "TASK_EXPIRED"})
PATIENCE_S = 10.0


class Witness:
    """From its making on, everything that is published on `dtq:events`. It reads when it is asked: until then
    the events wait in the server and in the socket."""

    def __init__(self, server: RedisServer, prefix: str = "dtq:") -> None:
        self._channel = f"{prefix}events"
        self._redis = cast(Any, server.client(decode_responses=True))
        self._pubsub = self._redis.pubsub()
        self._pubsub.subscribe(self._channel)
        self._seen: list[dict[str, Any]] = []
        confirmed = self._pubsub.get_message(timeout=PATIENCE_S)
        assert confirmed is not None, "the server does not confirm the subscription"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pubsub.close()

    def events(self) -> list[dict[str, Any]]:
        """All that were published until now, in their order."""
        marker = os.urandom(8).hex()
        self._redis.publish(self._channel, marker)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = self._pubsub.get_message(timeout=1.0)
            if message is None or message["type"] != "message":
                continue
            if message["data"] == marker:
                return list(self._seen)
            self._seen.append(json.loads(message["data"]))
        raise AssertionError(f"the marker did not come back; seen: {len(self._seen)} events")

    def of(self, task_id: str) -> list[str]:
        """The types of the events of one task."""
        return [event["type"] for event in self.events() if event["task_id"] == task_id]

    def endings(self) -> Counter[str]:
        """How often each task was told to have ended for good."""
        return Counter(event["task_id"] for event in self.events() if event["type"] in TERMINAL)

    def refusals(self) -> Counter[str]:
        """How often an outcome of each task came too late and was refused."""
        refused = [
            event
            for event in self.events()
            if event["type"] == "TASK_DUPLICATE_ABSORBED" and event.get("metadata", {}).get("why") == "fenced"
        ]
        return Counter(event["task_id"] for event in refused)
