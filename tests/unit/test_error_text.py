"""However odd the exception, its text is bounded, readable and in time (R18)."""

from __future__ import annotations

import ctypes
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtq_child.error_text import (
    MESSAGE_BYTES,
    TRACEBACK_BYTES,
    ErrorText,
    class_name,
    class_names,
    clip,
    clip_middle,
    error_text,
    plain_name,
)
from dtq_child.errors import RejectTask

any_text = st.text(st.characters(exclude_categories=()), max_size=50)  # lone surrogates included
HERE = __name__


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as exc:  # noqa: BLE001 - SystemExit is one of the cases
        return exc
    raise AssertionError("it was to raise")


def thrown(exc: BaseException) -> BaseException:
    def throw() -> None:
        raise exc

    return caught(throw)


def told(exc: BaseException) -> ErrorText:
    """The text, with what must hold for every one of them checked."""
    started = time.monotonic()
    text = error_text(exc)
    assert time.monotonic() - started < 2
    assert len(text.message.encode()) <= MESSAGE_BYTES
    assert len(text.traceback.encode()) <= TRACEBACK_BYTES
    assert len(text.class_name.encode()) <= 200
    return text


# Cutting text -------------------------------------------------------------------------------------


@given(any_text, st.integers(-1, 120))
def test_a_clipped_text_is_the_longest_beginning_that_fits(text: str, limit: int) -> None:
    whole = text.encode("utf-8", "backslashreplace")
    kept = clip(text, limit).encode()
    assert whole.startswith(kept)
    assert len(kept) <= max(0, limit)
    assert len(kept) > min(limit, len(whole)) - 4


@given(st.binary(max_size=50), st.integers(0, 120))
def test_bytes_are_clipped_to_readable_text(data: bytes, limit: int) -> None:
    assert len(clip(data, limit).encode()) <= limit
    assert clip(data, 1000) == data.decode("utf-8", "backslashreplace")


@given(st.text(max_size=300) | any_text, st.integers(0, 300))
def test_a_text_that_fits_is_kept_and_a_longer_one_keeps_both_ends(text: str, limit: int) -> None:
    clean = text.encode("utf-8", "backslashreplace").decode()
    cut = clip_middle(text, limit)
    assert len(cut.encode()) <= limit
    if len(clean.encode()) <= limit:
        assert cut == clean
    elif limit > 100:
        head, mark, tail = cut.partition("\n… ")
        assert mark
        assert clean.startswith(head)
        assert clean.endswith(tail.partition(" …\n")[2])


# Names --------------------------------------------------------------------------------------------


class Outer:
    class Inner(KeyError):
        """A nested class."""


def test_a_class_is_named_by_module_and_qualname_but_builtins_and_our_own_bare() -> None:
    assert class_name(ValueError) == "ValueError"
    assert class_name(RejectTask) == "RejectTask"
    assert class_name(Outer.Inner) == f"{HERE}.Outer.Inner"
    assert plain_name("builtins.ValueError") == "ValueError"
    assert plain_name("dtq_child.errors.RejectTask") == "RejectTask"
    assert plain_name("shop.builtins.X") == "shop.builtins.X"
    bases = ("KeyError", "LookupError", "Exception", "BaseException", "object")
    assert class_names(Outer.Inner()) == (f"{HERE}.Outer.Inner", *bases)


class Liar(type):
    def __getattribute__(cls, name: str) -> object:
        if name in ("__module__", "__qualname__", "__name__", "__mro__"):
            raise SystemExit(name)
        return super().__getattribute__(name)


class Lying(Exception, metaclass=Liar):
    __module__ = 5  # type: ignore[assignment]


def test_a_class_that_lies_about_its_name_is_named_all_the_same() -> None:
    assert told(thrown(Lying("x"))).class_name == "Lying"
    assert class_names(Lying()) == ("Lying", "Exception", "BaseException", "object")


# Ordinary errors ----------------------------------------------------------------------------------


def test_an_error_tells_class_message_and_the_way_to_it() -> None:
    text = told(caught(lambda: int("twelve")))
    assert text.class_name == "ValueError"
    assert text.message == "invalid literal for int() with base 10: 'twelve'"
    lines = text.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.rpartition(", in ")[2] for line in lines if " line " in line] == ["caught", "<lambda>"]
    assert '    text = told(caught(lambda: int("twelve")))' in lines
    assert lines[-1] == "ValueError: invalid literal for int() with base 10: 'twelve'"


def test_an_error_without_message_or_frames_is_its_class() -> None:
    assert told(SystemExit()) == ErrorText("SystemExit", "", "SystemExit")
    assert told(SystemExit(0)).message == "0"


