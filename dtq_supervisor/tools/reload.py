"""`dtq reload`: asks the supervisor of this machine for a reload, and with --wait says how it went."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtq_child.errors import BadConfiguration
from dtq_child.settings import load
from dtq_supervisor import notice
from dtq_supervisor.notice import Ended, NoNotice, Told

LOOK_S = 0.05

Verbs = Any
"""argparse does not name the type of its subparsers."""


class CannotAsk(Exception):
    """There is nobody to ask, or it does not answer."""


def add_verb(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "reload",
        help="new code and settings for the supervisor of this machine, without losing work",
        description="Sends SIGHUP to the supervisor. Exit code 0: asked, or with --wait: whatever begins now "
        "begins in the new code. 1: it did not come to that, and why.",
    )
    verb.add_argument("--pid", type=int, metavar="N", help="the supervisor's pid, instead of a pidfile")
    verb.add_argument("--pidfile", metavar="FILE", help="(DTQ_PIDFILE, or pidfile of the TOML file)")
    verb.add_argument("--config", metavar="FILE", help="a TOML file that names the pidfile (DTQ_CONFIG)")
    verb.add_argument("--wait", type=float, metavar="SECONDS", help="wait so long for the outcome")
    verb.add_argument("--json", action="store_true", help="the outcome as JSON")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        pid = args.pid or _pid_of(_pidfile(args))
        asked = time.monotonic()
        notice.read(pid)  # before the signal: it would end a process that is no supervisor
        os.kill(pid, signal.SIGHUP)
        if args.wait is None:
            return _say(args, f"asked pid {pid} to reload", {"pid": pid, "outcome": "asked"})
        return _report(args, pid, _outcome(pid, asked, asked + args.wait))
    except (CannotAsk, NoNotice, PermissionError, ProcessLookupError) as error:
        return _say(args, str(error), {"outcome": "failed", "reason": str(error)}, code=1)


def _pidfile(args: argparse.Namespace) -> str:
    if args.pidfile:
        return str(args.pidfile)
    try:
        loaded = load({"config": args.config}, os.environ, reader="", read_text=_read_text)
    except BadConfiguration as error:
        raise CannotAsk("; ".join(error.problems)) from error
    if loaded.settings.pidfile is None:
        raise CannotAsk(
            "which supervisor? give --pid, --pidfile, or set DTQ_PIDFILE as the supervisor has it"
        )
    return loaded.settings.pidfile


def _pid_of(path: str) -> int:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise CannotAsk(f"pidfile {path}: {getattr(error, 'strerror', None) or error}") from None


def _outcome(pid: int, asked: float, until: float) -> Ended | Told:
    """How the reload that began after we asked has ended; where it is, if it has not. Raises NoNotice."""
    while True:
        told = notice.read(pid)
        if told.last and told.last.begun >= asked:
            return told.last
        if time.monotonic() >= until:
            return told
        time.sleep(LOOK_S)


def _report(args: argparse.Namespace, pid: int, how: Ended | Told) -> int:
    if isinstance(how, Told):
        shown = ", ".join(f"{count} of g{generation}" for generation, count in how.children) or "none"
        words = f"not done within {args.wait:g} s: {how.phase or 'not begun'}; children: {shown}"
        return _say(args, words, {"pid": pid, "outcome": "late", "reason": words}, code=1)
    facts = {"pid": pid, **asdict(how)}
    if how.outcome == "done":
        return _say(args, f"reloaded: generation {how.generation} is at work", facts)
    words = f"the reload failed, generation {how.generation} works on: {how.reason}"
    return _say(args, words, facts, code=1)


def _say(args: argparse.Namespace, words: str, facts: dict[str, Any], code: int = 0) -> int:
    if args.json:
        print(json.dumps(facts))
    else:
        print(f"dtq reload: {words}", file=sys.stderr if code else sys.stdout)
    return code


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
