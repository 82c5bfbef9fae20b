"""Writes docs/settings.md from the table: `python -m dtq_child.settings_page > docs/settings.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dtq_child.setting import Kind, Setting, plain
from dtq_child.settings import IMPOSSIBLE
from dtq_child.settings_table import ACTIONS, SETTINGS

INTRODUCTION = """\
# Settings

This page is generated from the table in `dtq_child/settings_table.py`; a test keeps it true.

A flag wins over the environment, the environment over the TOML file, the file over the default.
`dtq-supervisor --check` prints each value with its origin and ends. An unknown `DTQ_…` name, an unknown key,
a bad value or an impossible pair ends the start with exit code 78 and one line for each problem.

- **TOML** (`--config FILE` or `DTQ_CONFIG`): the table `[dtq]`, with the environment's names in lower case
  and without `DTQ_`: `timeout_s = 30`, `queues = ["default", "images"]`.
- **Seconds** take fractions. **Sizes** are bytes, or like `512K`, `8M`, `1G`. **Names** are separated by
  commas.
- **Secrets** are also read from a file, named by the same name followed by `_FILE` (`_file` in TOML).
  A password in a flag can be read by everybody on the machine, and is warned about.
- `none` switches a setting off whose default is off.
- `DTQ_TEST_…` and `DTQ_DEMO_…` belong to the tests and the demo, and are not looked at here.

Read by: **producer** is a program that enqueues, **supervisor** the parent process, **child** the processes
that execute tasks (they get the supervisor's values), **api** the HTTP interface.

Reload: **yes** is taken over by a running supervisor when it is told to reload (SIGHUP, `dtq reload`); a
change of any other setting makes it refuse the reload.
"""

HEADINGS = ("Environment", "Flag", "Default", "Allowed", "Read by", "Reload", "Meaning")


def render() -> str:
    """The whole page, ending in a newline."""
    parts = [INTRODUCTION]
    for group in dict.fromkeys(setting.group for setting in (*SETTINGS, *ACTIONS)):
        rows = [_row(setting) for setting in (*SETTINGS, *ACTIONS) if setting.group == group]
        parts.append(f"## {group}\n\n{_table(rows)}")
    parts.append(_pairs())
    return "\n".join(parts)


def _pairs() -> str:
    rules = [*(pair.rule for pair in IMPOSSIBLE), "`--embedded` together with `--redis-url`."]
    return "## Pairs that are refused\n\n" + "".join(f"- {rule}\n" for rule in rules)


def _row(setting: Setting) -> list[str]:
    env = f"`{setting.env}`" + (" (`_FILE`)" if setting.secret else "") if setting.env else "–"
    flags = ", ".join(f"`{flag}`" for flag in setting.flags) or "–"
    reload = "yes" if setting.reloadable else "–"
    return [
        env,
        flags,
        _default(setting),
        _allowed(setting),
        ", ".join(setting.read_by),
        reload,
        setting.help,
    ]


def _default(setting: Setting) -> str:
    if setting.only_flag:
        return "–"
    if setting.default is None:
        return setting.none or "none"
    return f"`{plain(setting.default)}`"


def _allowed(setting: Setting) -> str:
    match setting.kind:
        case Kind.INT | Kind.SECONDS | Kind.SIZE:
            return f"{setting.kind.value}, {plain(setting.low)} to {plain(setting.high)}"
        case Kind.CHOICE:
            return ", ".join(f"`{choice}`" for choice in setting.choices)
        case Kind.URL:
            return ", ".join(f"`{scheme}://`" for scheme in setting.choices)
        case Kind.BOOL | Kind.ACTION:
            return "–"
        case _:
            return setting.pattern_says or setting.kind.value


def _table(rows: Iterable[list[str]]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(render())
