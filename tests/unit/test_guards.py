"""What a task changed in its process is put back before the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.runner_bench import Bench, runner_bench

NUMBERS = (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR2, signal.SIGRTMAX)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with runner_bench() as bench:
        yield bench


def state() -> dict[str, object]:
    return {
        "handlers": [str(signal.getsignal(number)) for number in NUMBERS],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timers": [signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "directory": os.getcwd(),
    }


def test_the_next_task_finds_what_the_first_one_found(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def leak() -> None:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
        signal.alarm(3600)
        signal.setitimer(signal.ITIMER_PROF, 3600)
        reader, writer = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(writer)
        os.close(reader)
        os.chdir("/")

    before = state()
    seen: list[dict[str, object]] = []
    bench.run(leak)
    bench.run(lambda: seen.append(state()))
    assert seen == [before]
    assert signal.set_wakeup_fd(-1) == -1
    assert [r.levelname for r in caplog.records if "left behind" in r.getMessage()] == ["WARNING"]


def test_an_alarm_without_a_handler_is_put_out(bench: Bench) -> None:
    bench.run(lambda: signal.alarm(3600))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_task_that_leaves_everything_alone_is_told_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(lambda: 1)
    assert caplog.records == []


def test_a_directory_that_is_gone_and_a_table_of_descriptors_swept_empty(
    bench: Bench, tmp_path: Path
) -> None:
    fd = bench.runner._guards._directory_fd

    def sweep() -> None:
        os.chdir(tmp_path)
        os.close(fd)

    here = os.getcwd()
    for _ in range(2):
        bench.run(sweep if os.path.exists(f"/proc/self/fd/{fd}") else lambda: os.chdir("/"))
        assert os.getcwd() == here


def test_a_thread_that_a_task_leaves_running_is_named_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="left-alone")

    def start() -> None:
        thread.start()

    try:
        bench.run(start)
        bench.run(lambda: None)
    finally:
        go.set()
        thread.join()
    assert [r.getMessage() for r in caplog.records] == [
        "task 018f (handler) left threads running: left-alone"
    ]


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_that_took_the_signal_of_the_stack_dumps_gives_it_back() -> None:
    program = """
        import os, signal, tempfile
        from dtq_child import stacks
        from dtq_child.guards import Guards
        from dtq_child.signals import DUMP_SIGNAL
        file = tempfile.TemporaryFile()
        stacks.write_to(file.fileno())
        guards = Guards(file.fileno())
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        signal.signal(signal.SIGSEGV, signal.SIG_IGN)
        print(len(guards.restore()))
        os.kill(os.getpid(), DUMP_SIGNAL)
        print(os.fstat(file.fileno()).st_size > 0)
    """
    assert run(program).split() == ["2", "True"]


def test_a_signal_sent_by_mistake_ends_nobody() -> None:
    program = """
        import os, signal
        from dtq_child.guards import quiet_strays
        quiet_strays()
        for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGIO, signal.SIGRTMAX, signal.SIGRTMIN):
            os.kill(os.getpid(), number)
        print("alive")
    """
    assert run(program) == "alive\n"


def test_signals_that_c_code_has_taken_stay_its_own() -> None:
    program = """
        import faulthandler, os, signal, sys
        faulthandler.register(signal.SIGRTMAX, file=sys.stdout)
        from dtq_child.guards import quiet_strays
        quiet_strays()
        os.kill(os.getpid(), signal.SIGRTMAX)
    """
    assert "(most recent call first)" in run(program)


def test_a_signal_that_is_pending_for_a_tasks_own_handler_is_discarded_with_it() -> None:
    program = """
        import os, signal
        from dtq_child.guards import Guards
        guards = Guards()
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        os.kill(os.getpid(), signal.SIGALRM)
        guards.restore()
        print("alive")
    """
    assert run(program) == "alive\n"
