"""A template imports the application once and makes children that are the supervisor's own."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtq_child import protocol
from dtq_child.signals import DUMP_SIGNAL, OPERATOR_SIGNALS, SOFT_SIGNAL
from tests.process.stand import ROOT, Stand, gone
from tests.support.processes import descriptors, group_members, look
from tests.support.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with Stand(tmp_path) as made:
        yield made


def app(stand: Stand, code: str, name: str = "other") -> str:
    """An application with that code in its module, besides an App."""
    (stand.folder / f"{name}.py").write_text(f"from dtq_child import App\napp = App()\n{code}\n")
    return f"{name}:app"


# -- the import


def test_it_says_hello_and_what_it_has_imported(stand: Stand) -> None:
    pid = stand.template_of("idle")

    imported = stand.message("imported")

    assert [message["kind"] for message in stand.said()] == ["hello", "imported"]
    assert stand.said(kind="hello") == [{"kind": "hello", "protocol": 1, "pid": pid}]
    assert (imported["threads"], imported["sockets"]) == ([], [])
    assert imported["task_types"]["shop.work"]["queue"] == "default"
    assert 0 < imported["seconds"] < 10
    process = look(pid)
    assert process is not None
    assert (process.title, process.ppid, process.pgid) == ("dtq-supervisor: template g1", stand.pid, pid)
    assert descriptors(pid)[0] == "/dev/null"


@pytest.mark.parametrize(
    ("code", "error_class", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError", "nothing_of_this_name"),
        ("def (", "SyntaxError", "invalid syntax"),
        ("raise SystemExit('no licence')", "SystemExit", "no licence"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("app = 7", "BadConfiguration", "that is a int, no dtq_child.App; make one there"),
        ("shop, app = app, None", "BadConfiguration", "do you mean other:shop?"),
        ("app = App(key_prefix='mine:')", "BadConfiguration", "key_prefix='mine:'"),
    ],
)
def test_an_import_that_fails_is_told_with_its_traceback(
    stand: Stand, code: str, error_class: str, message: str
) -> None:
    stand.template_of("idle", app=app(stand, code))

    failed = stand.message("import_failed")

    assert failed["error_class"] == error_class
    assert message in failed["message"]
    assert "Traceback (most recent call last):" in failed["traceback"]
    assert stand.end(generation=1)["code"] == 4


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("nowhere:app", "there is no module 'nowhere'"),
        ("shop.nowhere:app", "no module 'shop.nowhere'"),
        ("shop:nothing", "do you mean shop:app?"),
    ],
)
def test_a_wrong_name_is_told_with_the_fix(stand: Stand, name: str, fix: str) -> None:
    stand.template_of("idle", app=name)

    failed = stand.message("import_failed")

    assert failed["error_class"] == "BadConfiguration"
    assert fix in failed["message"]


def test_a_long_traceback_and_many_tasks_arrive_whole(stand: Stand) -> None:
    """Each is more than a packet holds."""
    code = (
        "def deep(n):\n    return n and deep(n - 1) or 1 / 0\n"
        "try:\n    deep(400)\nexcept ZeroDivisionError as e:\n    raise ValueError('x' * 100_000) from e"
    )
    stand.template_of("idle", app=app(stand, code))
    failed = stand.message("import_failed")
    assert failed["error_class"] == "ValueError"
    assert "ZeroDivisionError" in failed["traceback"]

    many = "for n in range(4000):\n    app.task(name=f'shop.task-{n:04}')(lambda: None)"
    stand.template_of("idle", generation=2, app=app(stand, many, "many"))
    assert len(stand.message("imported")["task_types"]) == 4000


def test_an_import_that_crashes_ends_the_template_alone(stand: Stand) -> None:
    stand.template_of("idle", app=app(stand, "import ctypes; ctypes.string_at(0)"))

    assert stand.end(generation=1)["signal"] == signal.SIGSEGV
    assert stand.template(generation=1)["gone"] == "it closed its socket"
    assert stand.said(kind="imported") == []

    stand.template_of("idle", generation=2)
    assert stand.birth(generation=2)


def test_an_import_that_hangs_ends_with_the_supervisor(stand: Stand) -> None:
    pid = stand.template_of("idle", app=app(stand, "sum(__import__('itertools').repeat(0, 10**15))"))
    stand.message("hello")
    until(lambda: (found := look(pid)) and "template" in found.title, 10)

    stand.die()

    until(lambda: gone(pid), 2)


def test_an_import_may_change_every_signal_handler(stand: Stand) -> None:
    """Nobody's TERM ends a template or a child."""
    code = "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_DFL)"
    pid = stand.template_of("signalled", app=app(stand, code))
    stand.message("imported")
    child = stand.birth()

    for number in OPERATOR_SIGNALS:
        os.kill(pid, number)
        os.kill(child, number)

    stand.signal(slot=0, life=1, number=SOFT_SIGNAL)
    stand.told("soft")
    assert stand.birth(slot=1) != child
    assert not gone(pid)
    assert not gone(child)


