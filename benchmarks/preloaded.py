"""An application with a large table, made at its import: what children share, or each have for themselves.

PRELOAD_MB and PRELOAD_OF (`objects` or `bytes`) say how large it is and of what.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.tasks import app

MB = int(os.environ.get("PRELOAD_MB", "150"))
OF = os.environ.get("PRELOAD_OF", "objects")
ROW_BYTES = 250
"""What one row of `objects` takes, about: a text, a float, a tuple and its place in a dict."""


def objects() -> dict[int, tuple[str, float]]:
    return {n: (f"{n:08}" + "x" * 40, float(n)) for n in range(MB * 1_000_000 // ROW_BYTES)}


def pages() -> bytes:
    return os.urandom(1_000_000) * MB


TABLE = objects() if OF == "objects" else pages()


@app.task(timeout=300)
def walk(gate: str) -> float:
    """Reads all of the table, then waits, so that every child gets one such task."""
    total = sum(TABLE[::4096]) if isinstance(TABLE, bytes) else sum(row[1] for row in TABLE.values())
    while not Path(gate).exists():
        time.sleep(0.01)
    return total
