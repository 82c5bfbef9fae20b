"""The templates that run, and their reports as events. For the main thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dtq_child.errors import BadConfiguration
from dtq_supervisor.events import (
    EXIT_CONFIG,
    EXIT_IMPORT,
    Event,
    Fact,
    Forked,
    ForkFailed,
    TemplateFailed,
    TemplateGone,
    TemplateUp,
)
from dtq_supervisor.logs import say
from dtq_supervisor.process import Exit, Processes, signal_name
from dtq_supervisor.templates import TemplateHandle

CLOSED_S = 0.5
"""A template that closed its socket is about to end; one that does not is of no use."""

Start = Callable[[int, bool], TemplateHandle]
"""Starts the template of a generation, with the candidate settings or those that count; raises OSError."""


class Nursery:
    """All templates by generation, the dying ones included until their exit is collected."""

    def __init__(self, start: Start, app: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._start, self._app, self._clock = start, app, clock
        self._handles: dict[int, TemplateHandle] = {}
        self._closed_at: dict[int, float] = {}
        self._given_up: set[int] = set()
        self._events: deque[Event] = deque()
        self._task_types: dict[int, Mapping[str, Any]] = {}
        self.processes = Processes(self.drain, clock)

    # What is asked of templates.

    def start(self, generation: int, *, candidate: bool = False) -> None:
        try:
            handle = self._start(generation, candidate)
        except OSError as error:
            self._events.append(TemplateFailed(generation, f"it could not be started: {error}"))
            return
        self._handles[generation] = handle
        self.processes.add_template(generation, handle.pid)

    def fork(self, generation: int, slot: int, life: int, row: int) -> None:
        handle = self._handles.get(generation)
        if handle is None:
            self._events.append(ForkFailed(slot, life, "its template is gone"))
        else:
            handle.fork(slot, life, row)

    def kill(self, generation: int) -> None:
        if generation in self._handles:
            self._handles[generation].kill()

    def retire(self, generation: int) -> None:
        if generation in self._handles:
            self._handles[generation].quit()

    def kill_all(self) -> None:
        for handle in self._handles.values():
            handle.kill()

    def running(self) -> bool:
        return bool(self._handles)

    # What they say.

    def task_types(self, generation: int) -> Mapping[str, Any] | None:
        """As that template declared them; None if it has not imported the application, or is gone."""
        return self._task_types.get(generation)

    def filenos(self) -> list[int]:
        """Readable when there is something to drain."""
        return [handle.fileno() for handle in self._handles.values() if not handle.closed]

    def drain(self) -> bool:
        """Reads all that has arrived. True: some fork requests are unanswered."""
        for handle in self._handles.values():
            self._hear(handle)
        return any(handle.unanswered for handle in self._handles.values() if not handle.closed)

    def take(self) -> list[Event]:
        """What was heard, in its order, each once."""
        events = list(self._events)
        self._events.clear()
        return events

    def collected(self, generation: int, end: Exit) -> None:
        """Its process has ended: what it had said is heard, and nothing more will come."""
        handle = self._handles.pop(generation, None)
        if handle is None:
            return
        self._hear(handle)
        handle.collected(end.code)
        handle.close()
        self._closed_at.pop(generation, None)
        self._task_types.pop(generation, None)
        self._events.append(TemplateGone(generation, how(end)))

    def _hear(self, handle: TemplateHandle) -> None:
        for message in handle.receive():
            self._translate(handle, message)
        if handle.gone and handle.generation not in self._given_up:
            closed_at = self._closed_at.setdefault(handle.generation, self._clock())
            # Its end says more than its silence, so that is waited for, but not for ever.
            if not handle.only_closed or self._clock() - closed_at >= CLOSED_S:
                self._give_up(handle.generation, handle.gone)

    def _give_up(self, generation: int, reason: str, exit_code: int = EXIT_IMPORT) -> None:
        self._given_up.add(generation)
        self._events.append(TemplateFailed(generation, reason, exit_code))

    def _translate(self, handle: TemplateHandle, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "forked":
                self.processes.add_child(message["slot"], message["life"], message["pid"])
                self._events.append(Forked(message["slot"], message["life"], message["pid"]))
            case "fork_failed":
                reason = str(message.get("error", "no reason given"))
                self._events.append(ForkFailed(message["slot"], message["life"], reason))
            case "imported":
                self._imported(handle, message)
            case "import_failed":
                self._give_up(handle.generation, *_failure(message))

    def _imported(self, handle: TemplateHandle, message: Mapping[str, Any]) -> None:
        told = message.get("task_types")
        types = self._task_types[handle.generation] = told if isinstance(told, dict) else {}
        facts: dict[str, Fact] = {
            "generation": handle.generation,
            "pid": handle.pid,
            "app": self._app,
            "seconds": float(message.get("seconds") or 0.0),
            "types": len(types),
        }
        if told is None:
            say("info", "not_preloaded", facts)
        else:
            say("info", "imported", facts)
        if told is not None and not types:
            say("warning", "no_task_types", {"app": self._app})
        self._events.append(TemplateUp(handle.generation))


def _failure(message: Mapping[str, Any]) -> tuple[str, int]:
    """What the import raised, with its traceback, and the exit code that it is worth at the first start."""
    kind, words = str(message.get("error_class", "an error")), str(message.get("message", ""))
    if kind.rpartition(".")[2] == BadConfiguration.__name__:
        return words, EXIT_CONFIG  # it says the fix; where it was raised helps nobody
    return f"{kind}: {words}\n{message.get('traceback', '')}".rstrip(), EXIT_IMPORT


def how(end: Exit) -> str:
    """How a process ended, as half a sentence."""
    if end.signal is not None:
        return f"ended by {signal_name(end.signal)}"
    if end.code is not None:
        return f"exit code {end.code}"
    return "nobody knows how"
