"""Replies that are lost, errors that pass, servers that change places: nothing runs unheard, nothing counts
twice, and everybody works again within 5 s (R10, R14)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from dtq_child.errors import BrokerUnavailable
from dtq_child.keys import Keys
from dtq_child.retry import RetryPolicy
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import defaults
from dtq_child.task import Status
from tests.conftest import ProxyStarter, ServerStarter, SupervisorStarter
from tests.outage.stage import Orders, Pool, paced, work_again
from tests.support.ledger import Ledger
from tests.support.proxy import FaultProxy
from tests.support.rule import Words
from tests.support.servers import RedisServer
from tests.support.waiting import until
from tests.support.witness import Witness

SOON = RetryPolicy(base_s=0.1, factor=1.0, cap_s=1.0, jitter=0.0).to_json()
SCRIPTS = Scripts(Keys("dtq:"), Constants.of(defaults()))
"""As supervisors and producers have them that are told nothing else."""

AT_ONCE = {"repl-diskless-sync-delay": "0"}
"""A replica is served as soon as it asks."""

PASSING = {
    "readonly": b"-READONLY You can't write against a read only replica.",
    "err readonly": b"-ERR READONLY You can't write against a read only replica.",
    "loading": b"-LOADING Redis is loading the dataset in memory",
    "masterdown": b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "tryagain": b"-TRYAGAIN Multiple keys request during rehashing of slot",
    "clusterdown": b"-CLUSTERDOWN The cluster is down",
    "misconf": b"-MISCONF Redis is configured to save RDB snapshots, but cannot.",
    "busy": b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
}


def _loading(proxy: FaultProxy) -> None:
    proxy.answer(lambda words: True, PASSING["loading"])


def _dark(proxy: FaultProxy) -> None:
    proxy.black_hole(existing=True, new=True)


def _refused(proxy: FaultProxy) -> None:
    proxy.refuse()
    proxy.cut()


FAULTS = {"loading": _loading, "dark": _dark, "refused": _refused}


@pytest.fixture
def proxy(start_proxy: ProxyStarter, fresh_redis: RedisServer) -> FaultProxy:
    return start_proxy(fresh_redis.port)


def calls_of(*names: str, share: float = 1.0, seed: int = 1) -> Callable[[Words], bool]:
    """Matches calls of these scripts, or that share of them by chance."""
    shas = {SCRIPTS.sha(name).encode() for name in names}
    dice = Random(seed)
    return lambda words: len(words) > 1 and words[1] in shas and dice.random() < share


def judges(words: Words) -> bool:
    """A call of the reaper that may take running tasks over."""
    if len(words) < 2 or words[1] != SCRIPTS.sha("reap").encode():
        return False
    arguments = words[3 + int(words[2]) :]
    return arguments[5] != b""


# -- lost replies


def test_replies_lost_to_children_under_load_cost_no_task_and_count_none_twice(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
) -> None:
    """A claim that was not heard is no start: what it took is found under the child's own name."""
    pool = Pool(start_supervisor(server=fresh_redis, procs=3, url=proxy.url).wait_ready())
    lost = proxy.drop_reply(calls_of("settle_and_claim", share=0.12), count=30)
    good = orders.send_many(400, "note")
    failing = orders.send_many(100, "fail_times", n=1, max_attempts=2, retry=SOON)
    orders.wait([*good, *failing], 60.0, Status.SUCCEEDED)
    until(lambda: lost.fired == 30, 20.0, lambda: f"{lost.fired} replies were lost")
    again = sum(orders.record(task_id).number("delivery") != 1 for task_id in good)
    assert again > 0, "no claim was cut"
    assert orders.all_starts(good) == {1}
    assert orders.all_starts(failing) == {2}
    orders.check(witness)
    pool.is_the_same()


@pytest.mark.slow
def test_requests_lost_by_children_under_load_are_made_good(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
) -> None:
    pool = Pool(start_supervisor(server=fresh_redis, procs=3, url=proxy.url).wait_ready())
    lost = proxy.drop_request(calls_of("settle_and_claim", share=0.2), count=20)
    ids = orders.send_many(200, "note")
    orders.wait(ids, 30.0, Status.SUCCEEDED)
    until(lambda: lost.fired == 20, 20.0, lambda: f"{lost.fired} requests were lost")
    assert orders.all_starts(ids) == {1}
    orders.check(witness)
    pool.is_the_same()


