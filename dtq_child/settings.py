"""Loads settings, flag > environment > TOML > default, with each value's origin and every problem at once."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from dtq_child.errors import BadConfiguration
from dtq_child.setting import SUPERVISOR, Setting, has_password, mask_url
from dtq_child.settings_table import ACTIONS, SETTINGS, Settings

__all__ = ["ACTIONS", "SETTINGS", "Loaded", "Setting", "Settings", "defaults", "describe", "load"]

ENV_PREFIX = "DTQ_"
FOREIGN_PREFIXES = ("DTQ_TEST_", "DTQ_DEMO_")  # not settings: switches of the tests and of the demo
TOML_TABLE = "dtq"
BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
BY_FILE: dict[str, Setting] = {f"{setting.name}_file": setting for setting in SETTINGS if setting.secret}

ReadText = Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """`origins`: for each setting's name the text that says where its value came from."""

    settings: Settings
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Given:
    """What one source gave under one name, as it was written there."""

    name: str
    value: object
    origin: str


@dataclasses.dataclass(frozen=True)
class Impossible:
    """Two settings whose values, each fine, cannot work together."""

    names: tuple[str, str]
    broken: Callable[[Any, Any], bool]
    rule: str
    fix: str


IMPOSSIBLE = (
    Impossible(
        ("heartbeat_interval_s", "visibility_timeout_s"),
        lambda heartbeat, visibility: heartbeat > visibility / 2,
        "A heartbeat interval above half of the visibility timeout.",
        "a lease must outlive a lost heartbeat: set the interval to at most half of the visibility timeout",
    ),
    Impossible(
        ("soft_timeout_s", "timeout_s"),
        lambda soft, hard: soft is not None and soft >= hard,
        "A soft timeout that is not below the timeout.",
        "the soft timeout would never come: set it below the timeout",
    ),
    Impossible(
        ("max_memory_per_child", "hard_memory_per_child"),
        lambda soft, hard: soft is not None and hard is not None and soft >= hard,
        "A memory limit that is not below the hard memory limit.",
        "a child would be killed before it could be replaced: set the hard limit above the other",
    ),
)


def load(
    flags: Mapping[str, str | bool | None],
    environ: Mapping[str, str],
    *,
    reader: str,
    read_text: ReadText,
    arguments: Mapping[str, object] | None = None,
) -> Loaded:
    """The settings that `reader` (producer, supervisor, child, api) sees; others keep their default.

    `flags`: by setting name, None where not given. `arguments`: the same from Python code, above all else.
    `read_text`: path to content, for the TOML file and `*_FILE`. Raises BadConfiguration with every problem.
    """
    search = _Search(reader, read_text)
    search.arguments(arguments or {})
    search.flags(flags)
    search.environment(environ)
    search.toml()
    return search.finish()


def defaults(**overrides: object) -> Settings:
    """Checked settings from Python values alone. Raises BadConfiguration."""
    search = _Search("", _read_nothing)
    search.arguments(overrides)
    return search.finish().settings


def describe(loaded: Loaded) -> str:
    """One line a setting: name, value without secrets, origin."""
    lines = []
    for setting in SETTINGS:
        shown = setting.shown(getattr(loaded.settings, setting.name))
        lines.append(f"{setting.name:<22} {shown:<32} {loaded.origins[setting.name]}".rstrip())
    return "\n".join(lines)


