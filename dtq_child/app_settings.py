"""The settings that an App is made with: above the environment in a producer, below the supervisor's in a
worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dtq_child import settings as settings_module
from dtq_child.errors import BadConfiguration
from dtq_child.setting import PRODUCER, mask_url
from dtq_child.settings import BY_NAME, Settings

log = logging.getLogger("dtq.app")


class AppSettings:
    """The arguments, checked as soon as they are there. Raises BadConfiguration."""

    __slots__ = ("_given",)

    def __init__(self, redis_url: str | None, key_prefix: str | None, overrides: Mapping[str, Any]) -> None:
        named = {"redis_url": redis_url, "key_prefix": key_prefix}
        self._given = {**{name: value for name, value in named.items() if value is not None}, **overrides}
        # The file that `config` names is read with everything else, at first use.
        settings_module.defaults(**{name: value for name, value in self._given.items() if name != "config"})
        problems = [
            f"argument {name}: only workers read it: give the supervisor {BY_NAME[name].env or 'its flag'}"
            for name in self._given
            if PRODUCER not in BY_NAME[name].read_by
        ]
        if problems:
            raise BadConfiguration(problems)

    def load(self, environ: Mapping[str, str]) -> Settings:
        """With what the environment and a TOML file add. Raises BadConfiguration."""
        loaded = settings_module.load(
            {}, environ, reader=PRODUCER, read_text=_read_text, arguments=self._given
        )
        for warning in loaded.warnings:
            log.warning("%s", warning)
        return loaded.settings

    def conflicts(self, settings: Settings) -> list[str]:
        """One line for each argument that leads to other data than `settings`."""
        lines = []
        url, prefix = self._given.get("redis_url"), self._given.get("key_prefix")
        if url is not None and _place(url) != _place(settings.redis_url):
            lines.append(
                f"the App has redis_url={mask_url(url)!r}, the supervisor {mask_url(settings.redis_url)!r}: "
                "leave it out of the App and set DTQ_REDIS_URL for both"
            )
        if prefix is not None and prefix != settings.key_prefix:
            lines.append(
                f"the App has key_prefix={prefix!r}, the supervisor {settings.key_prefix!r}: "
                "leave it out of the App and set DTQ_KEY_PREFIX for both"
            )
        return lines


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _place(url: str) -> tuple[object, ...]:
    """What a URL leads to: two spellings of it, or two users, are no conflict."""
    scheme, _, rest = url.strip().partition("://")
    netloc_and_path, _, query = rest.partition("?")
    netloc, _, path = netloc_and_path.rpartition("@")[2].partition("/")
    usual_port = ":26379" if scheme.endswith("sentinel") else ":6379"
    hosts = sorted(host.lower().removesuffix(usual_port) for host in netloc.split(","))
    return scheme, hosts, f"/{path}".removesuffix("/0").rstrip("/"), query
