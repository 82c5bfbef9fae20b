"""Task ids: made by whoever enqueues, so that an enqueue can be sent twice and happen once (R10)."""

from __future__ import annotations

import os
import time

_TAIL_BITS = (1 << 62) - 1
_VARIANT = 1 << 63


def new_task_id() -> str:
    """32 hex digits in the layout of UUID version 7: sorted as text they are sorted by time, to a quarter of
    a microsecond. From os.urandom, so that forked processes cannot repeat each other's ids."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << 12) // 1_000_000
    tail = _VARIANT | (int.from_bytes(os.urandom(8), "big") & _TAIL_BITS)
    return f"{milliseconds:012x}7{fraction:03x}{tail:016x}"
