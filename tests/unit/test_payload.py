"""The round trip or the refusal: whatever goes in comes back equal, or is named with its path (R18, R20)."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import tracemalloc
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtq_child import json_text
from dtq_child.errors import PayloadError, PayloadTooLarge
from dtq_child.payload import dump_arguments, dump_result, dumps, load_arguments, loads
from dtq_child.refusal import MAX_DEPTH, describe


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Number(float):
    __slots__ = ()


class Point(NamedTuple):
    x: int = 1


@dataclasses.dataclass
class Item:
    price: int = 1


class Hostile:
    """Every question about it raises, and not even an Exception."""

    def __repr__(self) -> str:
        raise SystemExit("repr")

    __str__ = __repr__

    def __len__(self) -> int:
        raise KeyboardInterrupt

    def __eq__(self, other: object) -> bool:
        raise SystemExit("eq")

    __hash__ = None  # type: ignore[assignment]


class HostileZone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        raise SystemExit("utcoffset")

    def dst(self, _: datetime | None) -> timedelta:
        raise SystemExit("dst")

    def tzname(self, _: datetime | None) -> str:
        raise SystemExit("tzname")


def nested(depth: int, kind: type = list) -> Any:
    value: Any = kind()
    for _ in range(depth - 1):
        value = {"a": value} if kind is dict else kind([value])
    return value


# What may go in, by another way than the code's: recursively, by equality and not by tables -------

zones = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates included
odd = st.sampled_from(
    [b"x", {1}, Decimal(1), Colour.RED, Level.LOW, Text("t"), Number(1), Point(), Item(), object(), 1j, ...]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-(2**65), 2**65),
    st.floats(),
    any_text,
    st.datetimes(timezones=st.none() | zones),
    st.dates(),
    st.times(),
    st.uuids(),
)
keys = st.one_of(st.text(max_size=3), st.text(max_size=3), any_text, st.integers(), st.none())


def trees(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda below: st.one_of(
            st.lists(below, max_size=4),
            st.lists(below, max_size=3).map(tuple),
            st.dictionaries(keys, below, max_size=4),
        ),
        max_leaves=12,
    )


values = st.one_of(trees(scalars, keys), trees(scalars | odd, st.text(max_size=3)))


def is_clean(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and is_clean(key) and is_plain(item) for key, item in value.items())
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is str:
        return is_clean(value)
    if kind is int:
        return -(2**63) <= int(value) < 2**64
    if kind is float:
        return math.isfinite(value)
    return value is None or kind in (bool, datetime, date, time, uuid.UUID)


def as_documented(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_documented(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_documented(item) for item in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return str(value) if isinstance(value, uuid.UUID) else value


def exactly(value: Any) -> str:
    """Equality that tells 1 from 1.0 and True, 0.0 from -0.0, and the order of keys."""
    return repr(value)


@given(values)
@example(-0.0)
@example([5e-324, 1.7976931348623157e308, 1e16, 0.1])
@example([-(2**63), 2**64 - 1])
@example(["\0", "\u2028", "\U0001f600", "é"])
@example({"a": float("nan")})
@example([2.0**64, -(2.0**63)])
def test_a_value_comes_back_exactly_or_is_refused_with_its_path(value: Any) -> None:
    if is_plain(value):
        assert exactly(loads(dumps(value))) == exactly(as_documented(value))
    else:
        with pytest.raises(PayloadError) as refused:
            dumps(value)
        assert refused.value.path.startswith("$")
        assert is_clean(str(refused.value))


@given(st.datetimes(timezones=st.none() | zones) | st.dates() | st.times())
def test_moments_come_back_as_text_that_is_the_same_moment(moment: Any) -> None:
    text = loads(dumps(moment))
    assert type(moment).fromisoformat(text) == moment


@given(values, st.integers(1, 9))
@example([math.nan, 1], 1)
@example({"a": Level.LOW, "b": 1}, 1)
@example({"a": 1, 2: 1}, 1)
def test_writing_in_pieces_is_writing_whole(value: Any, weight: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_PIECE_WEIGHT", weight)
        patch.setattr(json_text, "_PIECE_ITEMS", 2)
        whole = dump_result(value, 10**6)
        patch.setattr(json_text, "_LIGHT_WEIGHT", -1)
        assert dump_result(value, 10**6) == whole


def test_an_accepted_value_can_be_written_again_however_deep() -> None:
    for kind in (list, tuple, dict):
        deepest = dumps(nested(MAX_DEPTH, kind))
        assert dumps(loads(deepest)) == deepest
        with pytest.raises(PayloadError, match="nested deeper than 250"):
            dumps(nested(MAX_DEPTH + 1, kind))
        with pytest.raises(PayloadError, match="nested deeper than 250"):
            dumps(nested(100_000, kind))
    for deep in (b"[" * 251 + b"]" * 251, b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(PayloadError, match=r"nested deeper than 250|depth limit"):
            loads(deep)


def test_depth_is_counted_alike_in_values_too_large_to_be_written_whole() -> None:
    text = "x" * 70_000
    deep: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        deep = [text, deep]
    assert loads(dumps(deep)) == deep
    assert str(dump_result([text, deep], 100).unavailable).endswith("<list of 0>)")
    assert "nested deeper than 250" in str(dump_result([text, deep], 100).unavailable)


# The refusals -------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "path", "says"),
    [
        ({"items": [1, 2, 3, {"price": NAN}]}, "$.items[3].price", "no NaN"),
        ({"a": [1, [2], {}], "b": [(), {"c": NAN}]}, "$.b[1].c", "no NaN"),
        (math.inf, "$", "no infinity"),
        ([1, [-math.inf]], "$[1][0]", "no infinity"),
        ({"a": 2**64}, "$.a", "64 bits"),
        ({"a": -(2**63) - 1}, "$.a", "64 bits"),
        ({"a": 10**5000}, "$.a", "an int of 16610 bits"),
        ({"a": "x\ud800"}, "$.a", "lone surrogate"),
        ({"a": {"\udfff": 1}}, "$.a", "lone surrogate"),
        ({"a": {1: 2}}, "$.a", "the key 1 is not a plain str"),
        ({None: 1}, "$", "the key None"),
        ({Text("a"): 1}, "$", "is not a plain str"),
        ({"two words": NAN}, "$['two words']", "NaN"),
        ({"ключ": NAN}, "$.ключ", "NaN"),
        ({"x" * 9999: NAN}, "$['" + "x" * 199 + "…]", "NaN"),
        ({"a": (1, {2})}, "$.a[1]", "set is not JSON; pass a list"),
        ({"a": b"\xff"}, "$.a", "base64"),
        ({"a": bytearray(b"x")}, "$.a", "base64"),
        ({"a": Decimal("1.10")}, "$.a", "pass str(value) (value: Decimal('1.10'))"),
        ({"a": timedelta(1)}, "$.a", "total_seconds()"),
        ({"a": Colour.RED}, "$.a", "pass its .value"),
        ({"a": Level.LOW}, "$.a", "pass its .value"),
        ({"a": Text("t")}, "$.a", "pass str(value)"),
        ({"a": Number(1)}, "$.a", "pass float(value)"),
        ({"a": Point()}, "$.a", "pass tuple(value)"),
        ({"a": OrderedDict()}, "$.a", "pass dict(value)"),
        ({"a": Item()}, "$.a", "Item is not JSON"),
        ({"a": Hostile()}, "$.a", "Hostile object"),
        ({"a": orjson.Fragment(b"{bad")}, "$.a", "Fragment is not JSON"),
        ({"a": memoryview(b"x")}, "$.a", "memoryview is not JSON"),
        ({"a": lambda: 1}, "$.a", "function is not JSON"),
        ({"a": ValueError}, "$.a", "type is not JSON"),
    ],
)
def test_a_refusal_names_the_path_the_value_and_the_fix(value: Any, path: str, says: str) -> None:
    with pytest.raises(PayloadError) as refused:
        dumps(value)
    assert refused.value.path == path
    assert says in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_long_path_shows_its_two_ends() -> None:
    value: Any = {"end": {1}}
    for _ in range(200):
        value = [value]
    with pytest.raises(PayloadError) as refused:
        dumps({"start": value})
    assert refused.value.path == f"$.start{'[0]' * 10}…(179 levels)…{'[0]' * 11}.end"


def test_a_cycle_is_named_where_it_closes() -> None:
    branching: list[Any] = []
    branching += [branching, branching]
    loop: dict[str, Any] = {"a": [1]}
    loop["a"].append({"back": loop})
    for value, path in ((branching, "$[0]"), (loop, "$.a[1].back")):
        with pytest.raises(PayloadError, match="a cycle") as refused:
            dumps(value)
        assert refused.value.path == path
        assert dump_result(value, 100).unavailable == str(refused.value)


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = [1, {"a": 2}]
    assert loads(dumps([shared, shared, (shared,)])) == [shared, shared, [shared]]


def test_subclasses_of_moments_are_refused_for_what_they_add() -> None:
    class Stamp(datetime):
        nanosecond = 7

    with pytest.raises(PayloadError, match=r"isoformat\(\)"):
        dumps([Stamp(2020, 1, 1)])


def test_an_offset_keeps_its_seconds() -> None:
    moment = datetime(1900, 1, 1, tzinfo=timezone(timedelta(minutes=9, seconds=21)))
    assert loads(dumps(moment)) == "1900-01-01T00:00:00+00:09:21"
    assert loads(dumps(time(1, 2, tzinfo=timezone.utc))) == "01:02:00+00:00"  # noqa: UP017 - as users write it


# Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"{}x",
        b"NaN",
        b"1e999",
        b"\xff",
        b'"\xff"',
        b'"\\ud800"',
        b"'a'",
        b"\xef\xbb\xbf{}",
        b"{1:2}",
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(data: bytes) -> None:
    with pytest.raises(PayloadError, match="not JSON") as refused:
        loads(data)
    assert refused.value.reason
    assert refused.value.value_repr == repr(data)


def test_a_refusal_shows_only_the_head_of_what_was_read() -> None:
    with pytest.raises(PayloadError) as refused:
        loads(b"{" + b"\xff" * 1_000_000)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "18446744073709551616",
        "-9223372036854775809",
        "1" + "0" * 400,
        '{"a": ["1", 1.5, 99999999999999999999]}',
    ],
)
def test_an_integer_that_would_turn_into_a_float_is_refused(text: str) -> None:
    if "0" * 400 in text:
        with pytest.raises(PayloadError, match="infinity"):
            loads(text.encode())
        return
    with pytest.raises(PayloadError, match="64 bits"):
        loads(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "[1.8446744073709552e19, 18446744073709551615, -9223372036854775808]",
        '["99999999999999999999", 1e300, "\\"99999999999999999999"]',
        '{"99999999999999999999": 18446744073709551616.0}',
        "[0.99999999999999999999999, 1e20, 1E+25, -3e19]",
    ],
)
def test_large_floats_and_digits_in_text_are_not_taken_for_integers(text: str) -> None:
    assert loads(text.encode()) == json.loads(text)


@given(st.binary(max_size=40) | any_text.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_bytes_are_a_value_that_can_be_written_again_or_a_refusal(data: bytes) -> None:
    try:
        value = loads(data)
    except PayloadError:
        return
    assert exactly(loads(dumps(value))) == exactly(value)


@given(
    trees(
        st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)), st.text()
    )
)
def test_numbers_are_read_as_they_are_written_or_refused(value: Any) -> None:
    text = json.dumps(value)
    try:
        read = loads(text.encode())
    except PayloadError:
        assert not is_plain(value)
        return
    assert exactly(read) == exactly(as_documented(value))


# Payloads -----------------------------------------------------------------------------------------


def test_a_payload_is_an_object_of_named_arguments() -> None:
    assert dump_arguments({"path": "a.jpg", "width": 64}) == b'{"path":"a.jpg","width":64}'
    assert load_arguments(b'{"path":"a.jpg","width":64}') == {"path": "a.jpg", "width": 64}
    assert dump_arguments(MappingProxyType({"a": 1})) == b'{"a":1}'
    assert dump_arguments(OrderedDict(a=1)) == b'{"a":1}'
    for data in (b"[1]", b"null", b"1", b'"{}"', b"\xff", b""):
        with pytest.raises(PayloadError):
            load_arguments(data)
    for arguments in ([1], None, "a", Hostile()):
        with pytest.raises(PayloadError, match="named arguments"):
            dump_arguments(arguments)  # type: ignore[arg-type]


def test_a_payload_at_its_limit_passes_and_one_byte_more_is_refused_with_its_size() -> None:
    arguments = {"text": "é" * 100}
    size = len(dump_arguments(arguments))
    assert len(dump_arguments(arguments, size)) == size
    with pytest.raises(PayloadTooLarge) as refused:
        dump_arguments(arguments, size - 1)
    assert (refused.value.size, refused.value.limit) == (size, size - 1)


@pytest.fixture
def measured() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("measured")
def test_huge_values_are_measured_without_a_copy() -> None:
    huge = {"a": ["x" * 40_000_000], "b": list(range(100_000)), "y" * 20_000_000: None}
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(PayloadTooLarge) as refused:
        dump_arguments(huge, 1_048_576)
    result = dump_result(huge, 8192)
    assert tracemalloc.get_traced_memory()[1] - before < 6_000_000
    size = len(dumps(huge))
    assert refused.value.size == result.size == size
    assert result.truncated
    assert result.data == b'{"a":["' + b"x" * 8185


# Results ------------------------------------------------------------------------------------------


@given(values, st.integers(0, 60))
def test_a_result_is_stored_whole_cut_or_not_at_all(value: Any, limit: int) -> None:
    result = dump_result(value, limit)
    assert len(result.data) <= limit
    result.data.decode()
    if not is_plain(value):
        assert result.unavailable
        assert (result.data, result.size, result.truncated) == (b"", 0, False)
        return
    whole = dumps(value)
    assert result.unavailable is None
    assert result.size == len(whole)
    assert result.truncated == (len(whole) > limit)
    assert whole.startswith(result.data)
    assert len(result.data) > min(limit, len(whole)) - 4


@pytest.mark.parametrize(
    "value",
    [
        Hostile(),
        [Hostile()],
        {"a": Hostile()},
        datetime(2020, 1, 1, tzinfo=HostileZone()),
        {"x" * 2_000_000: Hostile()},
        ["x" * 2_000_000, datetime(2020, 1, 1, tzinfo=HostileZone())],
        ["x" * 2_000_000, {"a": NAN}],
        ["x" * 2_000_000, {1: 2}],
        ["x" * 2_000_000, nested(250)],
        ["x" * 2_000_000 + "\ud800"],
        nested(100_000),
        nested(100_000, dict),
    ],
    ids=lambda _: "",
)
def test_no_value_raises_out_of_its_result(value: Any) -> None:
    result = dump_result(value, 100)
    assert result.unavailable
    assert len(result.unavailable.encode()) <= 1000
    assert result.data == b""


def test_the_reason_of_a_large_value_has_its_path_too() -> None:
    unavailable = dump_result({"a": ["x" * 2_000_000, {"b": NAN}]}, 100).unavailable
    assert unavailable is not None
    assert unavailable.startswith("$.a[1].b: ")


def test_without_memory_the_result_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(json_text, "write", exhausted)
    assert "memory" in str(dump_result({"a": 1}, 100).unavailable)


@given(values)
def test_a_description_is_short_clean_and_runs_no_code_of_the_value(value: Any) -> None:
    shown = describe(value)
    assert is_clean(shown)
    assert len(shown.encode()) <= 1000