class _Search:
    """One pass over the sources, strongest first: the first that gives a setting wins."""

    def __init__(self, reader: str, read_text: ReadText) -> None:
        self.reader = reader
        self.read_text = read_text
        self.given: dict[str, Given] = {}
        self.bad: set[str] = set()
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def arguments(self, arguments: Mapping[str, object]) -> None:
        for name, value in arguments.items():
            if name in BY_NAME:
                self.take(BY_NAME[name], value, f"argument {name}")
            else:
                self.problems.append(f"argument {name}: no such setting{_meant(name, str)}")

    def flags(self, flags: Mapping[str, str | bool | None]) -> None:
        for name, value in flags.items():
            if value is None or name in _ACTION_NAMES:
                continue
            setting = BY_NAME[name]
            origin = setting.origin_of_flag()
            self.take(setting, value, origin)
            if setting.secret and has_password(str(value)):
                self.warnings.append(
                    f"{origin}: everybody on this machine can read a password there; "
                    f"use {setting.env}_FILE, or {setting.env}"
                )

    def environment(self, environ: Mapping[str, str]) -> None:
        ours = sorted(n for n in environ if n.startswith(ENV_PREFIX) and not n.startswith(FOREIGN_PREFIXES))
        self.named(
            [Given(_setting_name(name), environ[name], f"environment {name}") for name in ours],
            lambda name: f"{ENV_PREFIX}{name.upper()}",
        )

    def toml(self) -> None:
        path = self.value("config")
        if path is None:
            return
        config = self.given["config"]
        try:
            whole = tomllib.loads(self.read_text(path))
        except (
            OSError,
            ValueError,
            RecursionError,
        ) as error:  # the last: brackets in brackets, thousands deep
            self.problems.append(f"{config.origin} is {path!r}: {_why_unread(error)}")
            return
        table = whole.get(TOML_TABLE)
        if not isinstance(table, dict):
            self.problems.append(
                f"{path}: it has no table [{TOML_TABLE}]; settings are looked for only there"
            )
            return
        if "config" in table:
            self.problems.append(f"{path} [{TOML_TABLE}] config: a file cannot name another; leave it out")
            del table["config"]
        self.named(
            [Given(name, value, f"{path} [{TOML_TABLE}] {name}") for name, value in table.items()],
            str,
        )

    def named(self, everything: list[Given], spell: Callable[[str], str]) -> None:
        """Takes what a source gave by name; `spell` is how that source writes a setting's name."""
        names = {given.name for given in everything}
        for given in everything:
            if given.name in BY_NAME and not BY_NAME[given.name].only_flag:
                self.take(BY_NAME[given.name], given.value, given.origin)
            elif given.name in BY_FILE:
                setting = BY_FILE[given.name]
                if setting.name in names:
                    self.problems.append(f"{given.origin}: {spell(setting.name)} is given too; leave one out")
                else:
                    self.take_file(setting, given)
            else:
                self.problems.append(f"{given.origin}: no such setting{_meant(given.name, spell)}")

    def take(self, setting: Setting, value: object, origin: str) -> None:
        if self.reads(setting):
            self.given.setdefault(setting.name, Given(setting.name, value, origin))

    def take_file(self, setting: Setting, given: Given) -> None:
        if not self.reads(setting) or setting.name in self.given:
            return
        try:
            self.take(setting, self.read_text(str(given.value)), f"{given.origin} ({given.value})")
        except (OSError, ValueError) as error:
            self.bad.add(setting.name)
            self.problems.append(f"{given.origin} is {given.value!r}: {_why_unread(error)}")

    def reads(self, setting: Setting) -> bool:
        return not self.reader or self.reader in setting.read_by

    def value(self, name: str) -> Any:
        """The setting's checked value; if what was given is wrong, its default and a problem, noted once."""
        setting, given = BY_NAME[name], self.given.get(name)
        if given is None or name in self.bad:
            return setting.default
        try:
            return setting.read(given.value)
        except ValueError as error:
            self.bad.add(name)
            self.problems.append(f"{given.origin} is {_quoted(setting, given.value)}: {error}")
            return setting.default

    def finish(self) -> Loaded:
        settings = Settings(**{setting.name: self.value(setting.name) for setting in SETTINGS})
        self.check_pairs(settings)
        self.check_place(settings)
        if self.problems:
            raise BadConfiguration(self.problems)
        return Loaded(settings, {name: self.origin(name) for name in BY_NAME}, tuple(self.warnings))

    def check_pairs(self, settings: Settings) -> None:
        for pair in IMPOSSIBLE:
            first, second = (getattr(settings, name) for name in pair.names)
            if not self.bad & set(pair.names) and pair.broken(first, second):
                told = (
                    f"{name} {BY_NAME[name].shown(getattr(settings, name))} ({self.origin(name)})"
                    for name in pair.names
                )
                self.problems.append(f"{' with '.join(told)}: {pair.fix}")

    def check_place(self, settings: Settings) -> None:
        """What the supervisor cannot start without, or with."""
        if self.reader != SUPERVISOR:
            return
        if settings.app is None and "app" not in self.bad:
            self.problems.append(
                "no application: give it as module:attribute, like shop.tasks:app, or set DTQ_APP"
            )
        if settings.embedded and "redis_url" in self.given:
            clash = f"{self.origin('redis_url')}: --embedded starts a Redis of its own"
            if self.origin("redis_url").startswith("flag"):
                self.problems.append(f"{clash}; leave one out")
            else:
                self.warnings.append(f"{clash}; this one is not used")

    def origin(self, name: str) -> str:
        return self.given[name].origin if name in self.given else "default"


_ACTION_NAMES = frozenset(action.name for action in ACTIONS)


def _read_nothing(path: str) -> str:
    raise FileNotFoundError(path)


def _setting_name(env: str) -> str:
    """Environment names are in capitals; another spelling stays what it is, and so is unknown."""
    return env.removeprefix(ENV_PREFIX).lower() if env.isupper() else env


def _meant(name: str, spell: Callable[[str], str]) -> str:
    setting = BY_NAME.get(name)
    if setting is not None and setting.only_flag:
        return f" here; it is only a flag, {setting.flags[0]}"
    lower = name.removeprefix(ENV_PREFIX).lower()
    near = difflib.get_close_matches(lower, [s.name for s in SETTINGS if not s.only_flag], 1)
    return f"; did you mean {spell(near[0])}?" if near else "; remove it"


def _quoted(setting: Setting, given: object) -> str:
    text = mask_url(str(given)) if setting.secret else repr(given)
    return text if len(text) <= 200 else text[:200] + "…"


def _why_unread(error: OSError | ValueError | RecursionError) -> str:
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it cannot be understood: {error}"
