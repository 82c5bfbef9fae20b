"""What an application's import left behind that does not survive a fork, or survives it twice."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

STUCK_S = 0.05

_THREADS = (
    "fork hazard: the application's import left threads running: %s; a child that is forked while one of "
    "them holds a lock may hang. Start them in @app.on_child_start"
)
_SOCKETS = (
    "fork hazard: the application's import left sockets open, descriptors %s; all children share them and "
    "read each other's answers. Connect at first use, or in @app.on_child_start"
)

log = logging.getLogger("dtq.template")


@dataclass(frozen=True, slots=True)
class Hazards:
    """`threads`: names of Python threads besides the main one. `native_threads`: how many others there are,
    which belong to C libraries that mostly know about forks. `sockets`: descriptors of sockets opened by the
    import."""

    threads: tuple[str, ...]
    native_threads: int
    sockets: tuple[int, ...]

    def tell(self) -> None:
        """Logs what there is."""
        if self.threads:
            log.warning(_THREADS, ", ".join(self.threads))
        if self.native_threads:
            log.info("C libraries of the application run %d threads of their own", self.native_threads)
        if self.sockets:
            log.warning(_SOCKETS, ", ".join(map(str, self.sockets)))


def open_sockets() -> frozenset[int]:
    """The descriptors of this process that are sockets; none where /proc cannot be read."""
    found = set()
    try:
        for name in os.listdir("/proc/self/fd"):
            if _is_socket(name):
                found.add(int(name))
    except OSError:
        return frozenset()
    return frozenset(found)


def look(sockets_before: frozenset[int]) -> Hazards:
    """`sockets_before`: those that were open before the import."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    return Hazards(
        threads=tuple(sorted(thread.name for thread in others)),
        native_threads=max(0, _tasks() - len(others) - 1),
        sockets=tuple(sorted(open_sockets() - sockets_before)),
    )


@contextmanager
def logging_held_still() -> Iterator[None]:
    """Around a fork of a process with threads: none of them is in the middle of writing to a log.

    `logging` makes its own locks anew in a forked process, but not those of the files it writes to: a thread
    that was just writing to one would leave it locked for ever. A log that a thread is stuck in is not waited
    for long. In the new process this context never ends, and needs not: there the locks are open."""
    # The module's own first, which the fork takes, too: the other way round, two threads could wait for each
    # other. It has no public name.
    locks = (getattr(logging, "_lock", None), *(handler.lock for handler in _handlers()))
    with ExitStack() as held:
        for lock in locks:
            if lock is not None and lock.acquire(timeout=STUCK_S):
                held.callback(lock.release)
        yield


def mend_imports() -> None:
    """In a child forked from a process with threads: gives up what those were importing at that moment.

    A module's import lock is held by the thread that imports it, which does not exist here: whoever imports
    that module would wait for ever. CPython mends only its global import lock. Without these private names,
    in another version, the hazard is just what the warning says."""
    bootstrap: Any = getattr(importlib, "_bootstrap", None)
    for name in ("_module_locks", "_blocking_on"):
        held: Any = getattr(bootstrap, name, None)
        if held is not None:
            held.clear()
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]


def _handlers() -> list[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return list(dict.fromkeys(handlers))


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False  # the descriptor with which the folder is read


def _tasks() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
