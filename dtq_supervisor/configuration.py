"""The settings that count, and those that a reload has read: taken over whole or refused whole (R35)."""

from __future__ import annotations

from collections.abc import Callable

from dtq_child.errors import BadConfiguration
from dtq_child.settings import SETTINGS, Settings
from dtq_supervisor.events import SettingsRead, SettingsRefused
from dtq_supervisor.recycling import Limits
from dtq_supervisor.roster import Policy

Read = Callable[[], Settings]
"""Reads every source anew; raises BadConfiguration."""


class Configuration:
    """`settings` count. `candidate` was read last, and counts when it is adopted."""

    def __init__(self, settings: Settings, read: Read) -> None:
        self.settings = self.candidate = settings
        self._read = read

    def read(self) -> SettingsRead | SettingsRefused:
        try:
            found = self._read()
        except BadConfiguration as error:
            return SettingsRefused("; ".join(error.problems))
        problems = fixed(self.settings, found)
        if problems:
            return SettingsRefused("; ".join(problems))
        self.candidate = found
        return SettingsRead(policy_of(found))

    def adopt(self) -> None:
        self.settings = self.candidate


def fixed(before: Settings, found: Settings) -> list[str]:
    """What differs and cannot change while the supervisor runs."""
    return [
        f"{setting.name}: changed from {setting.shown(was)} to {setting.shown(now)}, which takes a restart"
        for setting in SETTINGS
        if not setting.reloadable
        and (was := getattr(before, setting.name)) != (now := getattr(found, setting.name))
    ]


def policy_of(settings: Settings) -> Policy:
    return Policy(
        boot_timeout_s=settings.boot_timeout_s,
        shutdown_grace_s=settings.shutdown_grace_s,
        cancel_grace_s=settings.cancel_grace_s,
        preload=settings.preload,
        limits=limits_of(settings),
    )


def limits_of(settings: Settings) -> Limits:
    return Limits(
        settings.max_tasks_per_child or 0,
        settings.max_tasks_jitter or 0,
        settings.max_memory_per_child or 0,
        settings.hard_memory_per_child or 0,
    )