def test_a_template_leaves_a_supervisor_of_another_version_alone() -> None:
    ours, theirs = protocol.socketpair()
    ours.setblocking(True)
    ours.settimeout(30)
    command = [sys.executable, "-m", "dtq_child.template", "--fd", str(theirs.fileno())]
    template = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
    theirs.close()
    ours.send(b'{"kind": "hello", "protocol": 99, "news": [1, 2, 3]}')

    assert json.loads(ours.recv(1000)) == {"kind": "hello", "protocol": 1, "pid": template.pid}
    assert ours.recv(1000) == b"", "it says no more"
    assert template.wait(timeout=10) == 0
    ours.close()


def test_a_template_of_another_version_is_refused(stand: Stand) -> None:
    program = (
        "import socket, sys\n"
        "sock = socket.socket(fileno=int(sys.argv[2]))\n"
        "sock.recv(100_000)\n"
        'sock.send(b\'{"kind": "hello", "protocol": 2, "news": true}\')\n'
        "sock.recv(1)\n"
    )
    imposter(stand, program)

    reason = until(lambda: stand.template(generation=1)["gone"], 10)

    assert reason.startswith("dtq was upgraded, restart the service")


@pytest.mark.parametrize(
    "sent", [b"\x80\x02}q", b"[]", b'{"kind": "forked", "slot": "0"}', b'{"kind": "dance"}', b".", b"+{"]
)
def test_garbage_is_noticed_and_kills_nobody_else(stand: Stand, sent: bytes) -> None:
    program = (
        "import socket, sys, time\n"
        "sock = socket.socket(fileno=int(sys.argv[2]))\n"
        'sock.send(b\'{"kind": "hello", "protocol": 1, "pid": 1}\')\n'
        f"sock.send({sent!r})\n"
        "sock.send(b'.{')\n"
        "time.sleep(3600)\n"
    )
    imposter(stand, program)

    reason = until(lambda: stand.template(generation=1)["gone"], 10)

    assert reason.startswith("it sent ")
    stand.kill_template(generation=1)
    assert stand.end(generation=1)["signal"] == signal.SIGKILL


def test_a_template_that_never_answers_holds_nobody_up(stand: Stand) -> None:
    imposter(stand, "import time; time.sleep(3600)")
    for life in range(2000):  # more than the socket takes
        stand.fork(generation=1, slot=0, life=life)

    stand.template_of("idle", generation=2)
    stand.message("imported")
    stand.birth(slot=1, generation=2)
    assert len(stand.template(generation=1)["unanswered"]) == 2000
    stand.kill_template(generation=1)
    stand.end(generation=1)


def imposter(stand: Stand, program: str) -> None:
    """A template that is none."""
    (stand.folder / "imposter.py").write_text(program)
    stand.start(generation=1, app="shop:app", command=["python3", str(stand.folder / "imposter.py")])


# -- children


def test_a_child_is_the_supervisor_s_own_and_holds_nothing_of_the_template(stand: Stand) -> None:
    stand.template_of("tells", visibility_timeout_s=40)
    stand.birth(slot=2, life=5)
    pid = stand.birth(slot=3, life=6)

    about = json.loads(stand.told("about", 3, 6))

    assert (about["pid"], about["ppid"], about["pgid"]) == (pid, stand.pid, pid)
    assert about["title"] == "dtq-child[3] g1: starting"
    assert about["context"] == [3, 6, 3, 1, "here-1-abcd"]
    assert (about["preloaded"], about["visibility"], about["tasks"]) == (True, 40, ["shop.work"])
    held = about["descriptors"]
    assert held.pop("0") == "/dev/null"
    # Lines of the log go where stderr does, through a description of their own that holds nothing up.
    heard = (held.pop("1"), held.pop("2"))
    held = {fd: where for fd, where in held.items() if where not in heard}
    assert held.pop(str(about["dump_fd"])) == "/memfd:dtq-stacks-3 (deleted)"
    # Before Python 3.13 a memory map keeps a descriptor of its own.
    assert set(held.values()) <= {"/memfd:dtq-scoreboard (deleted)"}
    assert stand.children() == {"2.5": stand.row(index=2)["pid"], "3.6": pid}


