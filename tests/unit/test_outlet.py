"""A log that nobody reads takes nobody's time, and writes to nobody else's file."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtq_child.outlet import Outlet

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            continue  # the test has closed it


def outlet(fd: int) -> Outlet:
    return Outlet(fd, "{} dropped".format)


def fill(pipe: Pipe) -> None:
    os.set_blocking(pipe[1], False)
    try:
        while True:
            os.write(pipe[1], b"z" * 4096)
    except BlockingIOError:
        os.set_blocking(pipe[1], True)


def empty(fd: int) -> str:
    os.set_blocking(fd, False)
    read = b""
    try:
        while more := os.read(fd, 65536):
            read += more
    except BlockingIOError:
        return read.lstrip(b"z").decode()
    return read.lstrip(b"z").decode()


def takes_at_most(seconds: float, call: Callable[[], None]) -> None:
    before = time.monotonic()
    call()
    assert time.monotonic() - before < seconds


def test_lines_come_out_in_order(pipe: Pipe) -> None:
    out = outlet(pipe[1])
    out.put("one")
    out.put("zwei ü \udce9")
    out.close()
    assert empty(pipe[0]) == "one\nzwei ü \\udce9\n"


def test_a_full_pipe_holds_nobody_up_and_what_was_dropped_is_told(pipe: Pipe) -> None:
    out = outlet(pipe[1])
    fill(pipe)
    takes_at_most(1, lambda: [out.put("lost") for _ in range(1000)] and None)
    assert empty(pipe[0]) == ""
    out.put("next")
    out.close()
    assert empty(pipe[0]) == "1000 dropped\nnext\n"


def test_the_shared_description_stays_as_it_was(pipe: Pipe) -> None:
    out = outlet(pipe[1])
    out.put("one")
    assert os.get_blocking(pipe[1])
    out.close()


def test_a_long_line_is_not_torn_apart_by_the_next(pipe: Pipe) -> None:
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    out = outlet(pipe[1])
    out.put("x" * 6000)
    out.put("lost, for the rest of the long one is still to go")
    heard = empty(pipe[0])
    out.put("next")
    out.close()
    assert (heard + empty(pipe[0])) == "x" * 6000 + "\n1 dropped\nnext\n"


def test_a_reader_that_is_only_slow_misses_nothing(pipe: Pipe) -> None:
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    out, heard = outlet(pipe[1]), bytearray()

    def read() -> None:
        while more := os.read(pipe[0], 700):
            heard.extend(more)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        out.put(f"{number} {'x' * 100}")
    out.close()
    os.close(pipe[1])
    reader.join(10)
    assert [int(line.split()[0]) for line in heard.decode().splitlines()] == list(range(300))


def test_a_number_that_has_become_anothers_is_not_written_to(pipe: Pipe, tmp_path: Path) -> None:
    out = outlet(pipe[1])
    # As a task does that closes what it has not opened.
    os.closerange(pipe[1] + 1, pipe[1] + 8)
    others = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(8)]
    out.put("one")
    out.close()
    assert empty(pipe[0]) == "one\n"
    assert all(os.fstat(fd).st_size == 0 for fd in others)
    for fd in others:
        os.close(fd)


def test_when_the_original_is_gone_too_lines_are_dropped(pipe: Pipe, tmp_path: Path) -> None:
    out = outlet(pipe[1])
    os.closerange(pipe[1], pipe[1] + 8)
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == pipe[1]
        out.put("lost")
        assert out.dropped == 1
        assert os.fstat(other.fileno()).st_size == 0
    out.close()


def test_a_reader_that_has_gone_costs_nothing(pipe: Pipe) -> None:
    out = outlet(pipe[1])
    os.close(pipe[0])
    takes_at_most(1, lambda: [out.put("lost") for _ in range(100)] and None)
    assert out.dropped == 100
    out.close()


def test_a_closed_descriptor_is_no_log() -> None:
    fd = os.open(os.devnull, os.O_WRONLY)
    os.close(fd)
    out = outlet(fd)
    out.put("lost")
    out.close()
    assert out.dropped == 1


def test_a_full_socket_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        out = outlet(ours.fileno())
        takes_at_most(5, lambda: [out.put("x" * 4000) for _ in range(1000)] and None)
        assert 0 < out.dropped < 1000
        assert ours.getblocking()
        out.close()


def test_two_who_write_to_one_file_keep_each_others_lines(tmp_path: Path) -> None:
    """A shell that does not append (`2>log`) gives all of them one place in the file."""
    with (tmp_path / "log").open("wb") as log:
        out = outlet(log.fileno())
        os.write(log.fileno(), b"first\n")
        out.put("second")
        os.write(log.fileno(), b"third\n")
        out.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\n"
