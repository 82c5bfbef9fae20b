"""One HTTP request over TCP or a unix socket, and its answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

Place = tuple[str, int] | str
"""(host, port), or the path of a unix socket."""


@dataclass(frozen=True, slots=True)
class Reply:
    code: int
    text: str
    headers: Mapping[str, str]

    def json(self) -> Any:
        return json.loads(self.text)


def connect(place: Place, timeout: float = 10.0) -> socket.socket:
    if isinstance(place, tuple):
        return socket.create_connection(place, timeout)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.settimeout(timeout)
    try:
        opened.connect(place)
    except OSError:
        opened.close()
        raise
    return opened


def ask(
    place: Place, path: str, method: str = "GET", body: bytes = b"", timeout: float = 10.0, **headers: str
) -> Reply:
    """`headers`: with _ for -. Host is localhost unless given; an empty one is left out."""
    lines = {"Host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body:
        lines["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    with connect(place, timeout) as opened:
        opened.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        response = HTTPResponse(opened, method=method)
        response.begin()
        text = response.read().decode()
        return Reply(response.status, text, {name.lower(): value for name, value in response.getheaders()})