def test_a_child_runs_with_an_empty_mask_and_goes_first_when_memory_runs_out(stand: Stand) -> None:
    stand.template_of("tells")
    stand.birth()

    about = json.loads(stand.told("about"))

    assert about["mask"] == []
    # What Python itself ignores, so that a write to a closed pipe is an exception.
    assert set(about["ignored"]) <= {signal.SIGPIPE, signal.SIGXFSZ}
    assert about["oom_score_adj"] == min(1000, int(Path("/proc/self/oom_score_adj").read_text()) + 500)


def test_a_child_logs_by_the_handlers_that_the_application_has_set_up(stand: Stand) -> None:
    code = "import logging; logging.basicConfig(format='mine: %(message)s')"
    stand.template_of("tells", app=app(stand, code))
    stand.birth()
    stand.told("about")

    assert "mine: a child logs" in stand.log()


def test_what_the_application_opened_at_import_stays_open(stand: Stand) -> None:
    """Its number must not become somebody else's, a connection's say."""
    (stand.folder / "shop.py").write_text(
        "from dtq_child import App\napp = App()\nfile = open('written', 'a', buffering=1)\n"
    )
    stand.template_of("writes")
    for life in (1, 2):
        stand.fork(generation=1, slot=0, life=life)
        stand.end_of(0, life)

    assert (stand.folder / "written").read_text() == "child 1\nchild 2\n"


def test_what_stood_in_a_buffer_is_written_once(stand: Stand) -> None:
    stand.template_of("ends", app=app(stand, "print('unfinished line', end='')"))
    for life in (1, 2, 3):
        stand.fork(generation=1, slot=0, life=life)
        assert stand.end_of(0, life)["code"] == 0

    assert stand.log().count("unfinished line") == 1


def test_without_preload_each_child_imports_by_itself(stand: Stand) -> None:
    (stand.folder / "shop.py").write_text(
        "import os\nfrom dtq_child import App\napp = App()\nopen(f'imported-{os.getpid()}', 'w')\n"
    )
    stand.template_of("tells", preload=False)
    assert stand.message("imported")["task_types"] is None
    pids = [stand.birth(slot=0), stand.birth(slot=1)]

    about = json.loads(stand.told("about"))

    assert (about["preloaded"], about["modules"]) == (False, True)
    assert {path.name for path in stand.folder.glob("imported-*")} == {f"imported-{pid}" for pid in pids}


def test_without_preload_an_import_that_fails_ends_that_child(stand: Stand) -> None:
    stand.template_of("idle", app=app(stand, "raise ValueError('not today')"), preload=False)
    stand.message("imported")

    stand.fork(generation=1, slot=0, life=1)

    assert stand.end_of()["code"] == 4
    assert "ValueError: not today" in stand.log()


def test_a_child_that_raises_says_why_and_ends_with_70(stand: Stand) -> None:
    stand.template_of("finishes")  # without its option, a KeyError when it is an orphan; here: never
    stand.template_of("leaves", generation=2)
    stand.fork(generation=2, slot=0, life=1)

    assert stand.end_of()["code"] == 70
    assert "KeyError: 'code'" in stand.log()


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_child_started_dies_with_it(tmp_path: Path, ends: bool) -> None:
    """Killed or ended by itself. What made a session of its own lives until the supervisor stops."""
    with Stand(tmp_path, ends=ends) as stand:
        stand.template_of("helped")
        stand.fork(generation=1, slot=0, life=1)
        own, away = json.loads(stand.told("helpers"))
        if not ends:
            assert stand.kill_group(slot=0, life=1)
        end = stand.end_of()
        assert (end["code"], end["signal"]) == ((0, None) if ends else (None, signal.SIGKILL))

        until(lambda: gone(own), 2)
        assert not gone(away)
        assert stand.kill_group(slot=0, life=1) is False

        assert stand.kill_strangers() == 1
        until(lambda: stand.living() == [pid for pid in stand.living() if pid != away], 2)
        until(lambda: gone(away), 2)


# -- stacks


def test_a_child_that_holds_the_gil_in_c_code_shows_its_stack(stand: Stand) -> None:
    stand.template_of("executes")
    stand.birth(phase=3)

    dump = stand.dump(slot=0, life=1)

    assert "most recent call first" in dump["stack"]
    assert "in executes" in dump["stack"]
    assert dump["seconds"] < 0.25


def test_a_second_dump_takes_the_place_of_the_first(stand: Stand) -> None:
    stand.template_of("deep_in_python")
    stand.birth(phase=3)
    first = stand.dump(slot=0, life=1)["stack"]

    second = stand.dump(slot=0, life=1)["stack"]

    assert second.count("in deep_in_python") == first.count("in deep_in_python") == 1


