"""A supervisor with hands and no head: does what the test says, line by line, and tells what it has seen.

A process of its own, because it collects the exits of all its children and adopts orphans. It reads one JSON
object a line, `{"do": method, "with": arguments}`, answers `{"answer": …}` or `{"error": …}`, and between the
lines it watches its processes and templates as a main loop does.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
import psutil

from dtq_child import prctl
from dtq_child.scoreboard import Scoreboard
from dtq_child.settings import defaults
from dtq_supervisor.death import OomWatch, cause
from dtq_supervisor.dumps import Dumps
from dtq_supervisor.events import Verdict
from dtq_supervisor.process import Child, Exit, Processes, TemplateProcess
from dtq_supervisor.templates import TemplateHandle, start_template
from tests.support.processes import descriptors

TICK_S = 0.02


class SmallSupervisor:
    """Public methods are what a test may ask for."""

    def __init__(self, rows: int) -> None:
        prctl.become_subreaper()
        self.board = Scoreboard.create(rows)
        self.processes = Processes(self._drain)
        self.dumps = Dumps(rows, self.processes.signal)
        self.watch = OomWatch()
        self.templates: dict[int, TemplateHandle] = {}
        self.generations: dict[int, TemplateHandle] = {}
        self.messages: list[dict[str, Any]] = []
        self.exits: list[dict[str, Any]] = []
        self.last_exit: dict[int, Exit] = {}

    # Templates and children.

    def start(
        self, generation: int, app: str, command: list[str], preload: bool = True, **settings: Any
    ) -> int:
        hello = {
            "supervisor_pid": os.getpid(),
            "worker_id": "here-1-abcd",
            "generation": generation,
            "app": app,
            "preload": preload,
            "settings": orjson.loads(defaults(app=app, **settings).to_json()),
            "scoreboard": {"fd": self.board.fd, "rows": self.board.rows},
            "dump_fds": self.dumps.fds,
        }
        handle = start_template(generation, hello, command=command)
        self.processes.add_template(generation, handle.pid)
        self.templates[generation] = self.generations[generation] = handle
        return handle.pid

    def fork(self, generation: int, slot: int, life: int, row: int | None = None) -> None:
        row = slot if row is None else row
        self.board.reset_row(row, life, may_claim=True)
        self.dumps.clear(row)
        self.templates[generation].fork(slot, life, row)

    def quit_template(self, generation: int) -> None:
        self.templates[generation].quit()

    def kill_template(self, generation: int) -> None:
        self.templates[generation].kill()

    def template(self, generation: int) -> dict[str, Any]:
        handle = self.generations[generation]
        return {"gone": handle.gone, "closed": handle.closed, "unanswered": sorted(handle.unanswered)}

    # What was seen.

    def said(self, kind: str = "") -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == kind or not kind]

    def ended(self) -> list[dict[str, Any]]:
        return self.exits

    def children(self) -> dict[str, int]:
        return {f"{child.slot}.{child.life}": pid for child, pid in self.processes.children().items()}

    def strangers(self) -> int:
        return self.processes.strangers_collected

    def row(self, index: int) -> Any:
        row = self.board.read_row(index)
        return None if row is None else asdict(row)

    def descriptors(self) -> int:
        return len(descriptors(os.getpid()))

    # Signals and stacks.

    def signal(self, slot: int, life: int, number: int) -> bool:
        return self.processes.signal(slot, life, number)

    def kill_group(self, slot: int, life: int) -> bool:
        return self.processes.kill_group(slot, life)

    def kill_everybody(self) -> int:
        return sum(self.processes.kill_group(c.slot, c.life) for c in self.processes.children())

    def kill_strangers(self) -> int:
        return self.processes.kill_strangers()

    def dump(self, slot: int, life: int) -> dict[str, Any]:
        asked = time.monotonic()
        self.dumps.ask(slot, slot, life)
        while not self.dumps.done(slot):
            time.sleep(0.002)
        return {"seconds": time.monotonic() - asked, "stack": self.dumps.read(slot)}

    def stack(self, row: int) -> str:
        return self.dumps.read(row)

    def cause(self, slot: int, verdict: str = "", killed: int = 1) -> dict[str, Any]:
        """Of the last exit of that slot, whose row must be untouched since."""
        end = self.last_exit[slot]
        oom = self.watch.evidence(killed)
        found = Verdict(verdict) if verdict else None  # type: ignore[arg-type]
        return cause(end, self.board.read_row(slot), found, oom, self.dumps.read(slot))

    def limit(self, pid: int, kind: int, soft: int) -> int:
        """Sets another process's soft limit; returns the old one."""
        old, hard = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (soft, hard))
        return old

    def renew(self, index: int, sent: float) -> None:
        self.board.renewed(index, sent)

    def watch_memory(self) -> None:
        """From now on, in the control group where we are now."""
        self.watch = OomWatch()

    def steal(self, slot: int, life: int) -> None:
        """Takes an exit away from `collect`, as careless code in this process might."""
        pid = self.processes.pid(slot, life)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def burn(self, seconds: float) -> None:
        """A main loop that is busy elsewhere."""
        time.sleep(seconds)

    def living(self) -> list[int]:
        return [process.pid for process in psutil.Process().children()]

    # The loop.

    def work(self) -> None:
        # So that a stranger's end, which nothing else announces, interrupts the sleep.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.processes.fileno(), select.POLLIN)
        lines = os.fdopen(os.dup(0), "rb", buffering=0)
        answers = os.dup(1)
        os.dup2(2, 1)  # what templates and children print belongs into the log
        while True:
            ready = {fd for fd, _ in poll.poll(TICK_S * 1000)}
            self._drain()
            self._collect()
            if 0 in ready:
                line = lines.readline()
                if not line:
                    return
                _write(answers, orjson.dumps(self._obey(orjson.loads(line))) + b"\n")

    def _obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": getattr(self, order["do"])(**order.get("with", {}))}
        except Exception:  # noqa: BLE001 - the test is told, and decides
            return {"error": traceback.format_exc()}

    def _drain(self) -> bool:
        for handle in list(self.templates.values()):
            for message in handle.receive():
                self.messages.append(message)
                if message["kind"] == "forked":
                    self.processes.add_child(message["slot"], message["life"], message["pid"])
        return any(handle.unanswered and not handle.gone for handle in self.templates.values())

    def _collect(self) -> None:
        for end in self.processes.collect():
            facts = {"pid": end.pid, "code": end.code, "signal": end.signal}
            match end.who:
                case Child(slot, life):
                    self.exits.append({**facts, "slot": slot, "life": life})
                    self.last_exit[slot] = end
                case TemplateProcess(generation):
                    handle = self.templates.pop(generation)
                    self.messages += handle.receive()
                    handle.collected(end.code)
                    handle.close()
                    self.exits.append({**facts, "generation": generation})


def _write(fd: int, line: bytes) -> None:
    while line:
        line = line[os.write(fd, line) :]


if __name__ == "__main__":
    SmallSupervisor(int(sys.argv[1])).work()
