"""What a supervisor is for its children: a scoreboard that somebody stamps, rows, bells; without the rest of
it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from dtq_child.app import App
from dtq_child.broker import Broker
from dtq_child.connection import open_link
from dtq_child.handle import Handle
from dtq_child.keys import Keys, consumer
from dtq_child.scoreboard import Order, Phase, Row, Scoreboard
from dtq_child.settings import Settings, defaults
from dtq_child.signals import SOFT_SIGNAL
from dtq_child.turns import Turns
from tests.support import leftovers
from tests.support.ledger import VARIABLE as LEDGER
from tests.support.ledger import Ledger
from tests.support.servers import RedisServer
from tests.support.waiting import until

PROGRAM = Path(__file__).with_name("child_program.py")
ROOT = PROGRAM.parents[2]


class StandIn:
    """Starts children as subprocesses. `url` is what they are told; the test enqueues at the server
    itself."""

    def __init__(
        self, server: RedisServer, folder: Path, *, url: str | None = None, rows: int = 2, **settings: Any
    ) -> None:
        self.server, self.folder = server, folder
        self.board = Scoreboard.create(rows)
        self.worker_id = "stand-in"
        self.settings: Settings = defaults(redis_url=url or server.url, **settings)
        self.app = App(redis_url=server.url)
        self.broker = Broker(self.app.settings())
        self.ledger = Ledger(folder / "ledger")
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.stamping = True
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick)
        self.board.stamp(time.monotonic())
        self._ticker.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
        self._ended.set()
        self._ticker.join()
        self.broker.close()
        self.board.close()
        os.close(self.board.fd)

    def _tick(self) -> None:
        while not self._ended.wait(0.05):
            if self.stamping:
                self.board.stamp(time.monotonic())

    # -- children

    def start(self, row: int = 0, *, may_claim: bool = True, wait: bool = True) -> subprocess.Popen[bytes]:
        self.board.reset_row(row, 1, may_claim=may_claim)
        child = self._spawn([sys.executable, str(PROGRAM), self.words(row)], row)
        self.children[row] = child
        if wait:
            until(lambda: self.row(row).phase is Phase.READY, 15, lambda: self.log(row))
        return child

    def words(self, row: int, supervisor_pid: int | None = None) -> str:
        return json.dumps(
            {
                "owner": os.getpid(),
                "fd": self.board.fd,
                "rows": self.board.rows,
                "row": row,
                "life": 1,
                "worker_id": self.worker_id,
                "supervisor_pid": supervisor_pid or os.getpid(),
                "settings": json.loads(self.settings.to_json()),
            }
        )

    def _spawn(self, command: list[str], row: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), LEDGER: str(self.ledger.path)}
        with self._log(row).open("ab") as log:
            return leftovers.spawn(command, tag="child", output=log, env=env, cwd=self.folder)

    def start_orphan_to_be(self, row: int = 0) -> subprocess.Popen[bytes]:
        """A parent of its own for the child, to be killed. The parent."""
        self.board.reset_row(row, 1, may_claim=True)
        source = (
            "import json, os, subprocess, sys; words = json.loads(sys.argv[2]);"
            "words['supervisor_pid'] = os.getpid();"
            "subprocess.Popen([sys.executable, sys.argv[1], json.dumps(words)]).wait()"
        )
        parent = self._spawn([sys.executable, "-c", source, str(PROGRAM), self.words(row)], row)
        until(lambda: self.row(row).phase is Phase.READY, 15, lambda: self.log(row))
        return parent

    def _log(self, row: int) -> Path:
        return self.folder / f"child-{row}.log"

    def log(self, row: int = 0) -> str:
        return self._log(row).read_text()

    def row(self, row: int = 0) -> Row:
        """None is what a reader gets whose looks all fell into one write of a child that was not running."""
        read = until(lambda: self.board.read_row(row), 5, "the row cannot be read")
        assert read is not None
        return read

    def executing(self, row: int = 0) -> bool:
        return self.row(row).phase is Phase.EXECUTING

    def order(self, kind: Order, row: int = 0) -> None:
        read = self.row(row)
        self.board.order(row, kind, read.seq)
        os.kill(read.pid, SOFT_SIGNAL)

    def signal(self, number: int, row: int = 0) -> None:
        os.kill(self.row(row).pid, number)

    def wait_exit(self, row: int = 0, timeout: float = 10) -> int:
        try:
            return self.children[row].wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the child has not ended:\n{self.row(row)}\n{self.log(row)}") from None

    def pause(self, row: int = 0) -> None:
        self.signal(signal.SIGSTOP, row)

    # -- Redis

    @property
    def keys(self) -> Keys:
        return Keys(self.settings.key_prefix)

    def turns(self, slot: int, life: int = 9) -> Turns:
        """What another child of the same supervisor would have."""
        me = consumer(self.worker_id, slot, life)
        link = open_link(self.server.url)
        return Turns(link, self.keys, self.settings, self.worker_id, me, self.settings.queues)

    def send(self, task_type: str, queue: str = "default", **arguments: Any) -> Handle:
        return self.app.enqueue(task_type, arguments, queue=queue)

    def status(self, handle: Handle) -> str:
        return str(handle.status())

    def until_ended(self, handle: Handle, status: str = "succeeded", timeout: float = 10) -> None:
        until(
            lambda: self.status(handle) == status,
            timeout,
            lambda: f"{self.status(handle)}, {self.row()}\n{self.log()}",
        )

    def noted(self, handle: Handle, word: str) -> int:
        return sum(1 for e in self.ledger.entries() if (e.task_id, e.word) == (handle.id, word))
