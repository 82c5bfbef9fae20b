"""Why a value cannot go through JSON unaltered, and where in it: the slow half of `payload`, for failures.

None of the value's own code runs here but a foreign tzinfo's: a repr may hang, query a database or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from types import NoneType
from typing import Any
from uuid import UUID

from dtq_child.error_text import class_name, clip
from dtq_child.errors import PayloadError

MAX_DEPTH = 250
"""Levels of nesting. orjson writes 254 and reads 1024; what was accepted must be writable again."""

INT_MIN, INT_END = -(2**63), 2**64
BEYOND_64_BITS = "an integer beyond 64 bits; pass it as text"
TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels; pass flatter data"

CONTAINERS: frozenset[type] = frozenset({dict, list, tuple})
TIMES: frozenset[type] = frozenset({datetime, date, time})

_SHOWN_BYTES = 200
_STEP_CHARACTERS = 64
_STEPS_SHOWN = 12
_HINTS: Mapping[type, str] = {
    bytes: "pass base64 text",
    bytearray: "pass base64 text",
    set: "pass a list",
    frozenset: "pass a list",
    Decimal: "pass str(value)",
    timedelta: "pass value.total_seconds()",
}
_REPR_IS_SAFE: frozenset[type] = frozenset({NoneType, bool, float, complex, Decimal, timedelta, UUID})
_LENGTH_IS_SAFE: frozenset[type] = CONTAINERS | {set, frozenset, bytearray}


def first_offence(root: Any) -> PayloadError | None:
    """The first value, in the order of writing, that would be altered. Iterative: depth is an offence."""
    steps: list[str] = []
    around: list[int] = []  # ids of the containers that `steps` lead through
    pending = [iter([("$", root)])]
    while pending:
        found = next(pending[-1], None)
        if found is None:
            pending.pop()
            if around:
                around.pop()
                steps.pop()
            continue
        step, item = found
        reason = _why_refused(item, around)
        if reason:
            return PayloadError(reason, _path([*steps, step]), describe(item))
        if type(item) in CONTAINERS:
            steps.append(step)
            around.append(id(item))
            pending.append(_items(item))
    return None


def _path(steps: list[str]) -> str:
    """The way to a value. Of a long one both ends: data is mostly deep by the same step again and again."""
    hidden = len(steps) - 2 * _STEPS_SHOWN
    if hidden <= 0:
        return "".join(steps)
    return "".join([*steps[:_STEPS_SHOWN], f"…({hidden} levels)…", *steps[-_STEPS_SHOWN:]])


def describe(value: Any) -> str:
    """The value as short text."""
    kind = type(value)
    if kind is str or kind is bytes:
        cut = "…" if len(value) > _SHOWN_BYTES else ""
        return clip(repr(value[:_SHOWN_BYTES]), _SHOWN_BYTES) + cut
    if kind is int:
        return repr(value) if value.bit_length() <= 256 else f"<an int of {value.bit_length()} bits>"
    if kind in _REPR_IS_SAFE:
        return clip(repr(value), _SHOWN_BYTES)
    if kind in _LENGTH_IS_SAFE:
        return f"<{kind.__name__} of {len(value)}>"
    return f"<{class_name(kind)} object>"


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    if type(container) is dict:
        return ((_step(key), item) for key, item in container.items())
    return ((f"[{index}]", item) for index, item in enumerate(container))


def _step(key: str) -> str:
    return f".{key}" if len(key) <= _STEP_CHARACTERS and key.isidentifier() else f"[{describe(key)}]"


def _why_refused(item: Any, around: list[int]) -> str | None:
    kind = type(item)
    if kind in CONTAINERS:
        return _why_container(item, around)
    judge = _JUDGES.get(kind)
    return judge(item) if judge else f"{class_name(kind)} is not JSON; {_hint(kind)}"


def _why_container(container: Any, around: list[int]) -> str | None:
    if id(container) in around:
        return "a cycle: it contains itself"
    if len(around) >= MAX_DEPTH:
        return TOO_DEEP
    return _why_keys(container) if type(container) is dict else None


def _why_keys(mapping: dict[Any, Any]) -> str | None:
    for key in mapping:
        if type(key) is not str:
            return f"the key {describe(key)} is not a plain str, as keys of JSON are; pass str(key)"
        if _why_text(key):
            return f"the key {describe(key)}: {_why_text(key)}"
    return None


def _why_text(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a lone surrogate, which UTF-8 cannot carry; clean the text or pass base64"
    return None


def _why_int(number: int) -> str | None:
    return None if INT_MIN <= number < INT_END else BEYOND_64_BITS


def _why_float(number: float) -> str | None:
    return None if isfinite(number) else "JSON has no NaN and no infinity; pass None or text"


def _why_time(moment: date | time) -> str | None:
    try:
        moment.isoformat()
    except Exception as error:  # noqa: BLE001 - its tzinfo is code of the application
        return f"its isoformat() raised {class_name(type(error))}; pass text"
    return None


def _accepted(_: object) -> str | None:
    return None


_JUDGES: Mapping[type, Callable[[Any], str | None]] = {
    str: _why_text,
    int: _why_int,
    float: _why_float,
    bool: _accepted,
    NoneType: _accepted,
    UUID: _accepted,
    **dict.fromkeys(TIMES, _why_time),
}


def _hint(kind: type) -> str:
    if issubclass(kind, Enum):
        return "pass its .value"
    for plain in (str, int, float, list, dict, tuple):
        if issubclass(kind, plain):
            return f"what it adds to {plain.__name__} would be lost; pass {plain.__name__}(value)"
    if issubclass(kind, (date, time)):
        return "what it adds to a plain date or time would be lost; pass value.isoformat()"
    return _HINTS.get(kind, "pass plain data: numbers, text, lists, objects with text keys")
