"""Who asks at the endpoint, and what they may see and do there. Pure.

A page in a browser can have its host name lead to this machine (DNS rebinding), and then reads what answers
here as its own: so the Host must be a name that only this machine's own users would give. A page can also
send a POST without reading the answer: so those need a header that no page can send unasked.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@/\s]+)(:\d{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9_.@+:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Visitor:
    """`address`: "" for a unix socket, then `uid` is the peer's. `headers`: by their names in lower case."""

    address: str
    headers: Mapping[str, str]
    uid: int = -1

    @property
    def near(self) -> bool:
        """On this machine, as far as can be told: whoever comes through a proxy is not."""
        if "x-forwarded-for" in self.headers or "forwarded" in self.headers:
            return False
        return not self.address or is_loopback(self.address)

    def actor(self) -> str:
        """Who they say they are."""
        claimed = self.headers.get("x-actor", "")
        if _NAME.fullmatch(claimed):
            return claimed
        return f"uid:{self.uid}" if not self.address else "token"

    def via(self, hostname: str) -> str:
        """By which door they come, which they cannot choose."""
        return f"unix:{self.uid}@{hostname}" if not self.address else f"http:metrics@{self.address}"

    def request_id(self) -> str:
        given = self.headers.get("x-request-id", "")
        return given if _NAME.fullmatch(given) else ""


def is_loopback(address: str) -> bool:
    found = _ip(address)
    if found is None:
        return address.lower() == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def is_everywhere(address: str) -> bool:
    found = _ip(address)
    return found is not None and found.is_unspecified


def host_is_ours(host: str | None, bound_to: str) -> bool:
    """`bound_to`: the host of the listening address; "" for a unix socket, to which no page can lead a
    browser. No header is what no browser sends."""
    if host is None or not bound_to:
        return True
    found = _HOST.fullmatch(host.strip())
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    if is_loopback(name) or name == bound_to.lower():
        return True
    # Bound to every address: which of them was asked cannot be told, but an address is no name.
    return is_everywhere(bound_to) and _ip(name) is not None


def why_not_act(visitor: Visitor, token: str | None) -> str:
    """Why the visitor may not do what changes something; "" if they may."""
    if not visitor.near:
        return "only over a unix socket or from this machine"
    if not visitor.address:
        return ""
    if token is None:
        return "over TCP it needs a token: set DTQ_METRICS_TOKEN, or use --metrics-bind unix:/path"
    scheme, _, given = visitor.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode()):
        return ""
    return "it needs the header Authorization: Bearer, with the value of DTQ_METRICS_TOKEN"


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
