"""JSON in and out: what goes through comes back equal, or is refused with the path to the value (R18, R20).

Documented exceptions, and no others: a tuple comes back as a list; a datetime, date or time as its
`isoformat()` text; a UUID as its text. All that is neither plain JSON nor one of these is refused, subclasses
too (enums, named tuples, `SafeString`, numpy's floats), because what they add would be lost.

orjson alone is not enough: it writes NaN and infinities as null and enums as their values, rounds the seconds
of an offset, copies a `Fragment` unseen, overflows the stack on deeply nested tuples, and reads integers
above 64 bits as floats. So the kinds of all values are looked at first, level by level, at the speed of C.
Reading the bytes again and comparing was tried: slower for small values, twice the memory for large ones,
and an enum equals its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from types import NoneType
from typing import Any, Literal
from uuid import UUID

import orjson

from dtq_child.error_text import clip, error_text
from dtq_child.errors import PayloadError, PayloadTooLarge
from dtq_child.refusal import (
    BEYOND_64_BITS,
    CONTAINERS,
    INT_END,
    INT_MIN,
    MAX_DEPTH,
    TIMES,
    TOO_DEEP,
    describe,
    first_offence,
)

_OPTIONS = (
    orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)
# What orjson either carries unaltered or refuses.
_SAFE_SCALARS: frozenset[type] = frozenset({str, int, bool, NoneType})
_ACCEPTED = _SAFE_SCALARS | CONTAINERS | TIMES | {float, UUID}
_SIZED = CONTAINERS | {str}

_REASON_BYTES = 1000
_INT_CHARACTERS = 20
_MIN, _END = float(INT_MIN), float(INT_END)
# Up to this many characters and items orjson is given a value whole; a larger one is written in pieces.
_LIGHT_WEIGHT = 1 << 20
_PIECE_CHARACTERS, _PIECE_ITEMS = 1 << 16, 1000
_STRING_OR_NUMBER = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?[0-9]+)(\.[0-9]+)?([eE][+-]?[0-9]+)?', re.DOTALL
)

_Survey = Literal["refused", "light", "heavy"]
_REFUSED: _Survey = "refused"
_LIGHT: _Survey = "light"
_HEAVY: _Survey = "heavy"


@dataclass(frozen=True, slots=True)
class Result:
    """What is stored of a return value: the beginning of its JSON in whole characters, and the size of all.

    `unavailable` says why there is no JSON at all; the task has succeeded nevertheless (R20)."""

    data: bytes
    size: int
    truncated: bool
    unavailable: str | None = None


def dumps(value: Any) -> bytes:
    """`value` as UTF-8 JSON, compact, keys in their order. Raises PayloadError naming the first offender."""
    if type(value) is dict and _SAFE_SCALARS.issuperset(map(type, value.values())):
        return _written(value)
    return _dump_beginning(value, None)[0]


def loads(data: bytes) -> Any:
    """The value of JSON that `dumps` could have written. Raises PayloadError for everything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise PayloadError(f"not JSON: {error}", "$", describe(data)) from None
    if type(value) is dict and _SAFE_SCALARS.issuperset(map(type, value.values())):
        return value
    if _survey(value, _fit_64_bits, inf) is _REFUSED:
        _check_as_read(value, data)
    return value


def dump_arguments(arguments: Mapping[str, Any], limit: int | None = None) -> bytes:
    """The payload of a task. Raises PayloadError; PayloadTooLarge above `limit` bytes, without a copy."""
    if not isinstance(arguments, Mapping):
        raise PayloadError("a payload is an object of named arguments", "$", describe(arguments))
    value = arguments if type(arguments) is dict else dict(arguments)
    if limit is None:
        return dumps(value)
    data, size = _dump_beginning(value, limit)
    if size > limit:
        raise PayloadTooLarge(size, limit)
    return data


def load_arguments(data: bytes) -> dict[str, Any]:
    """The named arguments in a payload. Raises PayloadError if it is no JSON object."""
    value = loads(data)
    if type(value) is not dict:
        raise PayloadError("a payload is a JSON object of named arguments", "$", describe(data))
    return value


def dump_result(value: Any, limit: int) -> Result:
    """What is stored of a return value, at most `limit` bytes. Never raises, whatever the value does."""
    try:
        data, size = _dump_beginning(value, limit)
    except PayloadError as error:
        return _no_result(str(error))
    except MemoryError:
        return _no_result("not enough memory to write it as JSON")
    except BaseException as error:  # noqa: BLE001 - a tzinfo of the value may raise SystemExit as well
        told = error_text(error)
        return _no_result(f"writing it as JSON raised {told.class_name}: {told.message}")
    if size <= limit:
        return Result(data, size, truncated=False)
    return Result(_whole_characters(data[: max(0, limit)]), size, truncated=True)


