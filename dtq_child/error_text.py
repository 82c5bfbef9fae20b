"""Turns any exception, however odd, into bounded text that is valid UTF-8 (R18).

Written by hand, because the standard `traceback` module renders a chain whole: ten thousand causes take
seconds, a 50 MB message is copied several times, deep groups recurse, and newer versions run the exception's
own code to offer suggestions. Here only `str(exc)` and `__notes__` run foreign code, each behind a guard.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

MESSAGE_BYTES = 4096
TRACEBACK_BYTES = 16384

_CLASS_NAME_BYTES = 200
_LINE_BYTES = 1000
_CUT = " …[cut]"
_FIRST_FRAMES, _LAST_FRAMES = 10, 20
_NEWEST_LINKS, _OLDEST_LINKS = 8, 4
_LINKS_FOLLOWED = 100_000
_EXCEPTIONS_SHOWN = 40
_GROUP_MEMBERS, _GROUP_DEPTH = 10, 4
_NOTES = 5

_CAUSED = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"

# The built-in accessors. A subclass may shadow these names with anything, a property that raises included.
_qualname_of = type.__dict__["__qualname__"].__get__
_module_of = type.__dict__["__module__"].__get__
_mro_of = type.__dict__["__mro__"].__get__
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_suppressed_of = BaseException.__dict__["__suppress_context__"].__get__
_traceback_of = BaseException.__dict__["__traceback__"].__get__
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_syntax = {
    name: SyntaxError.__dict__[name].__get__
    for name in ("filename", "lineno", "offset", "end_offset", "end_lineno", "text")
}

# Named as the documentation names them, and like the verdicts that exist only as text (PoisonTask …).
_BARE_MODULES = ("builtins", "dtq_child.errors")


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An exception as text: `message` at most 4 KB, `traceback` at most 16 KB of UTF-8."""

    class_name: str
    message: str
    traceback: str


def clip(text: str | bytes, limit_bytes: int) -> str:
    """The longest beginning of `text` within `limit_bytes` of UTF-8; what UTF-8 cannot carry is escaped."""
    limit = max(0, limit_bytes)
    if isinstance(text, bytes):
        text = text[:limit].decode("utf-8", "backslashreplace")
    # A character is at least a byte, so a 50 MB text is cut before it is encoded. `str.`: subclasses may lie.
    head = str.encode(str.__getitem__(text, slice(limit)), "utf-8", "backslashreplace")
    return head[:limit].decode("utf-8", "ignore")


