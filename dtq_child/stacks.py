"""Where a child's stacks go: those it is asked for, and the last words of a fatal error."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap

from dtq_child.signals import DUMP_SIGNAL

ROOM = 1024 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_room: mmap.mmap | None = None


class _SignalStack(ctypes.Structure):
    """`stack_t` of sigaltstack(2)."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def write_to(fd: int) -> None:
    """From now on DUMP_SIGNAL, and a fatal error like SIGSEGV, write all stacks to `fd`. For the main thread.
    Call it again after code that may have changed signal handlers."""
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)
    _make_room()


def show_faults() -> None:
    """From now on a fatal error writes all stacks to standard error: for whoever has no file yet."""
    faulthandler.enable(file=2, all_threads=True)
    _make_room()


def _make_room() -> None:
    """Gives signal handlers a stack on which many can be nested.

    Python's run on the one that `faulthandler.enable` has set up, which has room for one fault and little
    more: six signals that come together are a segmentation fault (two, on processors with large
    registers)."""
    global _room  # noqa: PLW0603 - it must live as long as the process
    if _room is None:
        # Private: a process that a task forks inherits this stack, and must not write over ours.
        _room = mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(_room))
    # Refused (EPERM) only while a handler runs on the old one; then that one stays.
    _libc.sigaltstack(ctypes.byref(_SignalStack(start, 0, ROOM)), None)
