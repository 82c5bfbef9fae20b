"""JSON in and out: what goes through comes back equal, or is refused with the path to the value (R18, R20).

Documented exceptions, and no others: a tuple comes back as a list; a datetime, date or time as its
`isoformat()` text; a UUID as its text. All that is neither plain JSON nor one of these is refused, subclasses
too (enums, named tuples, `SafeString`, numpy's floats), because what they add would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import orjson

from dtq_child.error_text import clip, error_text
from dtq_child.errors import PayloadError, PayloadTooLarge
from dtq_child.json_text import REFUSED, is_flat, survey, write, write_beginning
from dtq_child.refusal import BEYOND_64_BITS, INT_END, INT_MIN, describe, first_offence

_REASON_BYTES = 1000
_INT_CHARACTERS = 20
_MIN, _END = float(INT_MIN), float(INT_END)
_STRING_OR_NUMBER = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?[0-9]+)(\.[0-9]+)?([eE][+-]?[0-9]+)?', re.DOTALL
)


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
    return write(value) if is_flat(value) else write_beginning(value, None)[0]


def loads(data: bytes) -> Any:
    """The value of JSON that `dumps` could have written. Raises PayloadError for everything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise PayloadError(f"not JSON: {error}", "$", describe(data)) from None
    if not is_flat(value) and survey(value, _fit_64_bits, inf) is REFUSED:
        _check_as_read(value, data)
    return value


def dump_arguments(arguments: Mapping[str, Any], limit: int | None = None) -> bytes:
    """The payload of a task. Raises PayloadError; PayloadTooLarge above `limit` bytes, without a copy."""
    if not isinstance(arguments, Mapping):
        raise PayloadError("a payload is an object of named arguments", "$", describe(arguments))
    value = arguments if type(arguments) is dict else dict(arguments)
    if limit is None:
        return dumps(value)
    data, size = write_beginning(value, limit)
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
        data, size = write_beginning(value, limit)
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


def _fit_64_bits(floats: list[float]) -> bool:
    # orjson reads integers above 64 bits as floats; these have their size.
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
