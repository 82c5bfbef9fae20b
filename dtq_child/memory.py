"""How much memory a process holds: its resident size, as /proc tells it."""

from __future__ import annotations

import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    """0 if that cannot be told: the process is gone or a zombie, or /proc is hidden."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0
