"""The first contact: is this a Redis that tasks can be trusted to? Waited for while nobody answers (R14)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtq_child.connection import ServerReply
from dtq_child.errors import BrokerRefused, BrokerUnavailable, RedisOutOfMemory
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.events import ContactMade, ContactRefused
from dtq_supervisor.line import Line
from dtq_supervisor.logs import say

SCHEMA = "1.0"
"""The layout of the keys; another number before the dot cannot share them."""
OLDEST = (6, 2)
SAFE_POLICY = "noeviction"


class Refused(Exception):
    """Redis answers, and cannot be worked with."""


class Preflight(RedisDuty):
    """Asks until it is answered, tells the main loop once, and ends."""

    name = "preflight"

    def beat(self) -> float:
        try:
            version = look(self.line, allow_eviction=self.seat.settings.allow_eviction)
        except (Refused, BrokerRefused) as error:
            self.seat.inbox.put(ContactRefused(str(error)))
        else:
            say("info", "contact", {"version": version})
            self._warn()
            self.seat.inbox.put(ContactMade())
        self.done = True
        return 0.0

    def _warn(self) -> None:
        if not self.seat.settings.embedded and not keeps_data(self.line):
            say("warning", "no_persistence")


def look(line: Line, *, allow_eviction: bool) -> str:
    """The server's version, if it will do. Raises Refused, BrokerError."""
    line.call("PING")
    info = _info(line)
    version = info.get("valkey_version") or info.get("redis_version", "")
    if info.get("redis_mode") == "cluster" or info.get("cluster_enabled") == "1":
        raise Refused("it is a cluster: use a plain Redis, and scale by queues and key prefixes")
    if not _new_enough(info.get("redis_version", "")):
        raise Refused(f"version {version} is too old: 6.2 is the oldest that will do")
    _check_policy(_config(line, "maxmemory-policy") or info.get("maxmemory_policy", ""), allow_eviction)
    _check_scripts(line)
    _check_schema(line)
    return version or "of an unknown version"


def keeps_data(line: Line) -> bool:
    """False only if it is known that nothing is written to disk."""
    append, save = _config(line, "appendonly"), _config(line, "save")
    return append is None or save is None or append == "yes" or save != ""


def _check_policy(policy: str, allowed: bool) -> None:
    if policy in ("", SAFE_POLICY):
        return
    if not allowed:
        raise Refused(
            f"its maxmemory-policy is {policy}, so it evicts tasks when it is full: "
            f"set it to {SAFE_POLICY}, or accept the loss by --allow-eviction"
        )
    say("warning", "evicting_allowed", {"policy": policy})


def _check_scripts(line: Line) -> None:
    """Whether this user may run any: without them nothing works. Raises BrokerRefused."""
    line.call("EVALSHA", line.call("SCRIPT", "LOAD", "return 1"), 0)


def _check_schema(line: Line) -> None:
    """Sets the layout's version where none is, which a full Redis may refuse."""
    key = line.keys.schema
    try:
        line.call("SET", key, SCHEMA, "NX")
    except RedisOutOfMemory:
        pass  # the next supervisor will set it
    found = line.call("GET", key)
    theirs = found.decode("utf-8", "replace") if isinstance(found, bytes) else SCHEMA
    if theirs.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise Refused(
            f"the keys under this prefix have the layout {theirs}, this version of dtq uses {SCHEMA}: "
            "use another --key-prefix, or the version of dtq that wrote them"
        )


def _new_enough(version: str) -> bool:
    """Also true where the version cannot be told."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST


def _info(line: Line) -> Mapping[str, str]:
    """Empty where we may not look."""
    raw = _allowed(line, "INFO")
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else ""
    pairs = (row.partition(":") for row in text.splitlines() if ":" in row)
    return {name: value.strip() for name, _, value in pairs}


def _config(line: Line, name: str) -> str | None:
    """None where we may not look."""
    found = _allowed(line, "CONFIG", "GET", name)
    if isinstance(found, list) and len(found) == 2 and isinstance(found[1], bytes):
        return found[1].decode("utf-8", "replace")
    return None


def _allowed(line: Line, *words: str) -> Any:
    """The reply; None if this user, or this provider, does not let us ask."""
    try:
        return line.call(*words)
    except BrokerUnavailable:
        raise
    except (BrokerRefused, ServerReply):
        return None