def test_causes_come_first_contexts_too_and_hidden_ones_not() -> None:
    def with_cause() -> None:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise OSError("second") from first

    def with_context() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise OSError("second")  # noqa: B904 - that is the case

    def with_none() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise OSError("second") from None

    cause, context, none = (told(caught(each)).traceback for each in (with_cause, with_context, with_none))
    assert cause.index("KeyError: 'first'") < cause.index("direct cause") < cause.index("OSError: second")
    assert (
        context.index("KeyError: 'first'")
        < context.index("During handling")
        < context.index("OSError: second")
    )
    assert "KeyError" not in none


def test_notes_are_shown() -> None:
    noted = ValueError("x")
    noted.add_note("while resizing a.jpg")
    assert told(noted).traceback == "ValueError: x\nwhile resizing a.jpg"


def test_a_syntax_error_shows_the_file_and_the_line_that_cannot_be_read() -> None:
    for code, shown in (
        ("ok = 1\n    def x(:\n", None),
        ("def x(:\n", "    def x(:\n          ^"),
        ("if 1:\n\tx = = 2\n", None),
        ("x = 'é' 5five\n", None),
        ("f(a b)\n", "    f(a b)\n      ^^^"),
        ("(\n", "    (\n    ^"),
    ):
        error = caught(lambda code=code: compile(code, "/srv/shop/tasks.py", "exec"))  # type: ignore[misc]
        lines = told(error).traceback
        assert f'  File "/srv/shop/tasks.py", line {error.lineno}\n' in lines  # type: ignore[attr-defined]
        assert lines.splitlines()[-1].startswith(("SyntaxError: ", "IndentationError: "))
        python = "".join(traceback.format_exception_only(error)).splitlines()
        assert lines.splitlines()[-len(python) : -1] == python[:-1]
        assert shown is None or shown in lines


@pytest.mark.parametrize(
    "details",
    [
        (None, None, None, None),
        ("file.py", None, None, None),
        (object(), "one", [], b"text"),
        ("f" * 10**6, 10**300, 7, "x" * 10**7),
        ("file.py", 1, -(10**300), "x"),
        ("file.py", 1, 3, "x = (", 1, 10**300),
        ("file.py", 1, 3, "\ud800" * 5, -1, -1),
    ],
    ids=range(7),
)
def test_a_syntax_error_may_name_any_place(details: Any) -> None:
    text = told(SyntaxError("odd", details))
    assert text.traceback.splitlines()[-1].startswith("SyntaxError: odd")
    assert len(text.traceback.encode()) < 4000


# Odd ones -----------------------------------------------------------------------------------------


class StrRaises(Exception):
    def __str__(self) -> str:
        raise SystemExit("from __str__")

    __repr__ = __str__


class StrIsNone(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307 - that is the case


class NeedsArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)

    def __reduce__(self) -> str:
        raise RuntimeError("not to be pickled")


class Shouting(str):
    def encode(self, *_: object) -> bytes:
        raise SystemExit("encode")

    def __getitem__(self, _: object) -> str:
        raise SystemExit("getitem")

    def __len__(self) -> int:
        raise SystemExit("len")


class StrIsShouting(Exception):
    def __str__(self) -> str:
        return Shouting("aha" * 3000)


class Shadowing(Exception):
    __cause__ = "text"  # type: ignore[assignment]
    __context__ = 5  # type: ignore[assignment]

    @property
    def __traceback__(self) -> None:  # type: ignore[override]
        raise SystemExit("traceback")

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise SystemExit("notes")


