"""Children that do one thing each: `python -m tests.process.doubles NAME --fd N` is their template.

What a child does depends on `DOUBLE` (JSON) in the environment as well; what it has to tell goes to files
`<name>-<slot>.<life>` in the current folder.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import setproctitle

from dtq_child import template
from dtq_child.protocol import ChildContext
from dtq_child.retry import RetryPolicy
from dtq_child.scoreboard import ChildRow, Execution
from dtq_child.signals import PARENT_DIED_SIGNAL, SOFT_SIGNAL
from tests.support.processes import descriptors

POLICY = RetryPolicy(10.0, 2.0, 3600.0, 0.25)
OPTIONS: dict[str, Any] = json.loads(os.environ.get("DOUBLE", "{}"))


def idle(context: ChildContext) -> int:
    """Waits for a task until its supervisor is gone or says stop."""
    row = _ready(context)
    while os.getppid() == context.supervisor_pid and not row.stop:
        time.sleep(0.01)
    return 0


def deaf(context: ChildContext) -> int:
    """Idle, and notices nothing."""
    _ready(context)
    return _for_ever()


def ends(context: ChildContext) -> int:
    """Ends with the code it was told."""
    _ready(context)
    return int(OPTIONS.get("code", 0))


def tells(context: ChildContext) -> int:
    """Writes down what it is like to be this child."""
    logging.warning("a child logs, by the handlers of its application")
    about = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "pgid": os.getpgid(0),
        "descriptors": {str(fd): path for fd, path in descriptors(os.getpid()).items()},
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "title": setproctitle.getproctitle(),
        "context": [context.slot, context.life, context.row, context.generation, context.worker_id],
        "dump_fd": context.dump_fd,
        "preloaded": context.preloaded,
        "visibility": context.settings.visibility_timeout_s,
        "tasks": sorted(context.app.tasks),
        "modules": "shop" in sys.modules,
    }
    _write("about", context, json.dumps(about))
    return idle(context)


def imports(context: ChildContext) -> int:
    """Needs a module that another thread of the template is importing all the time."""
    import colorsys  # noqa: PLC0415 - at this moment, in this process, is the point

    logging.warning("child %d.%d", context.slot, context.life)
    assert colorsys.rgb_to_hsv(1, 1, 1) == (0.0, 0.0, 1)
    return ends(context)


def executes(context: ChildContext) -> int:
    """Holds the GIL in C code while its row says that it executes."""
    _begin(context)
    return sum(itertools.repeat(0, 10**15))  # days in C, without a look at signals


def deep_in_python(context: ChildContext) -> int:
    """Executes, in Python."""
    _begin(context)
    return _for_ever()


def hears(context: ChildContext) -> int:
    """Executes, and writes down when the kernel tells it that its supervisor died."""
    signal.signal(PARENT_DIED_SIGNAL, lambda _number, _frame: _write("heard", context, str(time.monotonic())))
    _begin(context)
    return _for_ever()


def settles(context: ChildContext) -> int:
    """Has its outcome, and never gets it to Redis."""
    row = _begin(context)
    row.settling(time.monotonic())
    return _for_ever()


def finishes(context: ChildContext) -> int:
    """Executes on for a while after its supervisor died, then ends as an orphan does."""
    row = _begin(context)
    while os.getppid() == context.supervisor_pid:
        time.sleep(0.01)
    _write("orphaned", context, str(time.monotonic()))
    time.sleep(OPTIONS["seconds"])
    row.settling(time.monotonic())
    row.idle(time.monotonic())
    row.exiting(time.monotonic())
    time.sleep(0.3)
    _write("finished", context, str(time.monotonic()))
    return 0


def crashes(context: ChildContext) -> int:
    """Dies of a fault in C code."""
    _begin(context)
    ctypes.string_at(0)
    return 0


def leaves(context: ChildContext) -> int:
    """A handler that ends its process."""
    _begin(context)
    os._exit(OPTIONS["code"])


def eats(context: ChildContext) -> int:
    """Wants more memory than there is."""
    _begin(context)
    eaten = []
    while True:
        eaten.append(bytearray(16 * 1024 * 1024))


def helped(context: ChildContext) -> int:
    """Starts a program in its group and one in a session of its own. Ends as an orphan, at once, or never."""
    own = subprocess.Popen(["sleep", "3600"])
    away = subprocess.Popen(["sleep", "3601"], start_new_session=True)
    _write("helpers", context, json.dumps([own.pid, away.pid]))
    row = _begin(context) if OPTIONS.get("busy") else _ready(context)
    while not OPTIONS.get("ends") and os.getppid() == context.supervisor_pid:
        time.sleep(0.01)
    if OPTIONS.get("stays"):
        return _for_ever()
    row.exiting(time.monotonic())
    os._exit(0)


def daemons(context: ChildContext) -> int:
    """Leaves a crowd of orphans that end by themselves, with every exit code."""
    _ready(context)
    script = f"for i in $(seq {OPTIONS['number']}); do (exit $((i % 256))) & done"
    for _ in range(OPTIONS["times"]):
        # In a session of its own, so that the crowd is not killed with the child.
        subprocess.run(["setsid", "sh", "-c", f"({script}) &"], check=True)
    _write("spawned", context, "")
    return idle(context)


def signalled(context: ChildContext) -> int:
    """Survives whatever an operator may send, and writes down the soft signal."""
    signal.signal(SOFT_SIGNAL, lambda _number, _frame: _write("soft", context, ""))
    return idle(context)


def writes(context: ChildContext) -> int:
    """Writes to the file that the application opened at import."""
    shop = sys.modules["shop"]
    shop.file.write(f"child {context.life}\n")
    shop.file.flush()
    return ends(context)


def _ready(context: ChildContext) -> ChildRow:
    row = context.scoreboard.child_row(context.row)
    row.ready(time.monotonic())
    return row


def _begin(context: ChildContext) -> ChildRow:
    row = _ready(context)
    now = time.monotonic()
    row.claiming(now)
    row.executing(
        Execution(
            seq=1,
            task_id=f"task-{context.slot}-{context.life}",
            task_type="shop.work",
            stream="dtq:stream:default:p5",
            entry_id="1-0",
            delivery=1,
            attempt=1,
            max_attempts=3,
            crashes=0,
            max_crashes=3,
            timeout_ms=300_000,
            started=now,
            soft_deadline=0.0,
            hard_deadline=now + OPTIONS.get("timeout", 300),
            policy=POLICY,
            claim_sent=now,
        )
    )
    return row


def _for_ever() -> int:
    while True:
        time.sleep(0.05)


def _write(name: str, context: ChildContext, text: str) -> None:
    path = Path(f"{name}-{context.slot}.{context.life}")
    new = Path(f"new-{path}")
    new.write_text(text)
    new.rename(path)


if __name__ == "__main__":
    template.run(sys.argv[2:], globals()[sys.argv[1]])
