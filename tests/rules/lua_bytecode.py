"""Which globals a Lua 5.1 script reads and writes, told by its bytecode: also in branches that never ran."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from lupa import lua51  # type: ignore[import-untyped]

_GETGLOBAL, _SETGLOBAL = 5, 7
_NIL, _BOOLEAN, _NUMBER, _STRING = 0, 1, 3, 4


@dataclass
class Globals:
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


def globals_of(script: bytes) -> Globals:
    """Raises AssertionError with the compiler's words if it is no Lua."""
    lua: Any = lua51.LuaRuntime(encoding=None)
    dump = lua.eval(b"function(text) local f, e = loadstring(text) return f and string.dump(f), e end")
    code, error = dump(script)
    assert code is not None, error
    found = Globals()
    _Chunk(code[12:]).function(found)
    return found


class _Chunk:
    """Reads what string.dump wrote on a 64-bit machine, after its header."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def function(self, found: Globals) -> None:
        self._string()
        self._take(4 + 4 + 4)  # first and last line; upvalues, parameters, varargs, stack
        code = struct.unpack(f"<{(n := self._int())}I", self._take(4 * n))
        constants = [self._constant() for _ in range(self._int())]
        for _ in range(self._int()):
            self.function(found)
        self._take(4 * self._int())  # a line for each instruction
        for _ in range(self._int()):
            self._string()
            self._take(8)  # where a local begins and ends
        for _ in range(self._int()):
            self._string()  # upvalues
        for instruction in code:
            name = constants[instruction >> 14] if instruction >> 14 < len(constants) else ""
            if instruction & 0x3F == _GETGLOBAL:
                found.read.add(name)
            elif instruction & 0x3F == _SETGLOBAL:
                found.written.add(name)

    def _constant(self) -> str:
        kind = self._take(1)[0]
        if kind == _STRING:
            return self._string()
        self._take({_NIL: 0, _BOOLEAN: 1, _NUMBER: 8}[kind])
        return ""

    def _string(self) -> str:
        (size,) = struct.unpack("<Q", self._take(8))
        return self._take(size)[:-1].decode("latin-1") if size else ""

    def _int(self) -> int:
        (number,) = struct.unpack("<i", self._take(4))
        return int(number)

    def _take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]
