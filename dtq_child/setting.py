"""What one setting is: where it may come from, how what was given becomes a value, and how it is shown."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Value = str | int | float | bool | tuple[str, ...] | None

PRODUCER, SUPERVISOR, CHILD, API = READERS = ("producer", "supervisor", "child", "api")


URL_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")


class Kind(enum.Enum):
    """How a value is written; the text is what documentation calls it."""

    TEXT = "text"
    INT = "whole number"
    SECONDS = "seconds"
    SIZE = "size"
    BOOL = "yes or no"
    LIST = "names"
    CHOICE = "choice"
    URL = "URL"
    PATH = "path"
    ACTION = "action"  # no value: the command does something else and ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table. `low` and `high` are inclusive; `none` says what the value None means."""

    name: str
    kind: Kind
    default: Value
    help: str
    group: str
    read_by: tuple[str, ...]
    flags: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: str = ""
    pattern_says: str = ""
    none: str = ""
    secret: bool = False
    reloadable: bool = False
    only_flag: bool = False

    @property
    def env(self) -> str:
        """The environment name; empty for what is only a flag."""
        return "" if self.only_flag else f"DTQ_{self.name.upper()}"

    def origin_of_flag(self) -> str:
        long = next((flag for flag in self.flags if flag.startswith("--")), "")
        return f"flag {long}" if long else f"argument {self.flags[0]}"

    def read(self, given: object) -> Value:
        """The checked value of what a source gave: text, or what TOML and Python have for it.

        Raises ValueError whose text says what would be right. It never repeats a secret.
        """
        if self.default is None and (
            given is None or (isinstance(given, str) and given.strip().lower() == "none")
        ):
            return None
        if isinstance(given, str) and not given.strip():
            raise ValueError(f"it is empty; {self.says()}, or leave it out")
        return _READ[self.kind](self, given)

    def says(self) -> str:
        """What is allowed, as a sentence's end."""
        match self.kind:
            case Kind.INT | Kind.SECONDS | Kind.SIZE:
                unit = {
                    Kind.INT: "a whole number",
                    Kind.SECONDS: "seconds",
                    Kind.SIZE: "bytes, or like 512K or 8M",
                }
                return f"give {unit[self.kind]}, from {plain(self.low)} to {plain(self.high)}"
            case Kind.CHOICE:
                return "give one of " + ", ".join(self.choices)
            case Kind.URL:
                return "give one of " + ", ".join(f"{scheme}://…" for scheme in self.choices)
            case _:
                return f"give {self.pattern_says or 'a ' + self.kind.value}"

    def shown(self, value: Value) -> str:
        """The value as text, without its secret part."""
        if value is None:
            return self.none or "none"
        return mask_url(str(value)) if self.secret else plain(value)


def declare(default: T, kind: Kind, help: str, **row: Any) -> T:  # noqa: A002
    """A dataclass field that carries the rest of its `Setting`, typed as its default for mypy's sake."""
    metadata = {"kind": kind, "help": help, "default": default, **row}
    declared: Any = dataclasses.field(default=default, repr=not row.get("secret"), metadata=metadata)
    return declared  # type: ignore[no-any-return]


def table_of(declaring: type) -> tuple[Setting, ...]:
    """The rows that a dataclass of `declare`d fields holds, in their order."""
    return tuple(Setting(name=field.name, **field.metadata) for field in dataclasses.fields(declaring))


def plain(value: Value) -> str:
    """A value as a person would type it."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float() if value.is_integer():
            return str(int(value))
        case tuple():
            return ",".join(value)
        case _:
            return str(value)


_PASSWORD_IN_QUERY = re.compile(r"([?&][^=&]*password=)[^&]*")


def mask_url(url: str) -> str:
    """The URL with its credentials starred out; all of it where it is too broken to tell them apart.

    The last `@` counts: whoever forgot to percent-encode a password must not find it in a log.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in URL_SCHEMES:
        return "***"
    credentials, at, place = rest.rpartition("@")
    if at:
        user = credentials.partition(":")[0] if credentials.count(":") == 1 else ""
        rest = f"{user}:***@{place}"
    elif not all(_HOST.fullmatch(host) for host in re.split("[/?]", rest)[0].split(",") if host):
        rest = "***"
    return f"{scheme}://" + _PASSWORD_IN_QUERY.sub(r"\1***", rest)


