"""The process that imports the application once and forks children of it: `python -m dtq_child.template --fd
N`.

    supervisor ──fork──► template ──fork──► middle ──fork──► child
                                            sets the child's group, says its pid, ends;
                                            the child becomes the supervisor's own

The template holds a pidfd of each child before the child goes on, and has reported it. It never talks to
Redis, lives until its last child is gone, and is the executioner of its children when the supervisor dies.

Rejected: a fork in the supervisor, which would share its threads' locks, its sockets and its modules with
children and could not load new code; and a single fork in the template, whose children only the template
could collect.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import setproctitle

from dtq_child import child, executioner, hazards, logs, newborn, prctl, stacks
from dtq_child.app import App
from dtq_child.error_text import error_text
from dtq_child.executioner import Ward
from dtq_child.gate import Gate
from dtq_child.loader import load_configured
from dtq_child.protocol import PROTOCOL, ChildContext, SupervisorLink
from dtq_child.scoreboard import Scoreboard
from dtq_child.settings import Settings

IMPORT_FAILED, INTERNAL_ERROR = 4, 70

Entry = Callable[[ChildContext], int]
"""What a child does: returns its exit code."""

log = logging.getLogger("dtq.template")


def main(arguments: Sequence[str] | None = None, entry: Entry = child.main) -> int:
    parser = argparse.ArgumentParser(prog="dtq_child.template", description="Started by dtq-supervisor only.")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the supervisor")
    fd: int = parser.parse_args(arguments).fd
    # Code that reads the command line at import finds nothing that it could take for its own.
    sys.argv[1:] = []
    return serve(socket.socket(fileno=fd), entry)


def serve(sock: socket.socket, entry: Entry) -> int:
    """Serves the supervisor at the other end of `sock`. Returns the exit code."""
    newborn.quiet_signals()
    # The supervisor started us with its signals blocked, so that none came before these handlers.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(sock.fileno(), False)
    link = SupervisorLink(sock)
    hello = link.receive()
    link.send({"kind": "hello", "protocol": PROTOCOL, "pid": os.getpid()})
    if hello is None or hello.get("protocol") != PROTOCOL:
        return 0  # the supervisor says what is to be done about that
    template = Template(link, hello, entry)
    return template.work() if template.import_app() else IMPORT_FAILED


@dataclass(frozen=True, slots=True)
class Birth:
    """What the fork knows. `threads`: the template had more than its own."""

    slot: int
    life: int
    row: int
    threads: bool


class Template:
    """One generation's template."""

    def __init__(self, link: SupervisorLink, hello: Mapping[str, Any], entry: Entry) -> None:
        self._link, self._entry = link, entry
        self._supervisor_pid: int = hello["supervisor_pid"]
        self._worker_id: str = hello["worker_id"]
        self._generation: int = hello["generation"]
        self._app_name: str = hello["app"]
        self._preload: bool = hello["preload"]
        self._settings = Settings.from_json(hello["settings"])
        board = hello["scoreboard"]
        self._board = Scoreboard.attach(board["fd"], board["rows"])
        self._dump_fds: list[int] = hello["dump_fds"]
        self._descriptor_limit: int | None = hello.get("descriptor_limit")
        for fd in (self._board.fd, *self._dump_fds):
            os.set_inheritable(fd, False)
        self._app: App | None = None
        self._wards: dict[int, Ward] = {}
        self._wanted = True
        setproctitle.setproctitle(f"dtq-supervisor: template g{self._generation}")

    # The application.

    def import_app(self) -> bool:
        """Imports the application, if it is to be, and tells the supervisor how that went."""
        started = time.monotonic()
        child.rehearse(self._settings)
        sockets = hazards.open_sockets()
        if self._preload and not self._preloaded():
            return False
        found = hazards.look(sockets)
        if self._preload:
            # Not before: code that sets up logging at its import finds it untouched.
            logs.set_up(self._settings, worker=self._worker_id, pid=os.getpid())
        found.tell()
        return self._link.send(
            {
                "kind": "imported",
                "seconds": round(time.monotonic() - started, 3),
                "threads": found.threads,
                "native_threads": found.native_threads,
                "sockets": found.sockets,
                "task_types": _declared(self._app) if self._preload else None,
            }
        )

    def _preloaded(self) -> bool:
        stacks.show_faults()
        # An import that hangs must not outlive the supervisor.
        prctl.on_parents_death(signal.SIGKILL)
        if os.getppid() != self._supervisor_pid:
            return False
        try:
            self._app = load_configured(self._app_name, self._settings)
        except BaseException as error:  # noqa: BLE001 - an import may end in SystemExit, too
            self._tell_failure(error)
            return False
        prctl.on_parents_death(0)
        newborn.quiet_signals()
        # What is there now is there for good: no collection touches, and so copies, these pages in children.
        gc.collect()
        gc.freeze()
        return True

    def _tell_failure(self, error: BaseException) -> None:
        text = error_text(error)
        self._link.send(
            {
                "kind": "import_failed",
                "error_class": text.class_name,
                "message": text.message,
                "traceback": text.traceback,
            }
        )

    # The loop.

    def work(self) -> int:
        """Forks as asked, until no child is left and none is wanted, or the supervisor is gone."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        while self._wanted or self._wards:
            for fd, _ in poll.poll():
                if fd in self._wards:
                    poll.unregister(fd)
                    os.close(self._wards.pop(fd).pidfd)
                    continue
                message = self._link.receive()
                if message is None:
                    return self._execute()
                pidfd = self._obey(message)
                if pidfd is not None:
                    poll.register(pidfd, select.POLLIN)
        return 0

    def _execute(self) -> int:
        if self._wards:
            setproctitle.setproctitle(f"dtq-supervisor: template g{self._generation}: supervisor died")
        executioner.execute(self._wards.values(), self._board, self._settings.visibility_timeout_s)
        return 0

    def _obey(self, message: Mapping[str, Any]) -> int | None:
        """Does what the supervisor asks; the pidfd of the new child if that was a fork."""
        if message["kind"] == "quit":
            self._wanted = False
            return None
        if message["kind"] != "fork":
            log.error("the supervisor asks for %r, which this version does not know", message["kind"])
            return None
        birth = {name: int(message[name]) for name in ("slot", "life", "row")}
        try:
            ward = self._fork(**birth)
        except OSError as error:
            self._link.send({"kind": "fork_failed", **birth, "error": str(error)})
            return None
        self._wards[ward.pidfd] = ward
        return ward.pidfd

    # The fork.

    def _fork(self, slot: int, life: int, row: int) -> Ward:
        """A new child, registered and reported. OSError: there is none."""
        with Gate() as gate, _signals_blocked():
            middle = self._fork_middle(gate, Birth(slot, life, row, threading.active_count() > 1))
            try:
                pid = gate.hear()
                ward = Ward(slot, life, row, pid, os.pidfd_open(pid))
                self._report(ward)
                gate.open()
            finally:
                # Not a wait until it ends by itself: somebody may have stopped it.
                os.kill(middle, signal.SIGKILL)
                os.waitpid(middle, 0)
        return ward

    def _fork_middle(self, gate: Gate, birth: Birth) -> int:
        _flush()
        with hazards.logging_held_still() if birth.threads else nullcontext():
            middle = _fork_quietly()
            if middle == 0:
                self._be_middle(gate, birth)
        return middle

    def _report(self, ward: Ward) -> None:
        message = {"kind": "forked", "slot": ward.slot, "life": ward.life, "row": ward.row, "pid": ward.pid}
        if not self._link.send(message):
            os.close(ward.pidfd)
            raise BrokenPipeError("the supervisor is gone")

    def _be_middle(self, gate: Gate, birth: Birth) -> NoReturn:
        try:
            gate.take_lower_end()
            try:
                pid = _fork_quietly()
            except OSError as error:
                gate.say(-(error.errno or errno.EAGAIN))
                os._exit(0)
            if pid == 0:
                self._be_child(gate, birth)
            os.setpgid(pid, pid)
            gate.say(pid)
            gate.passes()
        finally:
            os._exit(0)

    def _be_child(self, gate: Gate, birth: Birth) -> NoReturn:
        code = INTERNAL_ERROR
        try:
            # A closed gate: the template has not registered this child, and nobody knows of it.
            code = self._live(birth) if gate.passes() else 0
        except BaseException:  # nothing may climb from here into the template's own loop
            log.critical("child %d ends by an error of its own", birth.slot, exc_info=True)
        finally:
            _flush()
            os._exit(code)

    def _live(self, birth: Birth) -> int:
        """The child's life, from its adoption to its exit code."""
        setproctitle.setproctitle(f"dtq-child[{birth.slot}] g{self._generation}: starting")
        if not newborn.adopted_by(self._supervisor_pid):
            return 0
        dump_fd = self._dump_fds[birth.row]
        self._let_go(dump_fd)
        newborn.limit_descriptors(self._descriptor_limit)
        newborn.offer_to_oom_killer()
        newborn.take_signals(dump_fd)
        self._board.child_row(birth.row).born(os.getpid())
        if birth.threads:
            hazards.mend_imports()
        app = self._app or self._import_here(birth.slot, dump_fd)
        if app is None:
            return IMPORT_FAILED
        return self._entry(self._context(birth, app, dump_fd))

    def _context(self, birth: Birth, app: App, dump_fd: int) -> ChildContext:
        return ChildContext(
            slot=birth.slot,
            life=birth.life,
            row=birth.row,
            generation=self._generation,
            worker_id=self._worker_id,
            supervisor_pid=self._supervisor_pid,
            settings=self._settings,
            app=app,
            scoreboard=self._board,
            dump_fd=dump_fd,
            preloaded=self._preload,
        )

    def _let_go(self, dump_fd: int) -> None:
        """Closes what belongs to the template. Not every descriptor there is: those that the application
        opened at import, a log file say, are its own, and their numbers would soon be somebody else's."""
        self._link.close()
        os.close(self._board.fd)
        for fd in {*self._dump_fds, *self._wards} - {dump_fd}:
            os.close(fd)
        self._wards.clear()

    def _import_here(self, slot: int, dump_fd: int) -> App | None:
        stacks.show_faults()  # the file at `dump_fd` goes into the record of a task, and there is none yet
        try:
            app = load_configured(self._app_name, self._settings)
        except BaseException:  # an import may end in SystemExit, too
            logs.set_up(self._settings, worker=self._worker_id, slot=slot, pid=os.getpid())
            log.critical("the application cannot be imported", exc_info=True)
            return None
        newborn.quiet_signals()
        stacks.write_to(dump_fd)
        return app


def _fork_quietly() -> int:
    with warnings.catch_warnings():
        # Python ≥ 3.12 warns about threads; so did we, once, with their names.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """No signal reaches a new process before it has its own handlers."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _flush() -> None:
    """What stands in a buffer at a fork would be written twice, at an `_exit` never."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or put there by the application: its own affair


def _declared(app: App | None) -> dict[str, dict[str, Any]]:
    return {} if app is None else {name: task.declared() for name, task in app.tasks.items()}


def run(arguments: Sequence[str] | None = None, entry: Entry = child.main) -> NoReturn:
    """`main`, and then the end of the process."""
    code = INTERNAL_ERROR
    try:
        code = main(arguments, entry)
    except BaseException:  # noqa: BLE001 - SystemExit, too: see below
        logs.last_words()
    finally:
        _flush()
        # Not by way of the interpreter's end, which would wait for threads of the application.
        os._exit(code)


if __name__ == "__main__":
    run()
