"""The JSON of a value of any size, written after a look at all that is in it, whole or piece by piece.

orjson alone is not enough: it writes NaN and infinities as null and enums as their values, rounds the seconds
of an offset, copies a `Fragment` unseen, overflows the stack on deeply nested tuples, and reserves eight
bytes a character. So the kinds of all values are looked at first, level by level, at the speed of C. Reading
the bytes again and comparing was tried: slower for small values, twice the memory for large ones, and an enum
equals its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf, isfinite
from types import NoneType
from typing import Any, Literal
from uuid import UUID

import orjson

from dtq_child.errors import PayloadError
from dtq_child.refusal import CONTAINERS, MAX_DEPTH, TIMES, TOO_DEEP, first_offence

_OPTIONS = (
    orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)
# What orjson either carries unaltered or refuses.
_SAFE_SCALARS: frozenset[type] = frozenset({str, int, bool, NoneType})
_ACCEPTED = _SAFE_SCALARS | CONTAINERS | TIMES | {float, UUID}
_SIZED = CONTAINERS | {str}

# Up to this many characters and items orjson is given a value whole; a larger one is written in pieces.
_LIGHT_WEIGHT = 1 << 20
_PIECE_WEIGHT, _PIECE_ITEMS = 1 << 16, 1000
_REFUSED_INSIDE = "holds a value or a key that JSON doesn't carry"

Survey = Literal["refused", "light", "heavy"]
REFUSED: Survey = "refused"
_LIGHT: Survey = "light"
_HEAVY: Survey = "heavy"


def is_flat(value: Any) -> bool:
    """Whether it is a dict of nothing but what orjson carries unaltered or refuses: the usual payload."""
    return type(value) is dict and _SAFE_SCALARS.issuperset(map(type, value.values()))


def write(value: Any) -> bytes:
    """The JSON of what is flat or has been surveyed. Raises PayloadError naming the first offender."""
    try:
        return orjson.dumps(value, _as_text, _OPTIONS)
    except orjson.JSONEncodeError as error:
        raise first_offence(value) or PayloadError(str(error)) from error


def _as_text(value: Any) -> str:
    # orjson asks here about every kind it doesn't write by itself; a TypeError is how it is told no.
    if type(value) in TIMES:
        return str(value.isoformat())
    raise TypeError


def survey(
    root: Any, floats_pass: Callable[[list[float]], bool], light: float, levels: int = MAX_DEPTH
) -> Survey:
    """A look at everything in `root`: kinds, depth, floats, and the weight in characters and items.

    The weight ends it on `a = [a, a]`, which has 2^250 items within the depth allowed."""
    weight, level = 0, [root]
    for _ in range(levels + 1):
        kinds = set(map(type, level))
        if not kinds <= _ACCEPTED:
            return REFUSED
        if float in kinds and not floats_pass([item for item in level if type(item) is float]):
            return REFUSED
        if not kinds.isdisjoint(_SIZED):
            weight += sum(map(len, [item for item in level if type(item) in _SIZED]))
        if weight > light:
            return _HEAVY
        if kinds.isdisjoint(CONTAINERS):
            return _LIGHT
        level = _children(level)
    return REFUSED


def _children(level: list[Any]) -> list[Any]:
    below: list[Any] = []
    for item in level:
        kind = type(item)
        if kind is dict:
            below.extend(item.values())
        elif kind is list or kind is tuple:
            below.extend(item)
    return below


def _are_finite(floats: list[float]) -> bool:
    return all(map(isfinite, floats))


def write_beginning(value: Any, keep: int | None) -> tuple[bytes, int]:
    """The JSON (if it is large, only its first `keep` bytes) and the size of the whole. Raises PayloadError.

    A large value is written piece by piece, each forgotten in turn. Written whole it could be the allocation
    that kills the process after the task has done its work: orjson 3.13 dies of SIGSEGV without memory."""
    seen = survey(value, _are_finite, _LIGHT_WEIGHT)
    if seen is REFUSED:
        raise first_offence(value) or PayloadError("changed while it was looked at; pass data of one thread")
    if seen is _LIGHT:
        data = write(value)
        return data, len(data)
    kept, size = bytearray(), 0
    try:
        for piece in _pieces(value):
            kept += piece if keep is None else piece[: max(0, keep - size)]
            size += len(piece)
    except PayloadError as error:
        raise first_offence(value) or error from None
    return bytes(kept), size


def _pieces(value: Any) -> Iterator[bytes]:
    """The JSON of `value` in order. A stack, not recursion: 250 frames above the caller's may be too many."""
    stack, around = [_parts(value, MAX_DEPTH)], [id(value)]
    while stack:
        part = next(stack[-1], None)
        if part is None:
            stack.pop()
            around.pop()
        elif type(part) is bytes:
            yield part
        elif id(part) in around:
            # Depth would end it, too, seconds later: every level of `a = [a, a]` is surveyed for its weight.
            raise PayloadError("a cycle")
        else:
            around.append(id(part))
            stack.append(_parts(part, MAX_DEPTH - len(stack)))


def _parts(value: Any, levels: int) -> Iterator[Any]:
    """Bytes that are ready, and the texts and containers still to be opened, in order."""
    kind = type(value)
    if kind is str:
        return _parts_of_text(value)
    if kind not in CONTAINERS:
        return iter((_scalar(value),))
    if levels <= 0:
        raise PayloadError(TOO_DEEP)
    return _parts_of_object(value, levels) if kind is dict else _parts_of_array(value, levels)


def _parts_of_text(text: str) -> Iterator[Any]:
    yield b'"'
    for start in range(0, len(text), _PIECE_WEIGHT):
        yield write(text[start : start + _PIECE_WEIGHT])[1:-1]
    yield b'"'


def _parts_of_array(items: list[Any] | tuple[Any, ...], levels: int) -> Iterator[Any]:
    yield b"["
    separator = b""
    for start in range(0, len(items), _PIECE_ITEMS):
        run = items[start : start + _PIECE_ITEMS]
        if _is_one_piece(run, levels):
            yield separator + write(run)[1:-1]
        else:
            for position, item in enumerate(run):
                yield b"," if position else separator
                yield item if type(item) in _SIZED else _scalar(item)
        separator = b","
    yield b"]"


def _parts_of_object(mapping: dict[str, Any], levels: int) -> Iterator[Any]:
    yield b"{"
    separator, entries = b"", iter(mapping.items())
    while run := dict(islice(entries, _PIECE_ITEMS)):
        if _is_one_piece(run, levels) and sum(map(len, run)) <= _PIECE_WEIGHT:
            yield separator + write(run)[1:-1]
        else:
            for position, (key, item) in enumerate(run.items()):
                yield b"," if position else separator
                yield key
                yield b":"
                yield item if type(item) in _SIZED else _scalar(item)
        separator = b","
    yield b"}"


def _is_one_piece(run: Any, levels: int) -> bool:
    seen = survey(run, _are_finite, _PIECE_WEIGHT, levels)
    if seen is REFUSED or (type(run) is dict and not {str}.issuperset(map(type, run))):
        raise PayloadError(_REFUSED_INSIDE)
    return seen is _LIGHT


def _scalar(item: Any) -> bytes:
    # Looked at on its own: a survey that finds a run heavy has stopped before it saw all of it.
    if survey(item, _are_finite, inf, 0) is REFUSED:
        raise PayloadError(_REFUSED_INSIDE)
    return write(item)
