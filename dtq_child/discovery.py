"""Finds and imports the modules in which an application declares its tasks."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass

from dtq_child.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class Discovery:
    """To be imported: `<package>.<related_name>` of each package that has one; None: of Django's installed
    apps."""

    packages: tuple[str, ...] | None
    related_name: str

    def load(self) -> None:
        load(self.modules())

    def modules(self) -> list[str]:
        """Those that exist. An import that fails inside of one is not "doesn't exist": it is seen at
        `load`."""
        packages = _django_packages() if self.packages is None else self.packages
        names = [f"{package}.{self.related_name}" for package in packages]
        return [name for name in names if importlib.util.find_spec(name) is not None]


def load(modules: Iterable[str]) -> None:
    """Imports them, in order. What an import raises is not caught."""
    for module in modules:
        importlib.import_module(module)


def _django_packages() -> list[str]:
    """The packages of INSTALLED_APPS, after setting Django up if nobody has."""
    name_them = "name the packages, like app.autodiscover(['shop'])"
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise BadConfiguration(
            [f"app.autodiscover() asks Django, and DJANGO_SETTINGS_MODULE is not set: set it, or {name_them}"]
        )
    try:
        registry = importlib.import_module("django.apps").apps
    except ModuleNotFoundError as error:
        raise BadConfiguration(
            [f"app.autodiscover() asks Django, which is not there ({error}): install it, or {name_them}"]
        ) from error
    if not registry.ready:
        importlib.import_module("django").setup()
    return [config.name for config in registry.get_app_configs()]
