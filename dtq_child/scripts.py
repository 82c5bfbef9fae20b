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
_FUNCTION = re.compile(r"^local function (?P<name>\w+)(?:.* end\n|.*\n(?:(?!end$).*\n)*end\n)", re.MULTILINE)
_WORD = re.compile(r"\w+")
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

    def as_lua(self) -> dict[str, str]:
        values = {name.upper(): str(getattr(self, name)) for name in self.__dataclass_fields__}
        return {"KEEP_S": str(max(self.retention_s, YEAR_S)), **values}


def _names_as_lua(keys: Keys) -> dict[str, str]:
    """The keys that are one of a kind, by what scripts call them."""
    names = {
        "SCHEDULE": keys.schedule,
        "CLAIMED": keys.claimed,
        "DEAD_LETTERS": keys.dead_letter,
        "AUDIT": keys.audit,
        "CANCELLED": keys.cancelled,
        "RECENT": keys.recent,
        "QUEUES": keys.queues,
        "HINT": keys.hint,
        "EVENTS": keys.events,
    }
    return {name: _quoted(key) for name, key in names.items()}


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


@functools.cache
def assemble(name: str) -> str:
    """The script with what it needs before it, each part once, in order of need; comments and unused
    functions left out.

    `--!include x` puts the part there as it is. `--!lazily x` wraps it into a function that is called when
    one of its exports is. Both for the same reason: a server makes the closures of a script anew at every
    call, which costs more than the work itself if the script carries all that it hardly ever uses. A part
    must not be lazy for one and plain for another of the same script if it keeps a state of its own."""
    return _used(_gather(name, frozenset()))


def _gather(name: str, present: frozenset[str]) -> list[Block]:
    done = set(present)
    blocks: list[Block] = []

    def add(file: str) -> None:
        if file in done:
            return
        done.add(file)
        for how, needed in _NEEDS.findall(source(file)):
            if how == "include":
                add(f"_{needed}")
            elif not done & {f"_{needed}", f"lazy _{needed}"}:
                blocks.extend(
                    _lazy(f"_{needed}", frozenset(file for file in done if not file.startswith("lazy")))
                )
                done.add(f"lazy _{needed}")
        blocks.extend(_blocks(_COMMENT.sub("", source(file))))

    add(name)
    return blocks


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a script: a function of the top level by its name, or what stands between two ("").
    `own`: names that it makes for itself."""

    name: str
    text: str
    own: frozenset[str] = frozenset()


def _blocks(text: str) -> list[Block]:
    """The functions of the top level begin with `local function` and end with `end`, both at the margin."""
    found: list[Block] = []
    at = 0
    for match in _FUNCTION.finditer(text):
        found += [Block("", text[at : match.start()]), Block(match["name"], match[0])]
        at = match.end()
    return [*found, Block("", text[at:])]


def _lazy(file: str, present: frozenset[str]) -> list[Block]:
    exports = _EXPORTS.findall(source(file))[0].split()
    table = ", ".join(f"{name} = {name}" for name in exports)
    inner = [*_gather(file, present), Block("", f"return {{ {table} }}\n")]
    own = frozenset(block.name for block in inner if block.name)
    part = Block(f"part{file}", f"local function part{file}()\n{_used(inner)}end\n", own)
    return [part] + [
        Block(name, f"local function {name}(...) return part{file}().{name}(...) end\n") for name in exports
    ]


def _used(blocks: list[Block]) -> str:
    """The blocks without the functions that nothing after them names."""
    kept: list[str] = []
    words: set[str] = set()
    for block in reversed(blocks):
        if not block.name or block.name in words:
            kept.append(block.text)
            words.update(set(_WORD.findall(block.text)) - block.own)
    return "".join(reversed(kept))


class Scripts:
    """The scripts for one prefix and one set of constants."""

    def __init__(self, keys: Keys, constants: Constants) -> None:
        self.keys = keys
        known = {
            "P": _quoted(keys.prefix),
            "GROUP": f"'{GROUP}'",
            **constants.as_lua(),
            **_names_as_lua(keys),
        }
        self._known = known
        self._places = re.compile(rf"(?<![\w'])({'|'.join(known)})(?![\w'])")
        self._texts: dict[str, bytes] = {}
        self._shas: dict[str, str] = {}

    def text(self, name: str) -> bytes:
        if name not in self._texts:
            text = self._places.sub(lambda match: self._known[match[1]], assemble(name))
            self._texts[name] = text.encode()
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
