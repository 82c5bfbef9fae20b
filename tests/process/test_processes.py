"""Exits are learnt from the kernel, each once, with the right owner; nobody else is ever signalled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stand import Stand, gone
from tests.support.processes import look
from tests.support.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with Stand(tmp_path) as made:
        yield made


def test_a_child_killed_from_outside_is_noticed_at_once(stand: Stand) -> None:
    stand.template_of("idle")
    pid = stand.birth()

    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    end = stand.end_of()
    assert time.monotonic() - killed < 0.5
    assert (end["pid"], end["code"], end["signal"]) == (pid, None, signal.SIGKILL)
    found = stand.cause(slot=0)
    assert (found["killed_by"], found["phase"]) == ("unknown sender", "ready")
    assert found["max_rss_bytes"] > 1024 * 1024
    assert look(pid) is None, "a zombie"


def test_a_handler_that_ends_its_process_is_told_by_its_code(tmp_path: Path) -> None:
    with Stand(tmp_path, code=11) as stand:
        stand.template_of("leaves")
        stand.fork(generation=1, slot=0, life=1)

        assert stand.end_of()["code"] == 11
        assert stand.cause(slot=0)["killed_by"] == "itself: os._exit, or another program in its place"


def test_a_kill_of_ours_has_our_reason(stand: Stand) -> None:
    stand.template_of("executes")
    stand.birth(phase=3)
    stand.kill_group(slot=0, life=1)
    stand.end_of()

    found = stand.cause(slot=0, verdict="timeout")

    assert found["killed_by"] == "dtq: hard timeout"
    assert (found["signal"], found["phase"]) == ("SIGKILL", "executing")


def test_every_one_of_a_hundred_random_kills_is_noticed_once(stand: Stand) -> None:
    """All slots at the same instant, or one of them; each is refilled and dies again."""
    dice = random.Random(3)
    stand.template_of("idle")
    stand.message("imported")
    lives = dict.fromkeys(range(4), 0)
    pids: dict[int, int] = {}
    killed: list[tuple[int, int, int]] = []
    for slot in lives:
        pids[slot] = stand.birth(slot=slot, life=0)
    while len(killed) < 100:
        victims = list(lives) if dice.random() < 0.3 else [dice.choice(list(lives))]
        for slot in victims:
            os.kill(pids[slot], signal.SIGKILL)
            killed.append((slot, lives[slot], pids[slot]))
        for slot in victims:
            stand.end_of(slot, lives[slot])
            lives[slot] += 1
            pids[slot] = stand.birth(slot=slot, life=lives[slot])

    ended = [(end["slot"], end["life"], end["pid"]) for end in stand.ended()]
    assert sorted(ended) == sorted(killed)
    assert {end["signal"] for end in stand.ended()} == {signal.SIGKILL}
    assert [process for process in stand.tree() if process.status == "zombie"] == []
    assert len(stand.children()) == 4


def test_a_busy_main_loop_misses_no_exit(stand: Stand) -> None:
    stand.template_of("idle")
    pids = [stand.birth(slot=slot) for slot in range(4)]
    burning = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    stand.burn(seconds=0.3)
    assert time.monotonic() - burning >= 0.3

    until(lambda: len(stand.ended()) == 4, 2)
    assert sorted(end["pid"] for end in stand.ended()) == sorted(pids)


def test_a_thousand_orphans_are_collected_and_taken_for_nobody_else(tmp_path: Path) -> None:
    """They end with every exit code there is, those of children with a meaning included."""
    with Stand(tmp_path, number=250, times=4) as stand:
        stand.template_of("daemons")
        pid = stand.birth()
        stand.told("spawned")

        until(lambda: stand.strangers() >= 1000, 30, lambda: f"{stand.strangers()}, {len(stand.living())}")
        until(lambda: len(stand.living()) == 2, 10, lambda: str(stand.tree()))

        assert stand.ended() == []
        assert stand.children() == {"0.1": pid}
        stand.kill_group(slot=0, life=1)
        assert stand.end_of()["signal"] == signal.SIGKILL


def test_nobody_is_signalled_after_its_exit_was_collected(stand: Stand) -> None:
    stand.template_of("idle")
    pid = stand.birth()
    stand.kill_group(slot=0, life=1)
    stand.end_of()
    assert look(pid) is None

    assert stand.kill_group(slot=0, life=1) is False
    assert stand.signal(slot=0, life=1, number=signal.SIGKILL) is False
    assert stand.kill_group(slot=3, life=1) is False


def test_a_status_that_somebody_else_took_is_an_exit_without_one(stand: Stand) -> None:
    stand.template_of("idle")
    pid = stand.birth()

    stand.steal(slot=0, life=1)

    end = stand.end_of()
    assert (end["pid"], end["code"], end["signal"]) == (pid, None, None)
    assert stand.children() == {}
    assert stand.birth(life=2) != pid


def test_a_stranger_waits_for_reports_a_second_and_known_exits_do_not_wait_for_it(stand: Stand) -> None:
    """A template that stands still may have forked somebody whom it has not reported."""
    template = stand.template_of("helped")
    stand.fork(generation=1, slot=0, life=1)
    _, away = json.loads(stand.told("helpers"))
    stand.kill_group(slot=0, life=1)
    stand.end_of()  # now its helper in another session is ours
    before = stand.strangers()
    stand.template_of("idle", generation=2)
    child = stand.birth(slot=1, generation=2)
    os.kill(template, signal.SIGSTOP)
    stand.fork(generation=1, slot=2, life=1)

    os.kill(away, signal.SIGKILL)
    orphaned = time.monotonic()
    until(lambda: (found := look(away)) and found.status == "zombie", 2)
    os.kill(child, signal.SIGKILL)

    assert stand.end_of(slot=1)["signal"] == signal.SIGKILL
    assert time.monotonic() - orphaned < 0.8
    assert stand.strangers() == before, "it must have waited"
    until(lambda: stand.strangers() == before + 1, 3)
    assert time.monotonic() - orphaned > 0.9
    os.kill(template, signal.SIGCONT)
    stand.told("helpers", slot=2)
    stand.kill_group(slot=2, life=1)
    stand.end_of(slot=2)
    until(lambda: stand.kill_strangers() == 0, 5)


def test_everybody_is_found_at_the_end(tmp_path: Path) -> None:
    """Helpers with sessions of their own, whose parents are dead."""
    with Stand(tmp_path, ends=True) as stand:
        stand.template_of("helped")
        away = []
        for life in range(5):
            stand.fork(generation=1, slot=0, life=life)
            away.append(json.loads(stand.told("helpers", 0, life))[1])
            stand.end_of(0, life)
        assert not any(map(gone, away))

        assert stand.kill_strangers() == 5

        until(lambda: all(map(gone, away)), 2)
        until(lambda: stand.kill_strangers() == 0 and len(stand.living()) == 1, 2)


def test_a_child_out_of_memory_was_killed_by_the_kernel(tmp_path: Path) -> None:
    group = memory_group("256M")
    try:
        with Stand(tmp_path, cgroup=str(group)) as stand:
            # The watch looks at the group that its own process is in.
            (group / "cgroup.procs").write_text(str(stand.pid))
            stand.watch_memory()
            stand.template_of("eats")
            stand.fork(generation=1, slot=0, life=1)

            assert stand.end_of(timeout=30)["signal"] == signal.SIGKILL

            found = stand.cause(slot=0)
            assert found["killed_by"] == "kernel: out of memory (certain)"
            assert found["out_of_memory"]["source"].startswith(str(group))
            assert not gone(stand.pid), "children go first"
    finally:
        until(lambda: (group / "cgroup.procs").read_text() == "", 5)
        group.rmdir()


def memory_group(limit: str) -> Path:
    """A control group of our own, below the one that we are in; skips where that is not allowed."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            version = "memory" if controllers else ""
            group = Path("/sys/fs/cgroup", version) / path.lstrip("/") / f"dtq-test-{os.getpid()}"
            try:
                group.mkdir()
                (group / ("memory.limit_in_bytes" if controllers else "memory.max")).write_text(limit)
            except OSError:
                if group.exists():
                    group.rmdir()
                continue
            return group
    pytest.skip("no memory control group of our own")


def test_a_supervisor_may_be_the_first_process_of_a_namespace(tmp_path: Path) -> None:
    """Every orphan of a container is its child."""
    namespace = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespace of our own")

    with Stand(tmp_path, within=namespace, number=100, times=2) as stand:
        stand.template_of("daemons")
        stand.birth()
        stand.told("spawned")
        stand.template_of("tells", generation=2)
        pid = stand.birth(slot=1, generation=2)

        about = json.loads(stand.told("about", slot=1))
        assert (about["ppid"], about["pid"], about["pgid"]) == (1, pid, pid)
        until(lambda: stand.strangers() >= 200, 20, lambda: f"{stand.strangers()}, {stand.living()}")
        assert stand.ended() == []
        assert stand.kill_everybody() == 2
        until(lambda: len(stand.ended()) == 2, 5)
