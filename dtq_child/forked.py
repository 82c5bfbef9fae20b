"""Ends a process that code of the application has forked and that came back out of that code.

Out of a handler it holds our token and our connection: going on, it would settle the task and claim the next
one beside us, each of us reading replies that are the other's.
"""

from __future__ import annotations

import logging
import os
from typing import NoReturn

log = logging.getLogger("dtq.child")


def end_here(error: BaseException | None) -> NoReturn:
    """`error`: what left the handler in this process. It counts for nothing, as the end of any other helper
    of a task, but is told; the exit code is what a program's would be."""
    if error is not None and not isinstance(error, SystemExit):
        log.error("a process that a task has forked failed", exc_info=error)
    # Neither finalisers nor buffers, which are copies of our own.
    os._exit(_exit_code(error))


def end_copy(where: str, error: BaseException | None) -> NoReturn:
    """The same for code outside of tasks, out of which it would come as a second template or child."""
    if not isinstance(error, SystemExit):
        log.warning(
            "%s forked a process (pid %d) that came back from it, and is ended: end such a process where its "
            "work ends, and fork none at the import",
            where,
            os.getpid(),
            exc_info=error,
        )
    os._exit(_exit_code(error))


def _exit_code(error: BaseException | None) -> int:
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    if isinstance(code, int):
        return code & 0xFF
    return int(code is not None)
