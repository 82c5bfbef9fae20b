"""A file that is locked while its supervisor lives, and holds its pid."""

from __future__ import annotations

import fcntl
import os
from types import TracebackType
from typing import Self


class PidfileLocked(Exception):
    """Another process holds it. `pid`: what the file says, empty if nothing."""

    def __init__(self, path: str, pid: str) -> None:
        self.path, self.pid = path, pid
        super().__init__(
            f"{path} is locked by pid {pid or 'unknown'}: that supervisor runs; stop it, or name another file"
        )


class Pidfile:
    """Locked on entry, removed on exit. The kernel unlocks it however we end, so a leftover hinders nobody.

    Raises PidfileLocked; OSError if it cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> Self:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                raise PidfileLocked(self._path, pid) from None
            if self._is_still_there(fd):
                break
            os.close(fd)  # its last owner removed it between our open and our lock
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass  # somebody has tidied up
        os.close(self._fd)

    def _is_still_there(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False
