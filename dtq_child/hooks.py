"""The application's own functions around children and tasks. One that fails is logged and changes nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dtq_child.context import CurrentTask
from dtq_child.errors import Interruption

ChildHook = Callable[[], object]
TaskStartHook = Callable[[CurrentTask], object]
TaskEndHook = Callable[[CurrentTask, BaseException | None], object]
H = TypeVar("H", bound=Callable[..., object])

log = logging.getLogger("dtq.hooks")


@dataclass(frozen=True, slots=True)
class Hooks:
    """Those of one App, each list in the order of registration.

    `child_start` and `child_stop` are called without arguments, in each child; `task_start` with the
    CurrentTask; `task_end` with it and the exception that left the handler, or None."""

    child_start: list[ChildHook] = field(default_factory=list)
    child_stop: list[ChildHook] = field(default_factory=list)
    task_start: list[TaskStartHook] = field(default_factory=list)
    task_end: list[TaskEndHook] = field(default_factory=list)


def checked(hook: H) -> H:
    """`hook` itself. Raises TypeError for what cannot be one."""
    if inspect.iscoroutinefunction(hook):
        raise TypeError(
            f"the hook {hook.__qualname__} is async, nobody would await it: write it with plain def"
        )
    return hook


def run(hooks: Sequence[Callable[..., object]], *arguments: object) -> None:
    """Calls all of them. Whatever one raises is logged, SystemExit too, and the next one is called.

    An Interruption passes: it comes from outside, through the hook, and means the task that the hook is
    part of."""
    for hook in hooks:
        try:
            hook(*arguments)
        except Interruption:
            raise
        except BaseException:  # a hook is not asked whether the process lives on
            log.exception("the hook %s failed; it changes no outcome", getattr(hook, "__qualname__", hook))