def clip_middle(text: str, limit_bytes: int) -> str:
    """`text` in at most `limit_bytes` of UTF-8, a quarter from its head and the rest from its tail."""
    if _fits(text, limit_bytes):
        return clip(text, limit_bytes)
    mark = f"\n… {len(text)} characters in all, the middle left out …\n"
    room = limit_bytes - len(mark.encode())
    if room <= 0:
        return clip(text, limit_bytes)
    head = clip(text, room // 4)
    tail = str.encode(text[-room:], "utf-8", "backslashreplace")[-(room - len(head.encode())) :]
    return head + mark + tail.decode("utf-8", "ignore")


def _fits(text: str, limit_bytes: int) -> bool:
    # Four bytes more than allowed: a cut drops at most three, so what was cut is still seen to be too long.
    return len(clip(text, limit_bytes + 4).encode()) <= limit_bytes


def class_name(cls: type) -> str:
    """`module.qualname`; built-in classes and dtq's own errors by their bare name."""
    module, qualname = _module_of(cls), _qualname_of(cls)
    return plain_name(f"{module}.{qualname}" if isinstance(module, str) else qualname)


def plain_name(name: str) -> str:
    """A class's name as somebody wrote it (`builtins.ValueError`), as `class_name` says it (`ValueError`)."""
    for module in _BARE_MODULES:
        name = name.removeprefix(f"{module}.")
    return clip(name, _CLASS_NAME_BYTES)


def class_names(exc: BaseException) -> tuple[str, ...]:
    """The names of the exception's class and all its bases, nearest first: what `never=` is matched with."""
    return tuple(class_name(cls) for cls in _mro_of(type(exc)))


def error_text(exc: BaseException) -> ErrorText:
    """`exc` as text. Never raises, never recurses without bound; only a `__str__` that hangs can hang it."""
    return ErrorText(class_name(type(exc)), _message(exc, MESSAGE_BYTES), _traceback(exc))


def _message(exc: BaseException, limit_bytes: int) -> str:
    try:
        text = str(exc)
    except BaseException as error:  # noqa: BLE001 - a __str__ may raise SystemExit; the first error counts
        return f"<{class_name(type(exc))} whose __str__ raised {class_name(type(error))}>"
    if _fits(text, limit_bytes):
        return clip(text, limit_bytes)
    return clip(text, limit_bytes - len(_CUT.encode())) + _CUT


def _traceback(exc: BaseException) -> str:
    try:
        return clip_middle("\n".join(_Rendering().lines(exc, 0)), TRACEBACK_BYTES)
    except Exception as error:  # noqa: BLE001 - out of memory: an error without its traceback is still an error
        return f"<the traceback could not be rendered: {class_name(type(error))}>"


class _Rendering:
    """One traceback being written; `left` bounds the exceptions it shows, however they are nested."""

    def __init__(self) -> None:
        self.left = _EXCEPTIONS_SHOWN

    def lines(self, exc: BaseException, depth: int) -> Iterator[str]:
        """The exception after everything that led to it, as Python prints it."""
        chain, hidden = _chain(exc)
        for position, (link, relation) in enumerate(reversed(chain)):
            if hidden and position == _OLDEST_LINKS:
                yield from ("", f"… {hidden} more exceptions of this chain left out …", "")
            if self.left <= 0 and not (depth == 0 and link is exc):
                yield "… an exception left out …"
                continue
            self.left -= 1
            yield from _frames(_traceback_of(link))
            if issubclass(type(link), SyntaxError):
                yield from _where_syntax(link)
            yield from _headline(link)
            if issubclass(type(link), BaseExceptionGroup):
                yield from self._members(link, depth)
            if relation:
                yield from ("", relation, "")

    def _members(self, group: Any, depth: int) -> Iterator[str]:
        members = _members_of(group)
        shown = members[:_GROUP_MEMBERS] if depth < _GROUP_DEPTH else ()
        for number, member in enumerate(shown, 1):
            yield f"  ┌ {number} of {len(members)}"
            for line in self.lines(member, depth + 1):
                yield f"  │ {line}"
        if len(members) > len(shown):
            yield f"  … {len(members) - len(shown)} more exceptions of this group left out …"


def _chain(exc: BaseException) -> tuple[list[tuple[BaseException, str]], int]:
    """(exception, relation to the one raised after it), newest first; how many the middle lost."""
    links = islice(_links(exc), _LINKS_FOLLOWED)
    newest = list(islice(links, _NEWEST_LINKS + _OLDEST_LINKS))
    rest = list(links)
    if not rest:
        return newest, 0
    everything = newest + rest
    return everything[:_NEWEST_LINKS] + everything[-_OLDEST_LINKS:], len(rest)


def _links(exc: BaseException) -> Iterator[tuple[BaseException, str]]:
    relation, seen = "", {id(exc)}
    while True:
        yield exc, relation
        cause, context = _cause_of(exc), _context_of(exc)
        # C code has been seen to leave a plain str as the cause, which the interpreter doesn't check.
        if issubclass(type(cause), BaseException):
            following, relation = cause, _CAUSED
        elif issubclass(type(context), BaseException) and not _suppressed_of(exc):
            following, relation = context, _DURING
        else:
            return
        if id(following) in seen:
            return
        exc = following
        seen.add(id(exc))


def _where_syntax(exc: BaseException) -> Iterator[str]:
    """The place that a SyntaxError names, which no frame shows: the file was not executed."""
    told = {name: read(exc) for name, read in _syntax.items()}
    file, number, text = told["filename"], told["lineno"], told["text"]
    if type(file) is not str and type(number) is not int:
        return
    yield clip(f'  File "{file if type(file) is str else "<string>"}", line {_number(number)}', _LINE_BYTES)
    if type(text) is not str:
        return
    text = text[:_LINE_BYTES].rstrip()
    source = text.lstrip(" \n\f")
    yield clip(f"    {source}", _LINE_BYTES)
    # Counted from 1, in the line as it stands in the file.
    first = _number(told["offset"]) - 1 - (len(text) - len(source))
    if not 0 <= first <= len(source):
        return
    same_line = told["end_lineno"] == number if type(told["end_lineno"]) is int else False
    last = first + _number(told["end_offset"]) - _number(told["offset"]) if same_line else first + 1
    under = "".join(sign if sign.isspace() else " " for sign in source[:first])
    yield clip(f"    {under}{'^' * max(1, min(last, len(source)) - first)}", _LINE_BYTES)


def _number(value: object) -> int:
    return value if type(value) is int else 0


def _headline(exc: BaseException) -> Iterator[str]:
    message = _message(exc, _LINE_BYTES)
    yield f"{class_name(type(exc))}: {message}" if message else class_name(type(exc))
    try:
        notes = [note for note in getattr(exc, "__notes__", ())[:_NOTES] if isinstance(note, str)]
    except BaseException:  # noqa: BLE001 - whatever stands in the place of notes: it is true without them
        notes = []
    yield from (clip(note, _LINE_BYTES) for note in notes)


def _frames(first: TracebackType | None) -> Iterator[str]:
    places: list[tuple[FrameType, int]] = []
    while first is not None:
        places.append((first.tb_frame, first.tb_lineno))
        first = first.tb_next
    if not places:
        return
    yield "Traceback (most recent call last):"
    hidden = len(places) - _FIRST_FRAMES - _LAST_FRAMES
    if hidden <= 0:
        yield from _rendered(places)
        return
    yield from _rendered(places[:_FIRST_FRAMES])
    yield f"  … {hidden} frames left out …"
    yield from _rendered(places[-_LAST_FRAMES:])


def _rendered(places: list[tuple[FrameType, int]]) -> Iterator[str]:
    for frame, line_number in places:
        code = frame.f_code
        yield clip(f'  File "{code.co_filename}", line {line_number}, in {code.co_name}', _LINE_BYTES)
        source = _source_line(frame, line_number)
        if source:
            yield clip(f"    {source}", _LINE_BYTES)


def _source_line(frame: FrameType, line_number: int) -> str:
    try:
        linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
        return linecache.getline(frame.f_code.co_filename, line_number).strip()
    except Exception:  # noqa: BLE001 - a module's own loader may fail in any way; file and line are said
        return ""
