"""Where a Redis is found that Sentinels watch: what a `redis+sentinel://` URL says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from dtq_child.errors import BadConfiguration

_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of `redis+sentinel://[user:pw@]h1[:26379][,h2…]/service[/db][?ssl=true&protocol=3]`."""

    nodes: tuple[tuple[str, int], ...]
    service: str
    db: int
    user: str | None
    password: str | None
    ssl: bool
    protocol: int


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Raises BadConfiguration, in whose words no password appears."""
    rest, _, query = url.partition("://")[2].partition("?")
    authority, _, path = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    service, _, db = path.partition("/")
    options = dict(parse_qsl(query))
    protocol = options.get("protocol", "2")
    nodes = tuple(_node(host) for host in hosts.split(",") if host)
    if not nodes or not service or (db and not db.isdigit()) or protocol not in ("2", "3"):
        shown = f"{hosts}/{path}" + (f"?{query}" if query else "")
        fix = "redis+sentinel://h1[:26379][,h2…]/service[/db] is needed"
        raise BadConfiguration([f"redis url {shown!r}: {fix}"])
    ssl = options.get("ssl", "") in ("1", "true")
    names = unquote(user) or None, unquote(password) or None
    return SentinelUrl(nodes, unquote(service), int(db or 0), *names, ssl, int(protocol))


def _node(text: str) -> tuple[str, int]:
    """`name`, `name:port`, `[v6]` or `[v6]:port`."""
    name, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or (":" in name and not name.endswith("]")):
        name, port = text, str(_SENTINEL_PORT)
    return name.removeprefix("[").removesuffix("]"), int(port)
