"""`dtq demo` as somebody runs it who has never seen dtq: a report without jargon, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.supervisor import ROOT
from tests.support.waiting import until

COMMAND = (sys.executable, "-m", "dtq_supervisor.tools.main", "demo")


class Demo:
    """`dtq demo` in a folder for temporary files of its own, which is how what it leaves is found."""

    def __init__(self, folder: Path, files: int, **env: str) -> None:
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self._out = folder / "out"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
        clean |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder), **env}
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "--files", str(files), "--procs", "2"],
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self._out.read_text()

    def left(self) -> list[str]:
        """Processes that work below its folder, and files there."""
        found = [str(path) for path in self.folder.iterdir()]
        for process in psutil.process_iter():
            try:
                cwd = process.cwd()
            except psutil.Error:
                continue
            found += [str(process)] if cwd.startswith(str(self.folder)) else []
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(tmp_path)):
                process.kill()
        except psutil.Error:
            continue


def test_the_demo_shows_what_went_wrong_and_that_all_went_well(folder: Path) -> None:
    """Whatever the shell says of other supervisors is not for its own."""
    demo = Demo(folder, 20, DTQ_KEY_PREFIX="another:")
    assert demo.process.wait(60) == 0, demo.said()
    said = demo.said()
    assert "every task has exactly one outcome, every queue is empty, no process is left" in said
    assert "its dead letter keeps the cause: SIGSEGV, sent by itself" in said
    assert said.count("in always_crash") == 1
    assert "{" not in said
    assert demo.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_in_one_line_and_leaves_nothing(
    folder: Path, number: signal.Signals
) -> None:
    demo = Demo(folder, 2000)
    until(lambda: "tasks enqueued" in demo.said(), 30, demo.said)
    before = demo.said()
    demo.process.send_signal(number)
    demo.process.send_signal(number)
    assert demo.process.wait(15) == 128 + number, demo.said()
    last = [line for line in demo.said().splitlines() if line][-1]
    assert last == f"interrupted by {number.name}: everything is stopped"
    assert "Traceback" not in demo.said()
    assert '"fact"' not in demo.said()
    assert before in demo.said()
    assert demo.left() == []
