"""Faults of every kind at random, one after the other and at once: at no instant is an accepted task nowhere,
and each is over once (R9, R11)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import redis

from dtq_child.errors import BrokerUnavailable
from dtq_child.retry import RetryPolicy
from tests.conftest import ProxyStarter, SupervisorStarter
from tests.outage.stage import Orders, paced
from tests.support.proxy import FaultProxy
from tests.support.servers import RedisServer
from tests.support.snapshot import TERMINAL
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until
from tests.support.witness import Witness

SOON = RetryPolicy(base_s=0.2, factor=1.0, cap_s=1.0, jitter=0.5).to_json()
FLAGS = ["--visibility-timeout", "2", "--heartbeat-interval", "0.7"]
LASTING_S = 25.0
BEAT_S = 0.25


@dataclass(slots=True)
class Site:
    """A machine: one supervisor, and its own way to Redis."""

    pool: SupervisorProcess
    proxy: FaultProxy
    restart: Callable[[], SupervisorProcess]
    frozen: list[int]
    busy_until: float = 0.0


class Gremlin:
    """Does one thing at a time to a site, by its dice; what lasts is ended by `mend`."""

    def __init__(self, seed: int, server: RedisServer) -> None:
        self.dice, self.server = Random(seed), server
        self.deeds: Counter[str] = Counter()
        self._menu = {
            self.kill_child: 6,
            self.lose_replies: 5,
            self.lose_requests: 3,
            self.cut: 3,
            self.black_hole: 2,
            self.freeze: 2,
            self.kill_supervisor: 1,
            self.kill_template: 1,
            self.forget_scripts: 2,
            self.kill_connections: 2,
            self.nothing: 3,
        }

    def strike(self, site: Site) -> None:
        if time.monotonic() < site.busy_until:
            return
        self.mend(site)
        deed = self.dice.choices(list(self._menu), list(self._menu.values()))[0]
        self.deeds[deed.__name__] += 1
        deed(site)

    def mend(self, site: Site) -> None:
        site.proxy.heal()
        for pid in reversed(site.frozen):
            _signal(pid, signal.SIGCONT)
        site.frozen.clear()

    def kill_child(self, site: Site) -> None:
        if children := site.pool.child_pids():
            _signal(self.dice.choice(children), signal.SIGKILL)

    def kill_supervisor(self, site: Site) -> None:
        site.pool.kill()
        site.pool = site.restart()
        site.busy_until = time.monotonic() + 3.0

    def kill_template(self, site: Site) -> None:
        for template in site.pool.templates():
            _signal(template.pid, signal.SIGKILL)

    def freeze(self, site: Site) -> None:
        """For longer than a lease, or not."""
        site.frozen = [process.pid for process in site.pool.tree()]
        for pid in site.frozen:
            _signal(pid, signal.SIGSTOP)
        site.busy_until = time.monotonic() + self.dice.uniform(0.3, 4.0)

    def black_hole(self, site: Site) -> None:
        site.proxy.black_hole(existing=True, new=True, hold=self.dice.random() < 0.5)
        site.busy_until = time.monotonic() + self.dice.uniform(0.3, 5.0)

    def lose_replies(self, site: Site) -> None:
        site.proxy.drop_reply(b"EVALSHA", count=self.dice.randrange(1, 6), skip=self.dice.randrange(5))

    def lose_requests(self, site: Site) -> None:
        site.proxy.drop_request(b"EVALSHA", count=self.dice.randrange(1, 6), skip=self.dice.randrange(5))

    def cut(self, site: Site) -> None:
        site.proxy.cut()

    def forget_scripts(self, _: Site) -> None:
        self.server.cli("SCRIPT", "FLUSH")

    def kill_connections(self, _: Site) -> None:
        self.server.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def nothing(self, _: Site) -> None:
        return


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended by itself


class Conservation:
    """Asks all the time where the accepted tasks are."""

    def __init__(self, orders: Orders) -> None:
        self.looks = 0
        self.homeless: set[str] = set()
        self._orders = orders
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Conservation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        server = self._orders.server
        while not self._stop.wait(0.05):
            accepted = list(self._orders.accepted)
            try:
                places = self._orders.places(accepted)
            except redis.ConnectionError:
                continue
            self.looks += 1
            self.homeless |= places.homeless(accepted)
        assert server.running


def _order(orders: Orders, dice: Random, folder: Path, number: int) -> None:
    """A few tasks of mixed kinds."""
    orders.send_many(4, "note")
    orders.send("sleep", seconds=dice.choice([0.05, 0.3, 1.0, 4.0]), max_crashes=20)
    orders.send("fail_times", n=dice.randrange(3), max_attempts=2, retry=SOON)
    orders.send("note", delay_ms=dice.randrange(3000))
    if number % 4 == 0:
        orders.send("crash_once", path=str(folder / f"crashed-{number}"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_task_is_ever_nowhere_and_each_is_over_once(
    start_supervisor: SupervisorStarter,
    start_proxy: ProxyStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
    seed: int,
) -> None:
    gremlin = Gremlin(seed, fresh_redis)
    sites = []
    for _ in range(2):
        proxy = start_proxy(fresh_redis.port)

        def start(url: str = proxy.url) -> SupervisorProcess:
            return start_supervisor(server=fresh_redis, procs=3, flags=FLAGS, url=url)

        sites.append(Site(start(), proxy, start, []))
    for site in sites:
        site.pool.wait_ready(30)
    with Conservation(orders) as watched:
        for number in paced(BEAT_S, LASTING_S):
            try:
                _order(orders, gremlin.dice, tmp_path, number)
            except BrokerUnavailable:
                continue  # its ids were not accepted
            gremlin.strike(gremlin.dice.choice(sites))
        for site in sites:
            gremlin.mend(site)
        orders.wait(orders.accepted, 90.0)
    print(f"{len(orders.accepted)} tasks, {watched.looks} looks, {dict(gremlin.deeds)}")
    print(dict(orders.statuses(orders.accepted)), f"refused outcomes: {witness.refusals().total()}")
    assert watched.looks > 100
    assert watched.homeless == set()
    places = orders.places(orders.accepted)
    assert {places.status(task_id) for task_id in orders.accepted} <= TERMINAL
    orders.check(witness)
    for site in sites:
        until(lambda site=site: len(site.pool.child_pids()) == 3, 20.0, site.pool.describe)  # type: ignore[misc]
        assert site.pool.exit_code is None
