"""A pool that has nothing to do costs next to nothing: little CPU, few questions to Redis (R24)."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

import psutil

from tests.conftest import SupervisorStarter
from tests.support.servers import RedisServer
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until

CHILDREN = 8
WATCHED_S = 5.0
CORE = 0.05
LOOKS_PER_S = 2.0
DUTIES_PER_S = 12.0
"""Most of it is the leader's look for what is due, four times a second at least."""


def cpu_seconds(pool: SupervisorProcess) -> float:
    """Of supervisor, template and children."""
    times = [psutil.Process(process.pid).cpu_times() for process in pool.tree()]
    assert len(times) == 2 + CHILDREN
    return float(sum(one.user + one.system for one in times))


def overheard(server: RedisServer, seconds: float) -> list[Counter[str]]:
    """Each client's commands in that time, by name. Those of scripts are not counted."""
    client: Any = server.client()
    by_client: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    end = time.monotonic() + seconds
    with client.monitor() as monitor:
        while time.monotonic() < end:
            heard = monitor.next_command()
            if heard["client_type"] != "lua":
                name = heard["command"].partition(" ")[0].upper()
                by_client[heard["client_address"], heard["client_port"]][name] += 1
    return list(by_client.values())


def test_an_idle_pool_uses_a_twentieth_of_a_core_and_each_child_looks_twice_a_second(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    pool = start_supervisor(server=redis_server, procs=CHILDREN).wait_ready()
    until(lambda: redis_server.cli("EXISTS", "dtq:lock:scheduler"), 5, pool.describe)
    begun, before = time.monotonic(), cpu_seconds(pool)
    clients = overheard(redis_server, WATCHED_S)
    used, seconds = cpu_seconds(pool) - before, time.monotonic() - begun
    children = [commands for commands in clients if commands["BLPOP"]]
    others = sum(commands.total() for commands in clients if not commands["BLPOP"])
    print(f"{used / seconds:.1%} of a core; {others} calls of the supervisor; of children: {children}")
    assert used / seconds < CORE
    assert len(children) == CHILDREN
    for commands in children:
        assert seconds - 1 <= commands["EVALSHA"] <= LOOKS_PER_S * seconds + 1
        assert seconds - 1 <= commands["BLPOP"] <= LOOKS_PER_S * seconds + 1
    assert others <= DUTIES_PER_S * seconds
