"""The test's side of `small_supervisor`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.leftovers import kill_all, left_behind
from tests.support.processes import Process, look, tree
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 120.0
PATIENCE_S = 90.0
"""Far more than anything takes, on a machine that does other things, too."""

APP = """
from dtq_child import App

app = App()

@app.task
def work() -> None: ...
"""


class Stand:
    """A small supervisor in a folder that holds the application `shop`."""

    def __init__(
        self,
        folder: Path,
        rows: int = 4,
        within: Sequence[str] = (),
        stderr: int | None = None,
        **options: Any,
    ) -> None:
        """`within`: a command that runs it; `stderr`: in place of the log; `options` are for the doubles."""
        self.folder = folder
        (folder / "shop.py").write_text(APP)
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "tests.process.small_supervisor", str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log if stderr is None else stderr,
            cwd=folder,
            env=_environment(options),
            start_new_session=True,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        kill_all(left_behind(0))
        for stream in (self.process.stdin, self.process.stdout, self._log):
            assert stream is not None
            stream.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Whatever a SmallSupervisor can do."""
        return lambda **arguments: self.ask(name, **arguments)

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, "with": arguments}).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            raise AssertionError(f"no answer to {what} within {ANSWER_S:g} s:\n{self.log()}")
        line = self.process.stdout.readline()
        assert line, f"the small supervisor died:\n{self.log()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"] + self.log()
        return answer["answer"]

    # Stories are told in these.

    def template_of(self, double: str, generation: int = 1, app: str = "shop:app", **settings: Any) -> int:
        """Starts a template whose children do what that double does."""
        command = [sys.executable, "-m", "tests.process.doubles", double]
        return int(self.start(generation=generation, app=app, command=command, **settings))

    def birth(self, slot: int = 0, life: int = 1, generation: int = 1, phase: int = 1) -> int:
        """Asks for a child and waits until its row has come at least that far. Returns its pid."""
        self.fork(generation=generation, slot=slot, life=life)
        until(
            lambda: (row := self.row(index=slot)) and row["life"] == life and row["phase"] >= phase,
            PATIENCE_S,
            lambda: f"row {self.row(index=slot)}, said {self.said()}, log {self.log()}",
        )
        return int(self.row(index=slot)["pid"])

    def message(self, kind: str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """The last message of that kind, waited for."""
        found = until(lambda: self.said(kind=kind), timeout, lambda: f"said {self.said()}, log {self.log()}")
        return dict(found[-1])

    def end_of(self, slot: int = 0, life: int = 1, timeout: float = PATIENCE_S) -> dict[str, Any]:
        return self.end(timeout, slot=slot, life=life)

    def end(self, timeout: float = PATIENCE_S, **who: Any) -> dict[str, Any]:
        """The collected exit of that child or template, waited for."""

        def found() -> list[dict[str, Any]]:
            return [end for end in self.ended() if who.items() <= end.items()]

        return dict(until(found, timeout, lambda: f"ended {self.ended()}, log {self.log()}")[0])

    def told(self, name: str, slot: int = 0, life: int = 1) -> str:
        """What that double wrote, waited for."""
        path = self.folder / f"{name}-{slot}.{life}"
        until(path.exists, PATIENCE_S, lambda: f"no {path.name}; log {self.log()}")
        return path.read_text()

    def die(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def tree(self) -> list[Process]:
        return tree(self.pid)


def gone(pid: int) -> bool:
    found = look(pid)
    return found is None or found.status == "zombie"


def _environment(options: dict[str, Any]) -> dict[str, str]:
    found = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": found, "DOUBLE": json.dumps(options)}
    env.pop("PYTHONUNBUFFERED", None)  # buffers are among what a fork can get wrong
    return env
