"""A network that swallows everything without a sign: nobody is taken for dead because of it (R29, R30)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtq_child.task import Status
from tests.conftest import ProxyStarter, SupervisorStarter
from tests.outage.stage import AGAIN_S, Orders, Pool, ready, work_again
from tests.support.proxy import FaultProxy
from tests.support.servers import RedisServer
from tests.support.waiting import until
from tests.support.witness import Witness

REPLY_TIMEOUT_S = 5.0
BLOCK_S = 0.5
SHORT_LEASES = ["--visibility-timeout", "3", "--heartbeat-interval", "1"]
SHORTER_LEASES = ["--visibility-timeout", "2", "--heartbeat-interval", "0.7"]


def passes(seconds: float) -> None:
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > seconds, seconds + 5.0, interval=0.1)


@pytest.fixture
def proxy(start_proxy: ProxyStarter, fresh_redis: RedisServer) -> FaultProxy:
    return start_proxy(fresh_redis.port)


@pytest.mark.parametrize(
    ("flags", "dark_s", "task_s", "held"),
    [
        pytest.param(SHORTER_LEASES, 6.0, 9.0, (False, True), id="quick"),
        pytest.param(SHORT_LEASES, 12.0, 20.0, (False, True), id="short leases", marks=pytest.mark.slow),
        pytest.param(
            [], 60.0, 120.0, (False, False), id="default settings, all lost", marks=pytest.mark.slow
        ),
        pytest.param([], 60.0, 120.0, (True, True), id="default settings, all late", marks=pytest.mark.slow),
    ],
)
def test_tasks_that_outlast_a_black_hole_have_one_start_each(
    start_supervisor: SupervisorStarter,
    start_proxy: ProxyStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
    flags: Sequence[str],
    dark_s: float,
    task_s: float,
    held: Sequence[bool],
) -> None:
    """For both supervisors Redis is away for longer than a lease; for Redis all leases have run out.

    What one of them sent into the hole comes out late if its bytes are `held`, else never."""
    proxies = [start_proxy(fresh_redis.port) for _ in held]
    started = [start_supervisor(server=fresh_redis, procs=4, flags=flags, url=proxy.url) for proxy in proxies]
    pools = [Pool(supervisor) for supervisor in ready(*started)]
    ids = orders.send_many(8, "sleep", seconds=task_s)
    orders.all_started(ids)
    # Two heartbeats at least: each believes its own hearing.
    passes(2.5 if flags else 0.0)
    for proxy, hold in zip(proxies, held, strict=True):
        proxy.black_hole(existing=True, new=True, hold=hold)
    passes(dark_s)
    assert {entry.word for task_id in ids for entry in orders.ledger.notes(task_id)} == {"start"}
    for proxy in proxies:
        proxy.heal()
    healed = time.monotonic()
    orders.wait(ids, task_s + 20.0, Status.SUCCEEDED)
    assert orders.all_starts(ids) == {1}
    records = [orders.record(task_id) for task_id in ids]
    assert {(record.number("crashes"), record.number("delivery")) for record in records} == {(0, 1)}
    for pool in pools:
        pool.is_the_same()
    print(f"all over {time.monotonic() - healed:.1f} s after the black hole")
    work_again(pools, orders, tmp_path, time.monotonic())
    orders.check(witness)
    assert not witness.refusals()


@pytest.mark.slow
def test_existing_connections_that_go_dumb_are_given_up(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    """As a firewall does that has forgotten them: no reset, and nothing wrong with new ones."""
    pool = Pool(start_supervisor(server=fresh_redis, procs=3, url=proxy.url).wait_ready())
    proxy.black_hole(existing=True, new=False)
    took = work_again([pool], orders, tmp_path, time.monotonic(), within=REPLY_TIMEOUT_S + BLOCK_S + AGAIN_S)
    print(f"everybody works again after {took:.1f} s")
    orders.check(witness)


@pytest.mark.slow
def test_an_outcome_from_behind_a_black_hole_is_refused_if_another_has_it_again(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
) -> None:
    """Only one of two supervisors is cut off: for the other it is silent, and so dead."""
    cut_off = start_supervisor(server=fresh_redis, procs=2, flags=SHORT_LEASES, url=proxy.url).wait_ready()
    ids = orders.send_many(2, "hang_first", seconds=6.0)
    orders.all_started(ids)
    start_supervisor(server=fresh_redis, procs=2, flags=SHORT_LEASES).wait_ready()
    pool = Pool(cut_off)
    proxy.black_hole(existing=True, new=True)
    orders.wait(ids, 15.0, Status.SUCCEEDED)
    until(lambda: all(orders.ledger.ends(task_id)[1:] for task_id in ids), 15.0, "the first ones still run")
    proxy.heal()
    until(lambda: witness.refusals() == dict.fromkeys(ids, 1), 15.0, lambda: f"{witness.refusals()}")
    assert [orders.result(task_id) for task_id in ids] == [2, 2]
    assert orders.all_starts(ids) == {2}
    orders.check(witness)
    pool.is_the_same()
