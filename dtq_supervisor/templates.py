"""The supervisor's side of a template: starts it, asks it for children, reads its reports, survives whatever
it does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dtq_child import protocol
from dtq_child.protocol import PART, PROTOCOL, Assembler, Garbled
from dtq_child.signals import OPERATOR_SIGNALS

# -P: a redis.py or queue.py in the application's folder is not for what dtq imports. The loader adds the
# folder.
COMMAND = (sys.executable, "-P", "-m", "dtq_child.template")
PACKETS_AT_ONCE = 1000

_NUMBERS = {"forked": ("slot", "life", "row", "pid"), "fork_failed": ("slot", "life", "row")}
_KINDS = frozenset({"hello", "imported", "import_failed", *_NUMBERS})


def start_template(
    generation: int,
    hello: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
) -> TemplateHandle:
    """Starts a fresh interpreter that leads its own group and has nothing of ours but stdout, stderr, its
    socket, and the scoreboard and dump files that `hello` names. OSError: it could not be started.

    To be called by the main thread: the kernel tells a process of the death of the *thread* that started
    it."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("start_template is for the main thread")
    ours, theirs = protocol.socketpair()
    # It inherits this mask, and unblocks the signals when it has handlers for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OPERATOR_SIGNALS)
    try:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=env,
            pass_fds=(theirs.fileno(), hello["scoreboard"]["fd"], *hello["dump_fds"]),
            process_group=0,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    handle = TemplateHandle(generation, process, ours)
    handle.send({**hello, "kind": "hello", "protocol": PROTOCOL})
    return handle


class TemplateHandle:
    """One template process.

    `gone`: why it is of no use any more, empty as long as it may be of use: it closed its socket, or talks
    nonsense. Its process may live on then; `kill` ends it. `closed`: everything that it ever sent was read.
    `unanswered`: (slot, life) → row of the fork requests that it has neither reported nor refused."""

    def __init__(self, generation: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.generation, self.pid = generation, process.pid
        self.gone = ""
        self.closed = False
        self.only_closed = False
        """`gone` says no more than that the socket is closed: how the process ends will say why."""
        self.unanswered: dict[tuple[int, int], int] = {}
        self._greeted = False
        self._process, self._sock = process, sock
        self._assembler = Assembler()
        self._unsent: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def fork(self, slot: int, life: int, row: int) -> None:
        self.unanswered[slot, life] = row
        self.send({"kind": "fork", "slot": slot, "life": life, "row": row})

    def quit(self) -> None:
        """No more forks are wanted; it ends after its last child."""
        self.send({"kind": "quit"})

    def send(self, message: Mapping[str, Any]) -> None:
        """Never waits: what the socket does not take now is sent by the next call of `send` or `receive`."""
        self._unsent.extend(protocol.packets(message))
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived, checked for the fields that we compute with. Never waits, never raises.

        What comes after nonsense is read, too: a child that is reported then exists all the same."""
        self._flush()
        messages = []
        for _ in range(PACKETS_AT_ONCE):
            packet = self._packet()
            if packet is None:
                break
            try:
                message = self._assembler.take(packet)
                if message is not None:
                    messages.append(self._checked(message))
            except Garbled as error:
                self._give_up(f"it sent {error}")
        return messages

    def kill(self) -> None:
        """The process alone: its children go on. Does nothing when its exit was collected."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def collected(self, code: int | None) -> None:
        """To be told when `Processes` has collected its exit: from now on its pid is somebody else's."""
        # Popen would look for the status otherwise, and complain about a process that nobody waited for.
        self._process.returncode = 0 if code is None else code

    def close(self) -> None:
        """The template takes this for the supervisor's death: a living child's end."""
        self.closed = True
        self._sock.close()

    def _packet(self) -> bytes | None:
        if self.closed:
            return None
        try:
            packet = self._sock.recv(PART + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            self._end(f"its socket failed: {error}")
            return None
        if not packet:
            self._end("it closed its socket")
            return None
        return packet

    def _checked(self, message: dict[str, Any]) -> dict[str, Any]:
        kind = message["kind"]
        if not self._greeted:
            self._greet(message)
        if kind not in _KINDS:
            raise Garbled(f"a message of the unknown kind {kind!r}")
        for name in _NUMBERS.get(kind, ()):
            if type(message.get(name)) is not int or message[name] < 0:
                raise Garbled(f"{kind} with {name} {message.get(name)!r}")
        if kind in _NUMBERS:
            self.unanswered.pop((message["slot"], message["life"]), None)
        return message

    def _greet(self, message: dict[str, Any]) -> None:
        self._greeted = True
        theirs = message.get("protocol")
        if message["kind"] != "hello" or theirs != PROTOCOL:
            self._give_up(
                f"dtq was upgraded, restart the service: a new template speaks protocol {theirs}, "
                f"this supervisor {PROTOCOL}"
            )

    def _flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                # What it sent before it went is still to be read; the end of that says that it is gone.
                self._unsent.clear()
                return
            self._unsent.popleft()

    def _end(self, reason: str) -> None:
        self.closed, self.only_closed = True, not self.gone
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self.gone = self.gone or reason
