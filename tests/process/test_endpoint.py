"""The endpoint's server alone: what clients that are slow, many or rude get, and what they cannot hold up."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtq_supervisor import endpoint as endpoint_module
from dtq_supervisor.answers import Answer, Request
from dtq_supervisor.endpoint import MOST, Endpoint
from dtq_supervisor.listener import CannotListen, listen
from tests.support.http import Place, ask, connect
from tests.support.waiting import until


class Desk:
    """An endpoint whose answers are the test's; it remembers what it was asked."""

    def __init__(self, bind: str) -> None:
        self.listener = listen(bind)
        self.asked: list[Request] = []
        self.endpoint = Endpoint(self.listener, self._answer)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.endpoint.run, args=(self._stop, lambda: False))
        self._thread.start()

    @property
    def place(self) -> Place:
        address = self.listener.socket.getsockname()
        return address if isinstance(address, str) else (address[0], address[1])

    def _answer(self, request: Request) -> Answer:
        self.asked.append(request)
        if request.path == "/broken":
            raise ValueError("told to")
        return Answer.of(200, f"{request.method} {request.path}")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        assert not self._thread.is_alive()
        self.listener.close()
        until(lambda: not clients(), 5, "clients' threads are left")


def clients() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "dtq-endpoint-client"]


@pytest.fixture(params=["tcp", "unix"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    made = Desk("127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/endpoint")
    yield made
    made.close()


def test_a_request_is_answered_and_the_connection_ends(desk: Desk) -> None:
    reply = ask(desk.place, "/some/where?a=1", X_Actor="ann")
    assert (reply.code, reply.text) == (200, "GET /some/where\n")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert desk.asked[0].query == {"a": "1"}
    visitor = desk.asked[0].visitor
    assert visitor.near
    assert visitor.actor() == "ann"
    assert visitor.uid == (os.getuid() if isinstance(desk.place, str) else -1)


def test_head_is_get_without_the_body(desk: Desk) -> None:
    reply = ask(desk.place, "/x", "HEAD")
    assert (reply.code, reply.text, reply.headers["content-length"]) == (200, "", str(len("HEAD /x\n")))


def test_a_post_with_a_small_body_is_answered_and_a_large_one_refused(desk: Desk) -> None:
    assert ask(desk.place, "/x", "POST", b"y" * 4096).code == 200
    assert ask(desk.place, "/x", "POST", b"y" * 4097).code == 413


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /x HTTP/9.9\r\n\r\n", b"505"),
        (b"BREW /x HTTP/1.1\r\n\r\n", b"501"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"POST /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"413"),
        (b"POST /x HTTP/1.1\r\nContent-Length: " + 5000 * b"9" + b"\r\n\r\n", b"413"),
        (b"GET /broken HTTP/1.1\r\n\r\n", b"500"),
        (b"\x16\x03\x01\x02\x00\x01", b"400"),
    ],
    ids=["no words", "version", "method", "target", "long", "two hosts", "length", "digits", "error", "tls"],
)
def test_what_is_no_request_is_refused_and_the_next_one_answered(desk: Desk, raw: bytes, code: bytes) -> None:
    with connect(desk.place) as opened:
        opened.sendall(raw)
        opened.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: opened.recv(4096), b""))
    assert code in answer.split(b"\r\n")[0]
    assert ask(desk.place, "/next").code == 200


def test_slow_clients_hold_up_nobody_and_are_cut_off(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be open send nothing, and more come; then each is over its time."""
    monkeypatch.setattr(endpoint_module, "DEADLINE_S", 1.5)
    slow = [connect(desk.place) for _ in range(3 * MOST)]
    for opened in slow:
        opened.sendall(b"GET / HT")
    begun = time.monotonic()
    assert ask(desk.place, "/quick").code == 200
    assert time.monotonic() - begun < 1.0
    assert len(clients()) <= 2 * MOST
    until(lambda: not clients(), 5, "slow clients are still served")
    assert ask(desk.place, "/quick").code == 200
    for opened in slow:
        opened.close()


def test_a_client_that_goes_away_is_no_error(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        with connect(desk.place) as opened:
            opened.sendall(b"GET /x HTTP/1.1\r\n\r\n")
    assert ask(desk.place, "/x").code == 200


# -- where it listens


def test_a_taken_port_is_told_in_one_line() -> None:
    first = listen("127.0.0.1:0")
    port = first.socket.getsockname()[1]
    with pytest.raises(CannotListen, match=rf"^cannot listen on 127.0.0.1:{port}: it is taken$"):
        listen(f"127.0.0.1:{port}")
    first.close()
    listen(f"127.0.0.1:{port}").close()


def test_an_address_of_others_and_a_name_of_nobody_are_told() -> None:
    with pytest.raises(CannotListen, match="Cannot assign"):
        listen("203.0.113.9:1")
    with pytest.raises(CannotListen, match=r"^cannot listen on nobody\.invalid:1: "):
        listen("nobody.invalid:1")


def test_the_path_of_a_dead_one_is_taken_over_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    dead = listen(f"unix:{path}")
    dead.socket.close()  # as by kill -9: the path stays
    living = listen(f"unix:{path}")
    with pytest.raises(CannotListen, match="it is taken"):
        listen(f"unix:{path}")
    living.close()
    assert not path.exists()


def test_a_file_is_not_taken_for_a_socket_and_anothers_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    path.write_text("precious")
    with pytest.raises(CannotListen, match="it is taken"):
        listen(f"unix:{path}")
    assert path.read_text() == "precious"
    path.unlink()
    ours = listen(f"unix:{path}")
    path.unlink()
    path.write_text("of somebody else")
    ours.close()
    assert path.exists()
    with pytest.raises(CannotListen, match="No such file"):
        listen(f"unix:{tmp_path}/nowhere/endpoint")
    with pytest.raises(CannotListen, match="too long"):
        listen(f"unix:{tmp_path}/{'x' * 120}")