def _no_result(reason: str) -> Result:
    return Result(b"", 0, truncated=False, unavailable=clip(reason, _REASON_BYTES))


def _whole_characters(data: bytes) -> bytes:
    return data.decode("utf-8", "ignore").encode()


def _written(value: Any) -> bytes:
    """orjson's text of what has been surveyed, or is flat."""
    try:
        return orjson.dumps(value, _as_text, _OPTIONS)
    except orjson.JSONEncodeError as error:
        raise first_offence(value) or PayloadError(str(error)) from error


def _as_text(value: Any) -> str:
    # orjson asks here about every kind it doesn't write by itself; a TypeError is how it is told no.
    if type(value) in TIMES:
        return str(value.isoformat())
    raise TypeError


def _survey(root: Any, floats_pass: Callable[[list[float]], bool], light: float) -> _Survey:
    """A look at everything in `root`: kinds, depth, floats, and the weight in characters and items.

    The weight ends it on `a = [a, a]`, which has 2^250 items within the depth allowed."""
    weight, level = 0, [root]
    for _ in range(MAX_DEPTH + 1):
        kinds = set(map(type, level))
        if not kinds <= _ACCEPTED:
            return _REFUSED
        if float in kinds and not floats_pass([item for item in level if type(item) is float]):
            return _REFUSED
        if not kinds.isdisjoint(_SIZED):
            weight += sum(map(len, [item for item in level if type(item) in _SIZED]))
        if weight > light:
            return _HEAVY
        if kinds.isdisjoint(CONTAINERS):
            return _LIGHT
        level = _children(level)
    return _REFUSED


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


def _fit_64_bits(floats: list[float]) -> bool:
    return min(floats) > _MIN and max(floats) < _END


def _check_as_read(value: Any, data: bytes) -> None:
    """Refuses what is too deep to be written again, and integers of the text that were read as floats."""
    offence = first_offence(value)
    if offence:
        raise offence
    for token in _STRING_OR_NUMBER.finditer(data):
        digits, fraction, exponent = token.groups()
        if digits is None or fraction or exponent:
            continue
        if len(digits) > _INT_CHARACTERS or not INT_MIN <= int(digits) < INT_END:
            raise PayloadError(BEYOND_64_BITS, "$", describe(digits))


def _dump_beginning(value: Any, keep: int | None) -> tuple[bytes, int]:
    """The JSON (if it is large, only its first `keep` bytes) and the size of the whole.

    A large value is written piece by piece, each forgotten in turn. Written whole it could be the allocation
    that kills the process after the task has done its work: orjson 3.13 reserves eight bytes a character, and
    dies of SIGSEGV without memory."""
    survey = _survey(value, _are_finite, _LIGHT_WEIGHT)
    if survey is _REFUSED:
        raise first_offence(value) or PayloadError("changed while it was looked at; pass data of one thread")
    if survey is _LIGHT:
        data = _written(value)
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
    stack = [_parts(value)]
    while stack:
        part = next(stack[-1], None)
        if part is None:
            stack.pop()
        elif type(part) is bytes:
            yield part
        elif len(stack) >= MAX_DEPTH and type(part) in CONTAINERS:
            raise PayloadError(TOO_DEEP)
        else:
            stack.append(_parts(part))


def _parts(value: Any) -> Iterator[Any]:
    """Bytes that are ready, and the texts and containers still to be opened, in order."""
    kind = type(value)
    if kind is str:
        return _parts_of_text(value)
    if kind is dict:
        return _parts_of_object(value)
    if kind in CONTAINERS:
        return _parts_of_array(value)
    return iter((_scalars([value]),))


def _parts_of_text(text: str) -> Iterator[Any]:
    yield b'"'
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield _written(text[start : start + _PIECE_CHARACTERS])[1:-1]
    yield b'"'


def _parts_of_object(mapping: dict[Any, Any]) -> Iterator[Any]:
    yield b"{"
    separator = b""
    for key, item in mapping.items():
        if type(key) is not str:
            raise PayloadError("a key is not a plain str")
        yield separator
        yield key
        yield b":"
        yield item if type(item) in _SIZED else _scalars([item])
        separator = b","
    yield b"}"


def _parts_of_array(items: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    yield b"["
    separator = b""
    for start in range(0, len(items), _PIECE_ITEMS):
        run = list(items[start : start + _PIECE_ITEMS])
        if _SIZED.isdisjoint(map(type, run)):
            yield separator + _scalars(run)
        else:
            for position, item in enumerate(run):
                yield b"," if position else separator
                yield item if type(item) in _SIZED else _scalars([item])
        separator = b","
    yield b"]"


def _scalars(run: list[Any]) -> bytes:
    """Values that contain no others, separated by commas."""
    if _survey(run, _are_finite, inf) is _REFUSED:
        raise PayloadError("a value that JSON doesn't carry")
    return _written(run)[1:-1]
