"""The commands and the Python of docs/operations.md do what they are there for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.redis.desk import Desk
from tests.support.servers import RedisServer

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
COMMANDS = re.findall(r"^redis-cli (.*)$|`redis-cli ([^`]*)`", PAGE, re.MULTILINE)
TASK_ID = "018f2c3a"


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


def test_every_command_is_answered(desk: Desk) -> None:
    desk.began(desk.child(), TASK_ID)
    assert len(COMMANDS) > 10
    for at_start, inline in COMMANDS:
        words = shlex.split(at_start or inline, comments=True)
        filled = [word.replace("<worker_id>", "w1").replace("<task_id>", TASK_ID) for word in words]
        desk.server.cli(*(word for word in filled if word != "--raw"))  # raises what Redis refuses


def test_the_python_acts_and_is_written_to_the_audit(desk: Desk) -> None:
    desk.dead(TASK_ID)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("redis://127.0.0.1:6379/0", desk.server.url), names)
    names["broker"].close()
    actions = [fields["action"] for _, fields in desk.redis.xrange(desk.keys.audit)]
    assert actions == ["pause", "resume", "cancel", "requeue"]
    assert desk.broker.status(TASK_ID) == "queued"