def test_replies_lost_to_producers_make_no_duplicates(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    ledger: Ledger,
    witness: Witness,
) -> None:
    with Orders(fresh_redis, ledger, url=proxy.url) as orders:
        lost = proxy.drop_reply(calls_of("enqueue", share=0.3), count=30)
        for number in range(80):
            orders.send("note", value=number)
        for _ in range(20):
            orders.send_many(10, "note")
        assert lost.fired == 30
        assert orders.places().depth() == len(orders.accepted) == 280
        start_supervisor(server=fresh_redis, procs=2).wait_ready()
        orders.wait(orders.accepted, 20.0, Status.SUCCEEDED)
        assert orders.all_starts(orders.accepted) == {1}
        orders.check(witness)


def test_replies_lost_to_the_supervisor_cost_no_task_and_judge_none_twice(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    """Heartbeats, settled deaths, what was reaped, what was promoted: each was done, and nobody heard it."""
    flags = ["--visibility-timeout", "2", "--heartbeat-interval", "0.8"]
    dead = start_supervisor(server=fresh_redis, procs=2, flags=flags).wait_ready()
    reaped = orders.send_many(2, "hang_first", seconds=60.0)
    orders.all_started(reaped)
    dead.kill()
    until(lambda: min(pending.idle_ms for pending in orders.places().pending) > 2000, 10)

    lost = {
        name: proxy.drop_reply(calls_of(name), count=3)
        for name in (
            "heartbeat",
            "presence",
            "settle_dead",
            "promote_claim",
            "promote_add",
            "lead",
            "inflight",
        )
    }
    lost["reap"] = proxy.drop_reply(judges)
    start_supervisor(server=fresh_redis, procs=4, flags=flags, url=proxy.url).wait_ready(30)
    long = orders.send("sleep", seconds=5.0)
    crashed = orders.send("crash_once", path=str(tmp_path / "crashed"))
    delayed = [orders.send("note", delay_ms=200 * number) for number in range(1, 16)]
    orders.wait(orders.accepted, 40.0, Status.SUCCEEDED)
    assert {name: rule.fired for name, rule in lost.items()} == {**dict.fromkeys(lost, 3), "reap": 1}
    assert [orders.record(task_id).number("crashes") for task_id in [*reaped, crashed, long]] == [1, 1, 1, 0]
    assert list(orders.starts([*reaped, crashed, long]).values()) == [2, 2, 2, 1]
    assert orders.all_starts(delayed) == {1}
    orders.check(witness)


def test_a_stop_whose_replies_are_lost_loses_nothing_else(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
) -> None:
    """What was running is given back, the lock is free, nobody waits for a lease."""
    flags = ["--shutdown-grace", "0.5"]
    stops = start_supervisor(server=fresh_redis, procs=2, flags=flags, url=proxy.url).wait_ready()
    ids = orders.send_many(2, "hang_first", seconds=60.0)
    orders.all_started(ids)
    until(lambda: fresh_redis.cli("GET", "dtq:lock:scheduler") is not None, 5)
    names = ("resign", "release", "settle_dead", "farewell")
    lost = {name: proxy.drop_reply(calls_of(name)) for name in names}
    begun = time.monotonic()
    assert stops.stop(10.0) == 1
    assert time.monotonic() - begun < 5.0
    assert lost["settle_dead"].fired + lost["release"].fired >= 1
    assert (lost["resign"].fired, lost["farewell"].fired) == (1, 1)
    assert fresh_redis.cli("GET", "dtq:lock:scheduler") is None
    assert orders.statuses(ids) == {Status.QUEUED: 2}
    start_supervisor(server=fresh_redis, procs=2).wait_ready()
    orders.wait(ids, 5.0, Status.SUCCEEDED)
    assert {orders.record(task_id).number("crashes") for task_id in ids} == {0}
    orders.check(witness)


# -- errors that pass


@pytest.mark.parametrize(
    ("kinds", "lasting"),
    [
        (["err readonly", "loading"], 1.0),
        pytest.param(list(PASSING), 20.0, marks=pytest.mark.slow),
    ],
    ids=["briefly", "long"],
)
def test_errors_that_pass_are_waited_out(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
    kinds: list[str],
    lasting: float,
) -> None:
    pool = Pool(start_supervisor(server=fresh_redis, procs=3, url=proxy.url).wait_ready())
    for kind in kinds:
        running = orders.send("sleep", seconds=0.5)
        orders.started(running)
        proxy.answer(lambda words: True, PASSING[kind])
        waiting = orders.send_many(10, "note")
        begun = time.monotonic()
        until(lambda begun=begun: time.monotonic() - begun > lasting, lasting + 5.0)  # type: ignore[misc]
        proxy.heal()
        took = work_again([pool], orders, tmp_path, time.monotonic())
        orders.wait([running, *waiting], 5.0, Status.SUCCEEDED)
        print(f"{kind}: everybody works again after {took:.1f} s")
    orders.check(witness)
    assert orders.all_starts(orders.accepted) == {1}


def test_a_producer_is_told_in_time(fresh_redis: RedisServer, proxy: FaultProxy, ledger: Ledger) -> None:
    with Orders(fresh_redis, ledger, url=proxy.url, enqueue_timeout_s=1.0) as orders:
        orders.send("note")
        for fault in FAULTS.values():
            fault(proxy)
            begun = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                orders.send("note")
            assert time.monotonic() - begun < 1.0 + 0.5
            proxy.heal()
            proxy.cut()
            orders.send("note")
        assert orders.places().depth() == len(orders.accepted) == 4


@pytest.mark.parametrize(
    "stale", ["yes", pytest.param("no", marks=pytest.mark.slow)], ids=["READONLY", "MASTERDOWN"]
)
def test_a_primary_that_is_a_replica_for_a_while(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    tmp_path: Path,
    stale: str,
) -> None:
    pool = Pool(start_supervisor(server=fresh_redis, procs=3).wait_ready())
    fresh_redis.cli("CONFIG", "SET", "replica-serve-stale-data", stale)
    waiting = orders.send_many(20, "sleep", seconds=0.2)
    orders.all_started(waiting[:3])
    fresh_redis.cli("REPLICAOF", "127.0.0.1", "1")
    demoted = time.monotonic()
    until(lambda: time.monotonic() - demoted > 2.0, 5)
    fresh_redis.cli("REPLICAOF", "NO", "ONE")
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait(waiting, 10.0, Status.SUCCEEDED)
    orders.check()
    assert orders.all_starts(orders.accepted) == {1}


@pytest.mark.slow
def test_after_a_failover_everybody_finds_the_new_primary(
    start_supervisor: SupervisorStarter,
    start_redis: ServerStarter,
    start_proxy: ProxyStarter,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """The address stays, another server answers there; the old one lives on, as its replica."""
    old, new = (start_redis(settings=AT_ONCE) for _ in range(2))
    proxy = start_proxy(old.port)
    new.cli("REPLICAOF", "127.0.0.1", old.port)
    until(lambda: new.info("replication").get("master_link_status") == "up", 15)
    supervisor = start_supervisor(server=old, procs=3, url=proxy.url).wait_ready()
    pool = Pool(supervisor)
    with Orders(old, ledger) as before:
        running = before.send("sleep", seconds=2.0)
        before.started(running)
        waiting = before.send_many(30, "sleep", seconds=0.2)
        old.cli("WAIT", 1, 5000, timeout=10)

    proxy.retarget(new.port)
    old.cli("CLIENT", "PAUSE", 500, "WRITE")
    until(lambda: _caught_up(old, new), 5)
    new.cli("REPLICAOF", "NO", "ONE")
    old.cli("REPLICAOF", "127.0.0.1", new.port)
    switched = time.monotonic()
    supervisor.server = new
    with Orders(new, ledger) as orders:
        work_again([pool], orders, tmp_path, switched)
        orders.wait([running, *waiting], 10.0, Status.SUCCEEDED)
        orders.check(ids=[running, *waiting, *orders.accepted])
        assert len(ledger.starts(running)) == 1


def test_a_failover_that_lost_the_latest_writes_goes_on_from_those_it_kept(
    start_supervisor: SupervisorStarter,
    start_redis: ServerStarter,
    start_proxy: ProxyStarter,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """For the new primary tasks wait that are running, or run that are over. Each ends there, once."""
    old, new = (start_redis(settings=AT_ONCE) for _ in range(2))
    proxy = start_proxy(old.port)
    new.cli("REPLICAOF", "127.0.0.1", old.port)
    until(lambda: new.info("replication").get("master_link_status") == "up", 15)
    flags = ["--visibility-timeout", "3", "--heartbeat-interval", "1"]
    supervisor = start_supervisor(server=old, procs=3, flags=flags, url=proxy.url).wait_ready()
    with Orders(old, ledger) as before:
        ids = before.send_many(40, "sleep", seconds=0.1)
        ids += before.send_many(10, "fail_times", n=1, max_attempts=2, retry=SOON)
        ids += before.send_many(10, "note", delay_ms=700)
        before.all_started(ids[:6])
        old.cli("WAIT", 1, 5000, timeout=10)
        new.cli("REPLICAOF", "NO", "ONE")
        before.all_started(ids[:25])

    with Orders(new, ledger) as orders, Witness(new) as witness:
        proxy.retarget(new.port)
        old.stop()
        switched = time.monotonic()
        supervisor.server = new
        orders.wait(ids, 30.0, Status.SUCCEEDED)
        print(f"all over {time.monotonic() - switched:.1f} s after the switch")
        endings = witness.endings()
        assert max(endings.values()) == 1
        work_again([Pool(supervisor.wait_ready())], orders, tmp_path, time.monotonic())
        orders.check(ids=[*ids, *orders.accepted])


def _caught_up(old: RedisServer, new: RedisServer) -> bool:
    return old.info("replication")["master_repl_offset"] == new.info("replication")["slave_repl_offset"]


# -- outages


@pytest.mark.parametrize(
    "fault", ["refused", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dark", "loading"))]
)
def test_a_supervisor_that_starts_while_redis_is_away_waits_for_it(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
    fault: str,
) -> None:
    waiting = orders.send_many(20, "note")
    FAULTS[fault](proxy)
    supervisor = start_supervisor(server=fresh_redis, procs=2, url=proxy.url)
    until(lambda: len(supervisor.child_pids()) == 2 or "not available" in supervisor.log(), 20)
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > 2.0, 5)
    proxy.heal()
    healed = time.monotonic()
    supervisor.wait_ready(30)
    orders.wait(waiting, 20.0, Status.SUCCEEDED)
    print(f"{fault}: everything has run {time.monotonic() - healed:.1f} s after Redis came")
    work_again([Pool(supervisor)], orders, tmp_path, time.monotonic())
    orders.check(witness)


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [10.0, 60.0])
def test_an_outage_costs_little_and_ends_for_all_at_once(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    tmp_path: Path,
    lasting: float,
) -> None:
    pool = Pool(start_supervisor(server=fresh_redis, procs=8).wait_ready(30))
    processes = [psutil.Process(pid) for pid in pool.before]
    fresh_redis.stop()
    begun, before = time.monotonic(), [_cpu(process) for process in processes]
    until(lambda: time.monotonic() - begun > lasting, lasting + 5.0)
    burnt = [_cpu(process) - past for process, past in zip(processes, before, strict=True)]
    fresh_redis.start()
    took = work_again([pool], orders, tmp_path, time.monotonic())
    shares = sorted(100 * seconds / lasting for seconds in burnt)
    print(f"CPU: supervisor {100 * burnt[0] / lasting:.1f} %, at most {shares[-1]:.1f} %; back {took:.1f} s")
    assert shares[-1] < 4.0, shares
    lines = pool.said()
    assert len(lines) < 60 + 2 * lasting, "\n".join(lines)
    orders.check()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
def test_three_outages_within_two_seconds(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    proxy: FaultProxy,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    pool = Pool(start_supervisor(server=fresh_redis, procs=3, url=proxy.url).wait_ready())
    waiting = orders.send_many(300, "note")
    for _ in paced(0.6, 1.8):
        proxy.refuse()
        proxy.cut()
        proxy.heal()
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait(waiting, 10.0, Status.SUCCEEDED)
    orders.check(witness)
