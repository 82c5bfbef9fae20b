"""The cause of a death says what is known, and how surely."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from dtq_child.error_text import TRACEBACK_BYTES
from dtq_child.retry import RetryPolicy
from dtq_child.scoreboard import Counters, Execution, Phase, Row
from dtq_supervisor.death import Certainty, OomEvidence, OomWatch, cause
from dtq_supervisor.events import Verdict
from dtq_supervisor.process import Child, Exit

DATA = Path(__file__).parent / "data" / "oom"
STACK = (
    'Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n  File "a.py"'
)
KILLED = Exit(
    Child(3, 7), 4711, code=None, signal=signal.SIGKILL, max_rss_bytes=52_428_800, cpu_ms=1234, at=10.0
)
EXECUTION = Execution(
    seq=1,
    task_id="018f",
    task_type="shop.work",
    stream="dtq:stream:default:p5",
    entry_id="1-0",
    delivery=1,
    attempt=1,
    max_attempts=3,
    crashes=0,
    max_crashes=3,
    timeout_ms=1000,
    started=9.0,
    soft_deadline=0.0,
    hard_deadline=10.0,
    policy=RetryPolicy(1.0, 2.0, 3.0, 0.0),
    claim_sent=9.0,
)
BUSY = Row(
    life=7,
    pid=4711,
    phase=Phase.EXECUTING,
    seq=1,
    execution=EXECUTION,
    held=(),
    settling_since=0.0,
    counters=Counters(),
    idle_since=0.0,
    redis_ok_since=8.0,
    last_claim=9.0,
    stop=False,
    may_claim=True,
    renewed=0.0,
    order_kind=0,
    order_seq=0,
)
IDLE = replace(BUSY, phase=Phase.READY, execution=None)
LEFT = "itself: os._exit, or another program in its place"


def killed_by(
    end: Exit, row: Row | None = BUSY, verdict: Verdict | None = None, oom: OomEvidence | None = None
) -> tuple[str, str]:
    found = cause(end, row, verdict, oom, "")
    return found["killed_by"], found["certainty"]


def ended(code: int | None = None, signal: int | None = None) -> Exit:
    return replace(KILLED, code=code, signal=signal)


def test_a_cause_has_all_that_is_known_and_fits_json() -> None:
    oom = OomEvidence(1, "/sys/fs/cgroup/memory.events", "certain")

    found = cause(KILLED, BUSY, None, oom, STACK)

    assert found == {
        "signal": "SIGKILL",
        "signal_number": 9,
        "killed_by": "kernel: out of memory (certain)",
        "certainty": "certain",
        "phase": "executing",
        "max_rss_bytes": 52_428_800,
        "cpu_ms": 1234,
        "out_of_memory": {"kills": 1, "source": "/sys/fs/cgroup/memory.events", "certainty": "certain"},
        "stack": STACK,
    }
    assert orjson.loads(orjson.dumps(found)) == found


def test_what_is_not_known_is_left_out() -> None:
    found = cause(Exit(Child(0, 1), 4711, code=None, signal=None), None, None, None, "")

    assert found == {
        "killed_by": "unknown: its status was collected elsewhere",
        "certainty": "unknown",
        "max_rss_bytes": 0,
        "cpu_ms": 0,
    }


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("timeout", "dtq: hard timeout"),
        ("superseded", "dtq: another worker has taken the task over"),
        ("cancelled", "dtq: the task was cancelled"),
        ("grace", "dtq: the shutdown grace was over"),
        ("stuck", "dtq: it could not settle"),
        ("boot", "dtq: it was not ready within the boot timeout"),
        ("immediate", "dtq: immediate stop"),
        ("memory", "dtq: hard memory limit"),
        ("leaving", "dtq: it did not end"),
    ],
)
def test_what_we_killed_is_ours_whatever_the_kernel_counts(kind: Any, text: str) -> None:
    oom = OomEvidence(1, "x", "certain")

    assert killed_by(KILLED, verdict=Verdict(kind, 1), oom=oom) == (text, "certain")
    assert cause(KILLED, BUSY, Verdict(kind, 1), None, "")["verdict"] == kind


def test_a_kill_for_memory_says_how_much_there_was_and_how_much_was_allowed() -> None:
    found = cause(KILLED, BUSY, Verdict("memory", 1, 700 << 20, 512 << 20), None, "")

    assert (found["resident_bytes"], found["limit_bytes"]) == (700 << 20, 512 << 20)
    assert "resident_bytes" not in cause(KILLED, BUSY, Verdict("timeout", 1), None, "")


def test_a_kill_that_came_too_late_is_not_the_cause() -> None:
    """It was about to be killed, and ended before the signal reached it."""
    verdict = Verdict("timeout", 1)

    assert killed_by(ended(code=3), verdict=verdict) == (LEFT, "certain")
    assert killed_by(ended(signal=signal.SIGSEGV), verdict=verdict) == ("itself", "likely")


@pytest.mark.parametrize("certainty", ["certain", "likely"])
def test_a_kill_for_want_of_memory_says_how_sure_that_is(certainty: Certainty) -> None:
    oom = OomEvidence(2, "x", certainty)

    assert killed_by(KILLED, oom=oom) == (f"kernel: out of memory ({certainty})", certainty)


def test_want_of_memory_explains_no_other_death() -> None:
    oom = OomEvidence(1, "x", "certain")

    assert killed_by(ended(signal=signal.SIGTERM), oom=oom) == ("unknown sender", "unknown")
    assert "out_of_memory" not in cause(ended(code=1), BUSY, None, oom, "")


def test_a_sigkill_without_evidence_has_an_unknown_sender() -> None:
    assert killed_by(KILLED) == ("unknown sender", "unknown")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGSEGV, "itself"),
        (signal.SIGABRT, "itself"),
        (signal.SIGALRM, "itself"),
        (signal.SIGSYS, "kernel: a forbidden system call"),
        (signal.SIGXCPU, "kernel: the limit of CPU time"),
    ],
)
def test_a_fault_comes_from_the_process_itself_most_likely(number: int, text: str) -> None:
    assert killed_by(ended(signal=number)) == (text, "likely")


def test_a_nameless_signal_has_a_number() -> None:
    found = cause(ended(signal=signal.SIGRTMIN + 7), BUSY, None, None, "")

    assert (found["signal"], found["signal_number"]) == (
        f"signal {signal.SIGRTMIN + 7}",
        signal.SIGRTMIN + 7,
    )


@pytest.mark.parametrize(
    ("code", "row", "text"),
    [
        (0, IDLE, "itself: a clean end"),
        (0, BUSY, LEFT),
        (4, IDLE, "itself: the application could not be imported"),
        (4, BUSY, LEFT),
        (70, IDLE, "itself: an internal error"),
        (3, IDLE, LEFT),
        (0, None, "itself: a clean end"),
    ],
)
def test_an_exit_code_comes_from_the_process_itself(code: int, row: Row | None, text: str) -> None:
    assert killed_by(ended(code=code), row=row) == (text, "certain")
    assert cause(ended(code=code), row, None, None, "")["exit_code"] == code


def test_a_long_stack_keeps_its_head_and_its_end() -> None:
    stack = "Fatal Python error: Aborted\n" + '  File "deep.py", line 1 in f\n' * 5000 + "the last frame\n"

    kept = cause(KILLED, BUSY, None, None, stack)["stack"]

    assert len(kept.encode()) <= TRACEBACK_BYTES
    assert kept.startswith("Fatal Python error: Aborted\n")
    assert kept.endswith("the last frame\n")


# -- what the kernel counts, from recorded files


class Machine:
    """A / that holds what was recorded before a kill, and then what was recorded after it."""

    def __init__(self, folder: Path, version: str) -> None:
        self.root, self._version = folder / "root", version
        shutil.copytree(DATA / f"{version}-before", self.root)

    def kills(self) -> None:
        shutil.copytree(DATA / f"{self._version}-after", self.root, dirs_exist_ok=True)

    def path(self, pattern: str) -> Path:
        return next(self.root.rglob(pattern))


@pytest.mark.parametrize(
    ("version", "source"), [("v1", "memory/dtq/memory.oom_control"), ("v2", "dtq.service/memory.events")]
)
def test_a_counted_kill_of_the_only_death_is_certain(tmp_path: Path, version: str, source: str) -> None:
    machine = Machine(tmp_path, version)
    watch = OomWatch(machine.root)
    machine.kills()

    found = watch.evidence(killed=1)

    assert found is not None
    assert (found.kills, found.certainty) == (1, "certain")
    assert found.source.endswith(source)
    assert watch.evidence(killed=1) is None, "the same kill must not explain a later death"


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_one_kill_and_two_deaths_make_each_likely(tmp_path: Path, version: str) -> None:
    machine = Machine(tmp_path, version)
    watch = OomWatch(machine.root)
    machine.kills()

    found = watch.evidence(killed=2)

    assert found is not None
    assert found.certainty == "likely"


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_no_counted_kill_is_no_evidence(tmp_path: Path, version: str) -> None:
    machine = Machine(tmp_path, version)

    assert OomWatch(machine.root).evidence(killed=1) is None


def test_a_kill_that_hit_somebody_else_explains_nothing_later(tmp_path: Path) -> None:
    """A task's helper was killed, no child: its kill must not be taken for a later child's."""
    machine = Machine(tmp_path, "v2")
    watch = OomWatch(machine.root)
    machine.kills()

    assert watch.evidence(killed=0) is None
    assert watch.evidence(killed=1) is None


def test_an_old_kernel_counts_no_kills_and_its_limit_makes_one_likely(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v1")
    control = machine.path("memory.oom_control")
    control.write_text("oom_kill_disable 0\nunder_oom 0\n")
    watch = OomWatch(machine.root)
    machine.kills()
    control.write_text("oom_kill_disable 0\nunder_oom 0\n")

    found = watch.evidence(killed=1)

    assert found is not None
    assert found.certainty == "likely"
    assert found.source.endswith("memory/dtq/memory.failcnt")


def test_without_control_groups_the_machine_s_count_makes_it_likely(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    shutil.rmtree(machine.root / "sys")
    watch = OomWatch(machine.root)
    shutil.copy(DATA / "v2-after" / "proc" / "vmstat", machine.root / "proc" / "vmstat")

    found = watch.evidence(killed=1)

    assert found is not None
    assert (found.kills, found.certainty) == (1, "likely")
    assert found.source.endswith("proc/vmstat")


def test_a_hidden_proc_gives_no_evidence_and_no_error(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path)

    assert watch.evidence(killed=1) is None


def test_a_count_that_disappears_gives_no_evidence_and_no_error(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    watch = OomWatch(machine.root)
    shutil.rmtree(machine.root)

    assert watch.evidence(killed=1) is None
