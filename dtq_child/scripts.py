"""The only loader of scripts: one `.lua` file is one atomic change; `--!include name` pulls in `_name.lua`,
each once."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dtq_child.connection import Link, NoSuchScript
from dtq_child.errors import BadConfiguration
from dtq_child.keys import GROUP, Keys
from dtq_child.settings import Settings

YEAR_S = 31536000
_NEEDS = re.compile(r"^--!(include|lazily) (\w+)$", re.MULTILINE)
_EXPORTS = re.compile(r"^--!exports (.+)$", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*$\n?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Constants:
    """Settings that scripts need on every call; written into their text, so they cost nothing on the wire."""

    retention_s: int
    succeeded_retention_s: int
    result_retention_s: int
    idem_ttl_s: int
    dlq_maxlen: int
    audit_maxlen: int
    recent_max: int
    max_attempts: int
    max_crashes: int

    @classmethod
    def of(cls, settings: Settings) -> Constants:
        def seconds(value: float) -> int:
            return max(1, round(value))

        succeeded = settings.succeeded_retention_s
        return cls(
            retention_s=seconds(settings.task_retention_s),
            succeeded_retention_s=seconds(settings.task_retention_s if succeeded is None else succeeded),
            result_retention_s=seconds(settings.result_retention_s),
            idem_ttl_s=seconds(settings.idem_ttl_s),
            dlq_maxlen=settings.dlq_maxlen,
            audit_maxlen=settings.audit_maxlen,
            recent_max=settings.recent_max,
            max_attempts=settings.max_attempts,
            max_crashes=settings.max_crashes,
        )

    def as_lua(self) -> str:
        head = f"local KEEP_S = {max(self.retention_s, YEAR_S)}\n"
        return head + "\n".join(
            f"local {name.upper()} = {getattr(self, name)}" for name in self.__dataclass_fields__
        )


def _quoted(text: str) -> str:
    if not text.isprintable() or any(c in text for c in "'\\"):
        raise BadConfiguration(
            [f"key prefix {text!r}: quotes, backslashes and control characters are not allowed"]
        )
    return f"'{text}'"


@functools.cache
def source(name: str) -> str:
    """The file as it stands."""
    return (resources.files("dtq_child") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def names() -> list[str]:
    """Every script, without the parts that are only included."""
    files = (entry.name for entry in (resources.files("dtq_child") / "lua").iterdir())
    return sorted(name[:-4] for name in files if name.endswith(".lua") and not name.startswith("_"))


def assemble(name: str, present: frozenset[str] = frozenset()) -> str:
    """The script with what it needs before it, each part once, in order of need; comments left out.

    `--!include x` puts the part there as it is. `--!lazily x` wraps it into a function that is called when
    one of its exports is: a server makes the closures of a script anew at every call, which for rarely used
    parts costs more than the work itself (25 of 60 µs a turn before). A part must not be lazy for one and
    plain for another of the same script if it keeps a state of its own."""
    done = set(present)
    parts: list[str] = []

    def add(file: str) -> None:
        if file in done:
            return
        done.add(file)
        for how, needed in _NEEDS.findall(source(file)):
            if how == "include":
                add(f"_{needed}")
            elif not done & {f"_{needed}", f"lazy _{needed}"}:
                parts.append(_lazy(f"_{needed}", frozenset(done)))
                done.add(f"lazy _{needed}")
        parts.append(_COMMENT.sub("", source(file)))

    add(name)
    return "\n".join(parts)


def _lazy(file: str, present: frozenset[str]) -> str:
    exports = _EXPORTS.findall(source(file))[0].split()
    table = ", ".join(f"{name} = {name}" for name in exports)
    stubs = "".join(f"local function {name}(...) return part{file}().{name}(...) end\n" for name in exports)
    return f"local function part{file}()\n{assemble(file, present)}\nreturn {{ {table} }}\nend\n{stubs}"


class Scripts:
    """The scripts for one prefix and one set of constants."""

    def __init__(self, keys: Keys, constants: Constants) -> None:
        self.keys = keys
        self._head = f"local P, GROUP = {_quoted(keys.prefix)}, '{GROUP}'\n{constants.as_lua()}\n"
        self._texts: dict[str, bytes] = {}
        self._shas: dict[str, str] = {}

    def text(self, name: str) -> bytes:
        if name not in self._texts:
            self._texts[name] = (self._head + assemble(name)).encode()
        return self._texts[name]

    def sha(self, name: str) -> str:
        if name not in self._shas:
            self._shas[name] = hashlib.sha1(self.text(name), usedforsecurity=False).hexdigest()
        return self._shas[name]

    def load(self, link: Link, name: str) -> None:
        link.call("SCRIPT", "LOAD", self.text(name))

    def run(self, link: Link, name: str, keys: list[str], args: list[bytes | str | int]) -> Any:
        """Runs a script; KEYS[1] (`<prefix>nil`) and ARGV[1] (the event base) are put before what is given.

        NOSCRIPT means that nothing ran, so loading it and calling once more is no resend. Raises
        BrokerError."""
        command = (self.sha(name), len(keys) + 1, self.keys.nil, *keys, event_base(), *args)
        try:
            return link.call("EVALSHA", *command)
        except NoSuchScript:
            self.load(link, name)
            return link.call("EVALSHA", *command)


def event_base() -> str:
    """24 hex digits; a script appends a counter of 8 and has the ids of its events."""
    return os.urandom(12).hex()