def test_a_stopped_child_costs_no_more_than_the_patience(stand: Stand) -> None:
    stand.template_of("idle")
    os.kill(stand.birth(), signal.SIGSTOP)

    dump = stand.dump(slot=0, life=1)

    assert dump["stack"] == ""
    assert 0.2 <= dump["seconds"] < 0.4


def test_a_fault_leaves_its_stack(stand: Stand) -> None:
    stand.template_of("crashes")
    stand.fork(generation=1, slot=0, life=1)

    end = stand.end_of()

    assert end["signal"] == signal.SIGSEGV
    found = stand.cause(slot=0)
    assert found["killed_by"] == "itself"
    assert "Fatal Python error: Segmentation fault" in found["stack"]
    assert "in crashes" in found["stack"]
    assert found["phase"] == "executing"


def test_the_next_life_finds_no_stack_of_the_last_one(stand: Stand) -> None:
    stand.template_of("crashes")
    stand.fork(generation=1, slot=0, life=1)
    stand.end_of()
    assert stand.stack(row=0)

    stand.template_of("idle", generation=2)
    stand.birth(life=2, generation=2)

    assert stand.stack(row=0) == ""


def test_a_dump_signal_that_comes_before_everything_else_kills_nobody(stand: Stand) -> None:
    stand.template_of("idle")
    stand.message("imported")
    for life in range(20):
        stand.fork(generation=1, slot=0, life=life)
        until(lambda life=life: f"0.{life}" in stand.children(), 10, interval=0)  # type: ignore[misc]
        stand.signal(slot=0, life=life, number=DUMP_SIGNAL)
        stand.signal(slot=0, life=life, number=SOFT_SIGNAL)
        until(lambda: stand.row(index=0)["phase"] == 1, 10)
        stand.kill_group(slot=0, life=life)
        assert stand.end_of(0, life)["signal"] == signal.SIGKILL


# -- many forks


@pytest.mark.parametrize("number", [40, pytest.param(304, marks=pytest.mark.slow)])
def test_every_child_of_a_template_with_a_noisy_thread_reports(tmp_path: Path, number: int) -> None:
    """The thread logs, imports and prints without pause, so most forks find it in the middle of something."""
    code = (
        "import logging, sys, threading\n"
        "logging.basicConfig(stream=open('noise', 'w'))\n"
        "def noise():\n"
        "    while True:\n"
        "        logging.warning('x' * 200)\n"
        "        sys.modules.pop('colorsys', None)\n"
        "        import colorsys\n"
        "threading.Thread(target=noise, name='noisemaker').start()\n"
    )
    with Stand(tmp_path, rows=8) as stand:
        pid = stand.template_of("imports", app=app(stand, code))
        assert stand.message("imported")["threads"] == ["noisemaker"]
        assert "fork hazard" in (stand.folder / "noise").read_text()

        ended = 0
        while ended < number:
            for slot in range(8):
                stand.fork(generation=1, slot=slot, life=ended)
            ended += 8
            until(lambda ended=ended: len(stand.ended()) == ended, 30, tell(stand))  # type: ignore[misc]

        assert {end["code"] for end in stand.ended()} == {0}
        assert not gone(pid)
        stand.quit_template(generation=1)
        assert stand.end(generation=1)["code"] == 0, "a thread of the application must not keep it alive"


def test_sockets_left_open_by_the_import_are_named(stand: Stand) -> None:
    code = "import socket; left = socket.socket()"
    pid = stand.template_of("idle", app=app(stand, code))

    sockets = stand.message("imported")["sockets"]

    assert len(sockets) == 1
    assert descriptors(pid)[sockets[0]].startswith("socket:")
    assert "fork hazard: the application's import left sockets open" in stand.log()


def test_no_descriptor_is_lost_over_a_hundred_lives(stand: Stand) -> None:
    template = stand.template_of("ends")
    stand.message("imported")

    before = (stand.descriptors(), len(descriptors(template)))

    for life in range(100):
        stand.fork(generation=1, slot=0, life=life)
        stand.end_of(0, life)

    until(lambda: (stand.descriptors(), len(descriptors(template))) == before, 5)


def test_no_descriptor_is_lost_over_five_reloads(stand: Stand) -> None:
    before = 0
    for generation in range(1, 6):
        stand.template_of("idle", generation=generation)
        stand.birth(life=generation, generation=generation)
        stand.kill_group(slot=0, life=generation)
        stand.end_of(0, generation)
        stand.quit_template(generation=generation)
        assert stand.end(generation=generation)["code"] == 0
        before = before or stand.descriptors()

    assert stand.descriptors() == before