@pytest.mark.parametrize(
    ("exc", "message"),
    [
        (StrRaises(), f"<{HERE}.StrRaises whose __str__ raised SystemExit>"),
        (StrIsNone(), f"<{HERE}.StrIsNone whose __str__ raised TypeError>"),
        (NeedsArguments(1, 2), "1"),
        (Shadowing("seen"), "seen"),
        (ValueError("lone \ud800 surrogate"), "lone \\ud800 surrogate"),
        (ValueError("null \0 byte"), "null \0 byte"),
        (KeyError(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_odd_exception_is_told_all_the_same(exc: BaseException, message: str) -> None:
    text = told(thrown(exc))
    assert text.message == message
    assert text.traceback.splitlines()[-1].startswith(text.class_name)


def test_a_message_of_a_lying_text_class_is_cut_all_the_same() -> None:
    assert told(thrown(StrIsShouting())).message.startswith("ahaaha")


@pytest.mark.parametrize(
    ("character", "times"),
    [("x", 50_000_000), ("é", 5_000_000), ("\U0001f600", 5_000_000), ("\ud800", 5_000)],
)
def test_a_message_of_any_size_is_cut_and_says_so(character: str, times: int) -> None:
    text = told(thrown(ValueError(character * times)))
    assert text.message.endswith("…[cut]")
    assert len(text.message.encode()) > MESSAGE_BYTES - 10


def test_a_message_that_just_fits_is_not_marked() -> None:
    assert told(ValueError("é" * 2048)).message == "é" * 2048
    assert told(ValueError("é" * 2048 + "x")).message.endswith("…[cut]")
    assert told(ValueError("é" * 2049)).message.endswith("…[cut]")


def test_ten_thousand_causes_show_both_ends_of_the_chain() -> None:
    exc: BaseException = thrown(ValueError("the root"))
    for number in range(10_000):
        following = thrown(RuntimeError(f"link {number}"))
        following.__cause__ = exc
        exc = following
    traceback = told(exc).traceback
    assert "ValueError: the root" in traceback
    assert "9989 more exceptions of this chain left out" in traceback
    assert traceback.endswith("RuntimeError: link 9999")


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert told(one).traceback.count("ValueError: ") == 2


def test_a_deep_recursion_shows_both_ends_of_the_stack() -> None:
    def dive(depth: int) -> None:
        dive(depth + 1)

    traceback = told(caught(lambda: dive(0))).traceback
    assert "frames left out" in traceback
    assert traceback.splitlines()[-1].startswith("RecursionError: maximum recursion depth exceeded")


def test_at_the_end_of_the_stack_there_is_room_enough() -> None:
    """The handler may have been called deep down; its error is told from there."""

    def dive(left: int) -> ErrorText:
        return dive(left - 1) if left else told(thrown(ValueError("deep")))

    frame, used = sys._getframe(), 0
    while frame := frame.f_back:  # type: ignore[assignment]
        used += 1
    assert dive(sys.getrecursionlimit() - used - 60).message == "deep"


def test_a_group_shows_its_members() -> None:
    members = [thrown(ValueError("a")), ExceptionGroup("more", [OSError("b")])]
    group = BaseExceptionGroup("two things", members)
    text = told(thrown(group))
    assert text.class_name == "ExceptionGroup"
    assert text.message == "two things (2 sub-exceptions)"
    for line in ("  ┌ 1 of 2", "  │ ValueError: a", "  │   │ OSError: b"):
        assert line in text.traceback.splitlines()


def test_groups_of_any_shape_are_bounded_and_the_outermost_is_always_named() -> None:
    wide = ExceptionGroup("wide", [OSError(str(number)) for number in range(100_000)])
    deep: ExceptionGroup[Exception] = ExceptionGroup("deep", [OSError("bottom")])
    for _ in range(10_000):
        deep = ExceptionGroup("deep", [deep])
    bushy: ExceptionGroup[Exception] = ExceptionGroup("bushy", [OSError("leaf")])
    for _ in range(30):
        bushy = ExceptionGroup("bushy", [bushy] * 20)
    last = RuntimeError("the one that was raised")
    last.__cause__ = bushy
    assert "99990 more exceptions of this group" in told(thrown(wide)).traceback
    assert "ExceptionGroup: deep" in told(thrown(deep)).traceback
    assert told(thrown(last)).traceback.endswith("RuntimeError: the one that was raised")


def test_a_cause_that_is_no_exception_is_passed_over() -> None:
    """orjson's error has been seen with a plain str for a cause; C code may set it to anything."""
    error = caught(lambda: orjson.dumps(object()))
    cause = "plain text"
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(cause))
    ctypes.pythonapi.PyException_SetCause(ctypes.py_object(error), ctypes.py_object(cause))
    seen: object = error.__cause__
    assert seen == "plain text"
    assert told(error).class_name == "TypeError"


class Loader:
    def get_source(self, _: str) -> str:
        raise RuntimeError("no source today")


def test_a_module_whose_loader_fails_costs_only_the_source_lines() -> None:
    code = compile("def throw():\n    raise ValueError('x')\n", "<from the archive>", "exec")
    module: dict[str, object] = {"__name__": "archived", "__loader__": Loader()}
    exec(code, module)
    traceback = told(caught(module["throw"])).traceback  # type: ignore[arg-type]
    assert '  File "<from the archive>", line 2, in throw' in traceback
    assert traceback.endswith("ValueError: x")


def test_a_line_of_a_megabyte_is_cut() -> None:
    code = compile(f"raise ValueError({'x' * 1_000_000!r})", "y" * 100_000, "exec")
    assert told(caught(lambda: exec(code, {}))).class_name == "ValueError"