def has_password(url: str) -> bool:
    credentials, at, _ = url.partition("://")[2].rpartition("@")
    return bool(at and ":" in credentials) or bool(_PASSWORD_IN_QUERY.search(url))


def _number(setting: Setting, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ValueError(setting.says())
    try:
        number = float(given)
    except (ValueError, OverflowError):
        raise ValueError(setting.says()) from None
    if not setting.low <= number <= setting.high:  # a NaN is not within bounds either
        raise ValueError(setting.says())
    return number


def _read_int(setting: Setting, given: object) -> int:
    number = _number(setting, given)
    if not number.is_integer():
        raise ValueError(setting.says())
    return int(number)


_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def _read_size(setting: Setting, given: object) -> int:
    size = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    return _read_int(setting, int(size[1]) * _UNITS[size[2].lower()] if size else given)


def _read_bool(setting: Setting, given: object) -> bool:
    if not isinstance(given, bool):
        raise ValueError("give true or false")
    return given


def _read_text(setting: Setting, given: object) -> str:
    if not isinstance(given, str):
        raise ValueError(setting.says())
    text = given.strip()
    if setting.pattern and not re.fullmatch(setting.pattern, text):
        raise ValueError(setting.says())
    return text


def _read_list(setting: Setting, given: object) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(setting.says())
    if "" in (name.strip() if isinstance(name, str) else name for name in names):
        raise ValueError(f"an item between or beside the commas is empty; {setting.says()}")
    return tuple(dict.fromkeys(_read_text(setting, name) for name in names))


def _read_choice(setting: Setting, given: object) -> str:
    text = given.strip().lower() if isinstance(given, str) else ""
    if text not in setting.choices:
        raise ValueError(setting.says())
    return text


_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]@/?#\s]+)(:\d{1,5})?")
_ENCODE = "percent-encode special characters of a password"


def _read_url(setting: Setting, given: object) -> str:
    url = given.strip() if isinstance(given, str) else ""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in setting.choices:
        raise ValueError(setting.says())
    if "#" in rest or any(character.isspace() for character in rest):
        raise ValueError(f"a space or # is in it; {_ENCODE}")
    place, _, _query = rest.partition("?")
    netloc, slash, path = place.partition("/")
    _, _, hosts = netloc.rpartition("@")
    if scheme == "unix":
        if hosts or not path:
            raise ValueError("give unix:///the/path/of/the/socket?db=0")
        return url
    _check_hosts(hosts.split(",") if scheme.endswith("+sentinel") else [hosts])
    _check_path(scheme, path if slash else "")
    return url


def _check_hosts(hosts: list[str]) -> None:
    for host in hosts:
        found = _HOST.fullmatch(host)
        if not found:
            raise ValueError(f"it needs a host, or host:port, behind :// and any credentials; {_ENCODE}")
        if found[2] and not 1 <= int(found[2][1:]) <= 65535:
            raise ValueError("the port must be from 1 to 65535")


def _check_path(scheme: str, path: str) -> None:
    if scheme.endswith("+sentinel"):
        if not re.fullmatch(r"[^/]+(/\d+)?", path):
            raise ValueError("give redis+sentinel://host:26379,host2:26379/SERVICE or …/SERVICE/DB")
    elif not re.fullmatch(r"\d*", path):
        raise ValueError(f"behind the host only /DB, a number, may follow; {_ENCODE}")


def _read_action(setting: Setting, given: object) -> Value:
    raise ValueError(f"{setting.flags[0]} takes no value")


_READ: dict[Kind, Callable[[Setting, object], Value]] = {
    Kind.TEXT: _read_text,
    Kind.INT: _read_int,
    Kind.SECONDS: _number,
    Kind.SIZE: _read_size,
    Kind.BOOL: _read_bool,
    Kind.LIST: _read_list,
    Kind.CHOICE: _read_choice,
    Kind.URL: _read_url,
    Kind.PATH: _read_text,
    Kind.ACTION: _read_action,
}