def test_a_retired_template_lives_until_its_last_child_is_gone(stand: Stand) -> None:
    pid = stand.template_of("idle")
    stand.birth(slot=0)
    stand.birth(slot=1)
    stand.quit_template(generation=1)
    stand.kill_group(slot=0, life=1)
    stand.end_of(slot=0)
    assert not gone(pid)

    stand.kill_group(slot=1, life=1)

    assert stand.end(generation=1)["code"] == 0


# -- faults


def test_a_fork_that_fails_is_told_and_the_next_one_works(stand: Stand) -> None:
    pid = stand.template_of("idle")
    stand.message("imported")
    before = stand.limit(pid=pid, kind=resource.RLIMIT_NOFILE, soft=3)

    stand.fork(generation=1, slot=0, life=1)

    failed = stand.message("fork_failed")
    assert (failed["slot"], failed["life"]) == (0, 1)
    assert "Too many open files" in failed["error"]
    assert stand.template(generation=1)["unanswered"] == []
    stand.limit(pid=pid, kind=resource.RLIMIT_NOFILE, soft=before)
    assert stand.birth(life=2)


@pytest.mark.parametrize("room", [0, 1])
def test_no_room_for_another_process_is_told_and_the_next_fork_works(stand: Stand, room: int) -> None:
    """Neither for the middle process, nor, with room for that one, for the child."""
    pid = stand.template_of("idle")
    stand.message("imported")
    with FewProcesses(pid, 1 + room):
        stand.fork(generation=1, slot=0, life=1)
        assert "temporarily unavailable" in stand.message("fork_failed")["error"]

    assert stand.birth(life=2)


class FewProcesses:
    """A control group in which that process finds room for so many."""

    def __init__(self, pid: int, most: int) -> None:
        self._pid, self._most = pid, most
        own = next(
            (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":pids:" in line), None
        )
        self._top = Path("/sys/fs/cgroup/pids" + (own or "::").split(":", 2)[2])
        self._group = self._top / f"dtq-test-{pid}"

    def __enter__(self) -> None:
        try:
            self._group.mkdir()
            (self._group / "pids.max").write_text(str(self._most))
            (self._group / "cgroup.procs").write_text(str(self._pid))
        except OSError as error:
            pytest.skip(f"no control group of our own: {error}")

    def __exit__(self, *_: object) -> None:
        (self._top / "cgroup.procs").write_text(str(self._pid))
        until(lambda: (self._group / "cgroup.procs").read_text() == "", 5)
        self._group.rmdir()


def test_a_template_killed_at_any_moment_leaves_no_child_unknown(tmp_path: Path) -> None:
    """What it reported lives on and is ours; what it did not report never began to work."""
    dice = random.Random(7)
    with Stand(tmp_path, rows=4) as stand:
        for generation in range(1, 11):
            stand.template_of("deaf", generation=generation)
            until(lambda n=generation: len(stand.said(kind="imported")) == n, 10)  # type: ignore[misc]
            for slot in range(4):
                stand.fork(generation=generation, slot=slot, life=generation)
            time.sleep(dice.random() * 0.03)  # anywhere in the forking, which takes about as long
            stand.kill_template(generation=generation)
            assert stand.end(generation=generation)["signal"] == signal.SIGKILL

            until(lambda: sorted(stand.living()) == sorted(stand.children().values()), 10, tell(stand))
            told = {(m["slot"], m["life"]) for m in stand.said(kind="forked") if m["life"] == generation}
            unanswered = {tuple(key) for key in stand.template(generation=generation)["unanswered"]}
            assert told | unanswered == {(slot, generation) for slot in range(4)}
            assert told & unanswered == set()
            working = {slot for slot in range(4) if (row := stand.row(index=slot)) and row["pid"]}
            assert {(slot, generation) for slot in working} <= told
            stand.kill_everybody()
            until(lambda: stand.living() == [], 10, tell(stand))


def tell(stand: Stand) -> Any:
    return lambda: f"living {stand.living()}, known {stand.children()}, ended {len(stand.ended())}"


def test_a_stopped_middle_process_or_template_harms_nobody(stand: Stand) -> None:
    """An operator's debugger, say: everything goes on when it lets go."""
    pid = stand.template_of("idle")
    stand.message("imported")
    os.kill(pid, signal.SIGSTOP)
    for slot in range(3):
        stand.fork(generation=1, slot=slot, life=1)
    assert stand.children() == {}

    os.kill(pid, signal.SIGCONT)

    until(lambda: len(stand.children()) == 3, 10)
    assert group_members(pid) == [pid], "the middle processes are gone"
