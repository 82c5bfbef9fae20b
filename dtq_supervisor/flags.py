"""The command line's flags, generated from the settings table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dtq_child.setting import Kind, Setting, plain
from dtq_child.settings_table import ACTIONS, SETTINGS
from dtq_child.version import VERSION

_METAVARS = {
    Kind.TEXT: "TEXT",
    Kind.INT: "N",
    Kind.SECONDS: "SECONDS",
    Kind.SIZE: "SIZE",
    Kind.LIST: "NAMES",
    Kind.URL: "URL",
    Kind.PATH: "FILE",
}


class _Joined(argparse.Action):
    """`-Q a -Q b` means `-Q a,b`: the last one alone would silently drop a queue."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def add_arguments(parser: argparse.ArgumentParser, reader: str) -> None:
    """Adds every flag that `reader` reads. `vars()` of the parsed namespace is what `settings.load` takes.

    Values stay text, and None where a flag is not given: `load` checks them together with the other sources.
    """
    for setting in (*SETTINGS, *ACTIONS):
        if setting.flags and reader in setting.read_by:
            _add(parser, setting)


def _add(parser: argparse.ArgumentParser, setting: Setting) -> None:
    help_text = _help(setting).replace("%", "%%")
    if setting.kind is Kind.ACTION:
        _add_action(parser, setting, help_text)
    elif setting.kind is Kind.BOOL:
        parser.add_argument(
            *setting.flags,
            dest=setting.name,
            action="store_const",
            const=not setting.default,
            help=help_text,
        )
    elif not setting.flags[0].startswith("-"):
        parser.add_argument(setting.name, nargs="?", metavar=setting.flags[0], help=help_text)
    else:
        parser.add_argument(
            *setting.flags,
            dest=setting.name,
            metavar="|".join(setting.choices) if setting.kind is Kind.CHOICE else _METAVARS[setting.kind],
            action=_Joined if setting.kind is Kind.LIST else "store",
            help=help_text,
        )


def _add_action(parser: argparse.ArgumentParser, setting: Setting, help_text: str) -> None:
    if setting.name == "version":
        parser.add_argument(*setting.flags, action="version", version=f"dtq {VERSION}", help=help_text)
    else:
        parser.add_argument(*setting.flags, dest=setting.name, action="store_true", help=help_text)


def _help(setting: Setting) -> str:
    if setting.only_flag:
        return setting.help
    default = setting.none or "none" if setting.default is None else plain(setting.default)
    return f"{setting.help} ({setting.env}; default: {default})"
