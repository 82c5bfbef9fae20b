"""What an exception that left a handler means for its task."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

from dtq_child import interrupter as interrupting
from dtq_child import loop
from dtq_child.error_text import class_name, class_names, error_text
from dtq_child.errors import RejectTask, RetryTask, ShutdownRequested, SoftTimeout, TaskCancelled
from dtq_child.interrupter import Interrupter
from dtq_child.outcome import Cancelled, Happening, Raised, Released, asked_delay_ms
from dtq_child.refusal import describe

# Frames of these are no part of what the handler did.
_OWN_FILES = frozenset({interrupting.__file__, loop.__file__})
# The built-in accessor: a class of the application may have anything under this name.
_traceback = BaseException.__dict__["__traceback__"]

log = logging.getLogger("dtq.child")


def what_was_raised(interrupter: Interrupter, was_async: bool) -> Happening:
    """The interrupter's error, which is let go of.

    TaskCancelled and ShutdownRequested are what their names say only if such an order reached this execution;
    anybody may raise the class, and then it is an error like any other. What the error says about itself is
    not believed: its class may lie, or raise, wherever Python asks the object."""
    error = interrupter.error
    assert error is not None
    interrupter.forget()
    if was_async and _is(error, asyncio.CancelledError) and interrupter.delivered:
        error = _interruption_behind(error, interrupter)
    if _is(error, TaskCancelled) and interrupter.interrupted_by(TaskCancelled):
        return Cancelled()
    if _is(error, ShutdownRequested) and interrupter.interrupted_by(ShutdownRequested):
        return Released()
    _strip_own_frames(error)
    return Raised(
        error_text(error),
        class_names(error),
        wants_retry=_is(error, RetryTask),
        retry_delay_s=_delay_of(error) if _is(error, RetryTask) else None,
        rejected=_is(error, RejectTask),
        soft=_is(error, SoftTimeout) and interrupter.interrupted_by(SoftTimeout),
    )


def _is(error: BaseException, kind: type[BaseException]) -> bool:
    # isinstance() asks the error for its __class__, which is code of the application.
    return issubclass(type(error), kind)


def _delay_of(error: BaseException) -> float | None:
    """What a RetryTask asks for; None, the policy's then, if that is no time to wait."""
    try:
        # A subclass may have an __init__ of its own that doesn't set it.
        asked: float | None = getattr(error, "delay", None)
        if asked is None or asked_delay_ms(asked) is not None:
            return asked
        log.warning("RetryTask(delay=%s) is no time to wait: the policy's delay is used", describe(asked))
    except BaseException as again:  # noqa: BLE001 - whatever its code does, it is this task's failure
        log.warning(
            "the delay of a RetryTask cannot be read: %s; the policy's is used", class_name(type(again))
        )
    return None


def _interruption_behind(cancelled: BaseException, interrupter: Interrupter) -> BaseException:
    """What reached an async handler as a cancellation, and left it as one."""
    _strip_own_frames(cancelled)
    interruption = interrupter.delivered[-1]
    interruption.__cause__ = cancelled
    return interruption


def _strip_own_frames(error: BaseException) -> None:
    """Leaves the frames between the handler's first and its last in the traceback."""
    first: TracebackType | None = _traceback.__get__(error)
    while first is not None and first.tb_frame.f_code.co_filename in _OWN_FILES:
        first = first.tb_next
    last = first
    while last is not None and last.tb_next is not None:
        if last.tb_next.tb_frame.f_code.co_filename in _OWN_FILES:
            last.tb_next = None
        last = last.tb_next
    _traceback.__set__(error, first)
