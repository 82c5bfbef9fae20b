"""The daemon's command line, generated from the settings table, and its exit codes (DESIGN §7)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import setproctitle

from dtq_child import prctl, std_streams
from dtq_child.errors import BadConfiguration
from dtq_child.keys import new_worker_id
from dtq_child.memory import resident_bytes
from dtq_child.setting import SUPERVISOR, mask_url
from dtq_child.settings import Loaded, Settings, describe, load
from dtq_child.version import VERSION
from dtq_supervisor import cgroup, descriptors, embedded, logs
from dtq_supervisor.assembly import assemble, rows_for
from dtq_supervisor.configuration import limits_of
from dtq_supervisor.cpus import default_procs
from dtq_supervisor.flags import add_arguments
from dtq_supervisor.listener import OFF, CannotListen, Listener, listen
from dtq_supervisor.logs import say
from dtq_supervisor.notify import Invitation, notifier
from dtq_supervisor.pidfile import Pidfile, PidfileLocked
from dtq_supervisor.platform_check import unsupported, untested
from dtq_supervisor.resizing import most_for
from dtq_supervisor.signals import SignalNotes

EXIT_REFUSED, EXIT_ERROR, EXIT_LOCKED, EXIT_CONFIG = 69, 70, 73, 78
LOG_CLOSE_S = 0.2

Flags = Mapping[str, Any]

log = logging.getLogger("dtq.supervisor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a supervisor and returns its exit code. A wrong command line raises SystemExit(2)."""
    std_streams.open_closed()
    flags = vars(_parser().parse_args(arguments))
    if reason := unsupported():
        return _refuse(reason)
    try:
        loaded = _load(flags)
    except BadConfiguration as error:
        return _refuse(*error.problems)
    if flags["check"]:
        return _show(loaded)
    signals = SignalNotes()
    # A pid that others read is one that they may send signals to.
    signals.install()
    try:
        with _pidfile(loaded.settings.pidfile):
            return _supervise(loaded, flags, signals)
    except (PidfileLocked, CannotListen) as error:
        _complain(str(error))
        return EXIT_LOCKED if isinstance(error, PidfileLocked) else EXIT_REFUSED
    except BadConfiguration as error:
        return _refuse(*error.problems)


def _load(flags: Flags) -> Loaded:
    return load(flags, os.environ, reader=SUPERVISOR, read_text=_read_text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtq-supervisor", description="Keeps a pool of task processes at work.", allow_abbrev=False
    )
    add_arguments(parser, SUPERVISOR)
    return parser


@contextlib.contextmanager
def _pidfile(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    try:
        held = Pidfile(path).__enter__()
    except OSError as error:
        raise BadConfiguration([f"pidfile {path}: it cannot be written: {error.strerror}"]) from error
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def _supervise(loaded: Loaded, flags: Flags, signals: SignalNotes) -> int:
    """From a checked configuration to the exit code."""
    worker_id = new_worker_id()
    settings = loaded.settings
    writer = logs.set_up(settings.log_level, settings.log_format, worker_id)
    try:
        return _run(loaded, flags, worker_id, signals)
    except (BadConfiguration, CannotListen):
        raise
    except Exception:
        log.exception("uncaught error: the children finish what they do, and end")
        return EXIT_ERROR
    finally:
        writer.close(LOG_CLOSE_S)


def _run(loaded: Loaded, flags: Flags, worker_id: str, signals: SignalNotes) -> int:
    setproctitle.setproctitle("dtq-supervisor: master")
    for warning in loaded.warnings:
        log.warning("%s", warning)
    prctl.become_subreaper()
    # Before anything is started that could inherit it.
    manager = notifier(Invitation.take(os.environ, os.getpid()))
    procs, origin = (loaded.settings.procs, "as told") if loaded.settings.procs else default_procs()
    most, found = _make_room(procs)
    with _listening(loaded) as listener, _private_redis(loaded.settings) as redis:
        if redis is not None:
            say("info", "embedded", {"url": redis.url})
        settings = _in_place(loaded.settings, redis)
        _introduce(settings, worker_id, procs, origin)
        if listener is not None:
            say("info", "endpoint", {"place": listener.shown})
        return assemble(
            settings,
            procs=procs,
            most=most,
            worker_id=worker_id,
            signals=signals,
            notifier=manager,
            read=lambda: _in_place(_load(flags).settings, redis),
            embedded=redis,
            listener=listener,
            descriptor_limit=found,
        ).run()


@contextlib.contextmanager
def _private_redis(settings: Settings) -> Iterator[embedded.EmbeddedRedis | None]:
    redis = embedded.start() if settings.embedded else None
    try:
        yield redis
    finally:
        if redis is not None:
            redis.stop()


def _make_room(procs: int) -> tuple[int, int | None]:
    """How many children there may ever be, and what `descriptors.make_room` says. Raises BadConfiguration."""
    most = most_for(procs)
    try:
        return most, descriptors.make_room(most, rows_for(most))
    except BadConfiguration:  # no room to grow, perhaps enough to start
        return procs, descriptors.make_room(procs, rows_for(procs))


@contextlib.contextmanager
def _listening(loaded: Loaded) -> Iterator[Listener | None]:
    """A place that was asked for and is taken ends the start; the default one, which every other supervisor
    of this machine has, too, does not. Raises CannotListen."""
    bind = loaded.settings.metrics_bind
    if bind == OFF:
        yield None
        return
    try:
        listener = listen(bind)
    except CannotListen as error:
        if loaded.origins["metrics_bind"] != "default":
            raise
        say("warning", "no_endpoint", {"reason": str(error)})
        yield None
        return
    try:
        yield listener
    finally:
        listener.close()


def _in_place(settings: Settings, redis: embedded.EmbeddedRedis | None) -> Settings:
    """With the address of the Redis that we have started ourselves."""
    return settings if redis is None else dataclasses.replace(settings, redis_url=redis.url)


def _introduce(settings: Settings, worker_id: str, procs: int, origin: str) -> None:
    facts = {"version": VERSION, "app": settings.app, "worker": worker_id, "procs": procs}
    say("info", "starting", {**facts, "procs_origin": origin})
    queues, redis = ", ".join(settings.queues), mask_url(settings.redis_url)
    say("info", "place", {"redis": redis, "queues": queues, "prefix": settings.key_prefix})
    if python := untested():
        say("warning", "untested_python", {"python": python})
    if file := cgroup.oom_group():
        say("warning", "oom_group", {"file": str(file)})
    if limits_of(settings).least() and not resident_bytes():
        say("warning", "memory_unknown")


def _show(loaded: Loaded) -> int:
    sys.stdout.write(describe(_with_procs(loaded)) + "\n")
    for warning in loaded.warnings:
        _complain(warning)
    return 0


def _with_procs(loaded: Loaded) -> Loaded:
    """With the number of children that not naming one comes to here, and why."""
    if loaded.settings.procs:
        return loaded
    procs, origin = default_procs()
    origins = {**loaded.origins, "procs": f"{loaded.origins['procs']}: {origin}"}
    return Loaded(dataclasses.replace(loaded.settings, procs=procs), origins, loaded.warnings)


def _refuse(*problems: str) -> int:
    for problem in problems:
        _complain(problem)
    return EXIT_CONFIG


def _complain(line: str) -> None:
    sys.stderr.write(f"dtq-supervisor: {line}\n")


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
