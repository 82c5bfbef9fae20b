"""Private redis-servers: one process, one free port of 127.0.0.1, one temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import leftovers
from tests.support.binaries import Binary, binary_for
from tests.support.ports import free_port
from tests.support.processes import stopped
from tests.support.waiting import until

BOOT_SECONDS = 15.0
STOP_SECONDS = 10.0
_TAKEN = "Address already in use"
_UNDO = (
    ("ACL", "SETUSER", "default", "reset", "on", "nopass", "~*", "&*", "+@all"),
    ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"),
    ("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes"),
    ("FLUSHALL",),
    ("SCRIPT", "FLUSH"),
    ("CONFIG", "RESETSTAT"),
)
_PATIENCE: dict[str, Any] = {"socket_timeout": 5, "socket_connect_timeout": 5, "retry": Retry(NoBackoff(), 0)}


class PortTaken(Exception):
    """Somebody was quicker to bind the port that we chose."""


class RedisServer:
    """A redis-server of our own. It may be stopped, killed and started again; its port stays the same.

    Without `persist` nothing is written to disk; with it every write is in the append-only file, so it
    survives kill(), too. `settings` are further directives, by name. `shared` servers outlive one test.
    """

    def __init__(
        self,
        binary: Binary | None = None,
        *,
        persist: bool = False,
        settings: Mapping[str, str] | None = None,
        shared: bool = False,
    ) -> None:
        self.binary = binary or binary_for("any")
        self.persist = persist
        self.folder = Path(tempfile.mkdtemp(prefix="dtq-redis-"))
        self._settings = dict(settings or {})
        self._shared = shared
        self._tag = "shared" if shared else os.environ.get(leftovers.TAG, "untagged")
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        self._pristine: dict[bytes, bytes] = {}
        self.port = self._find_port()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<{self.binary} on port {self.port}>"

    # -- what it is

    @property
    def version(self) -> tuple[int, ...]:
        return self.binary.version

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self!r} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        file = self.folder / "redis.log"
        return file.read_text(errors="replace") if file.exists() else ""

    # -- its life

    def _find_port(self) -> int:
        for _ in range(20):
            self.port = free_port()
            try:
                self._start_once()
            except PortTaken:
                continue
            return self.port
        raise RuntimeError(f"{self.binary}: 20 chosen ports in a row were taken by others")

    def start(self) -> None:
        """Starts it again on the same port, with the data that stop() or a kill() under `persist` left."""
        if self.running:
            raise RuntimeError(f"{self!r} is already running")

        def started() -> bool:
            try:
                self._start_once()
            except PortTaken:  # its former connections may still hold the address
                return False
            return True

        until(started, BOOT_SECONDS, lambda: f"{self!r} did not get its port back", interval=0.05)

    def _start_once(self) -> None:
        (self.folder / "redis.log").unlink(missing_ok=True)
        with (self.folder / "output").open("wb") as output:
            self._process = leftovers.spawn(self._command(), tag=self._tag, output=output)
        if self._shared:
            leftovers.kept.add(self._process.pid)
        try:
            until(self._answers, BOOT_SECONDS, lambda: f"{self!r} is not ready:\n{self._last_words()}")
        except BaseException:
            self.kill()
            raise
        if not self.persist:
            (self.folder / "dump.rdb").unlink(
                missing_ok=True
            )  # of restart(); a later kill() is to lose everything
        self._pristine = self._pristine or self._changeable_settings()

    def _command(self) -> list[str]:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "logfile": str(self.folder / "redis.log"),
            "save": "",
            "appendonly": "yes" if self.persist else "no",
            "daemonize": "no",
        }
        if self.binary.flavour == "valkey" or self.version >= (7,):
            settings["enable-debug-command"] = "yes"  # 6.2 always has it
        settings.update(self._settings)
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [str(self.binary.path), *words]

    def _answers(self) -> bool:
        """Whether our own process answers; another server may have been quicker to take the port."""
        assert self._process is not None
        if self._process.poll() is not None:
            words = self._last_words()
            if _TAKEN in words:
                raise PortTaken(words)
            raise AssertionError(f"{self.binary} ended with {self._process.returncode}:\n{words}")
        try:
            self.cli("PING")  # INFO alone would be answered while the data are loading
            return int(self.info("server")["process_id"]) == self._process.pid
        except (redis.ConnectionError, redis.TimeoutError):  # LOADING is one of the former
            return False

    def _last_words(self) -> str:
        output = self.folder / "output"
        words = self.log() + (output.read_text(errors="replace") if output.exists() else "")
        return "\n".join(words.splitlines()[-30:])

    def stop(self) -> None:
        """Ends it by SIGTERM. Without `persist` its data are gone."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a paused one would never see SIGTERM
        self._collect(process)

    def _collect(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self!r} did not stop:\n{self._last_words()}") from None
        finally:
            leftovers.kept.discard(process.pid)
            self._process = None

    def restart(self, keep: bool = True) -> None:
        """Ends it in good order and starts it again on the same port, with its data or empty."""
        process = self._process
        if keep and not self.persist and process is not None:
            self._shutdown_saving()
            self._collect(process)
        else:
            self.stop()
        if not keep:
            self._forget()
        self.start()

    def _shutdown_saving(self) -> None:
        try:
            self.cli("SHUTDOWN", "SAVE")
        except redis.ConnectionError:  # the answer to a SHUTDOWN that works
            return

    def _forget(self) -> None:
        (self.folder / "dump.rdb").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)
        (self.folder / "appendonly.aof").unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: stopped(pid), 5, f"{self!r} does not stop")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def destroy(self) -> None:
        """Ends it for good and removes its folder."""
        self.kill()
        self._close_clients()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- talking to it

    def client(self, **options: Any) -> redis.Redis:
        """A client without decoding and without resends, closed with the server."""
        client = self._open(**options)
        self._clients.append(client)
        return client

    def cli(self, *words: str | bytes | int | float, timeout: float = 5) -> Any:
        """The reply to one command as the server sent it (RESP2, bytes), over a connection of its own.

        Raises redis.ConnectionError, redis.TimeoutError, redis.ResponseError.
        """
        # Not execute_command: its callbacks go by the first word and stumble over replies they did not
        # expect.
        options = {
            **_PATIENCE,
            "host": "127.0.0.1",
            "port": self.port,
            "protocol": 2,
            "socket_timeout": timeout,
        }
        connection = redis.Connection(**options)  # type: ignore[no-untyped-call]
        try:
            connection.send_command(*words)  # type: ignore[no-untyped-call]
            return connection.read_response()
        finally:
            connection.disconnect()  # type: ignore[no-untyped-call]

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, values as text."""
        lines = self.cli("INFO", section).decode().splitlines()
        pairs = [line.partition(":") for line in lines if ":" in line]
        return {name: value for name, _, value in pairs}

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def _open(self, **options: Any) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, **{**_PATIENCE, **options})

    # -- as new, for the next test

    def reset(self) -> None:
        """Empties it and undoes what tests do to servers: settings, scripts, pauses, users, roles."""
        self._close_clients()
        if self.running:
            self.resume()
            try:
                self._undo()
            except redis.RedisError:  # a test locked us out: a password, rights taken away, a long pause
                self.kill()
            else:
                return
        self._end(signal.SIGKILL)
        self._forget()
        self.start()

    def _undo(self) -> None:
        self.cli("CLIENT", "UNPAUSE", timeout=0.5)  # waits itself where all commands are paused
        self.cli("REPLICAOF", "NO", "ONE")  # its name stands among the settings, but cannot be set there
        for name, value in self._changeable_settings().items():
            if value != self._pristine[name]:
                self.cli("CONFIG", "SET", name, self._pristine[name])
        for user in self.cli("ACL", "USERS"):
            if user != b"default":
                self.cli("ACL", "DELUSER", user)
        for words in _UNDO:
            self.cli(*words)

    def _changeable_settings(self) -> dict[bytes, bytes]:
        flat = self.cli("CONFIG", "GET", "*")
        return dict(zip(flat[::2], flat[1::2], strict=True))
