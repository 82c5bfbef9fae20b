"""Which control group folders hold for this process, in cgroup v1 and v2, from inside a container too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Mount:
    """One cgroup file system: `root` is the group that is visible at `point`."""

    version: int
    controllers: frozenset[str]
    root: str
    point: str


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(cgroup version, folder) of the own group and of each group above it that can be seen, innermost first.

    A limit on any of them holds. Yields nothing where /proc cannot be read. `root`: where / is, for tests.
    """
    own = _own_paths(root)
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        path = own.get("" if mount.version == 2 else controller)
        if path is not None:
            top = root / mount.point.lstrip("/")
            yield from ((mount.version, folder) for folder in _upwards(top, _below(mount.root, path)))


def oom_group(root: Path = Path("/")) -> Path | None:
    """The file by which the kernel, when memory runs out, ends all processes of our group together; None if
    it picks one of them. Only v2 has it, and one above us may be it."""
    for version, folder in folders("memory", root):
        file = folder / "memory.oom.group"
        if version == 2 and _lines(file)[:1] == ["1"]:
            return file
    return None


def _own_paths(root: Path) -> dict[str, str]:
    """Controller → this process's group; "" is the one of cgroup v2."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    return paths


def _mounts(root: Path) -> Iterator[Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, separator, after = line.partition(" - ")
        fields, options = before.split(), after.split()
        if not separator or options[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if options[0] == "cgroup2" else 1
        yield Mount(version, frozenset(options[-1].split(",")), fields[3], fields[4])


def _below(visible: str, path: str) -> tuple[str, ...]:
    """The steps from the visible group to ours; none where a namespace hides the way."""
    steps = [step for step in path.split("/") if step]
    shown = [step for step in visible.split("/") if step]
    if ".." in steps or steps[: len(shown)] != shown:
        return ()
    return tuple(steps[len(shown) :])


def _upwards(top: Path, steps: tuple[str, ...]) -> Iterator[Path]:
    for depth in range(len(steps), -1, -1):
        yield top.joinpath(*steps[:depth])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []  # a hidden /proc: then no limit is known, and none is made up
