"""The application of `dtq demo`: one honest task, and four that misbehave."""

from __future__ import annotations

import ctypes
import io
import lzma
import os
import signal
import time
import tokenize
from pathlib import Path

from dtq_child import App, Backoff, current_task

app = App()


@app.task(queue="demo", timeout=60)
def pack(path: str) -> dict[str, int]:
    """Tokenises and compresses one Python source file. Returns counts of bytes and tokens."""
    source = Path(path).read_bytes()
    return {"bytes": len(source), "tokens": _tokens(source), "packed": len(lzma.compress(source, preset=6))}


def _tokens(source: bytes) -> int:
    count = 0
    try:
        for _ in tokenize.tokenize(io.BytesIO(source).readline):
            count += 1
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
        # The library's own tests hold files that are wrong on purpose: what could be read counts.
        return count
    return count


@app.task(queue="demo", priority=8, timeout=2, max_attempts=1)
def hang_in_c() -> None:
    """Waits in C code, for ever, for a mutex that this thread holds, and keeps the interpreter's lock: no
    signal handler written in Python can run."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@app.task(queue="demo", priority=8, timeout=20)
def kill_own_process(note: str) -> float:
    """Kills its process the first time. Returns the milliseconds from that death to this second start."""
    now = time.time()
    path = Path(note)
    if current_task().delivery > 1 and path.exists():
        return (now - float(path.read_text())) * 1000
    path.write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


@app.task(queue="demo", priority=8, timeout=20, retry=Backoff(base=0.5, factor=2, cap=5, jitter=0.1))
def fail_once() -> int:
    """Fails at its first attempt. Returns the number of the attempt that did not."""
    attempt = current_task().attempt
    if attempt == 1:
        raise ConnectionError("the first attempt of this task fails")
    return attempt


@app.task(queue="demo", priority=8, timeout=20, max_crashes=2)
def always_crash() -> None:
    """Reads address 0: the process dies of SIGSEGV each time it is tried."""
    ctypes.string_at(0)
