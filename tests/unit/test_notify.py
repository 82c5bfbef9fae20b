"""What a service manager is told, and when; and the sockets it may listen at."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest

from dtq_supervisor.events import (
    Begin,
    ChildReady,
    ContactMade,
    Event,
    Exited,
    Forked,
    QuietAsked,
    ReloadAsked,
    ResizeAsked,
    ResumeAsked,
    SettingsRefused,
    Stop,
    StopMode,
    TemplateFailed,
    TemplateUp,
)
from dtq_supervisor.notify import AGAIN_S, Invitation, Notifier, Send, Standing, notifier, sender, standing
from dtq_supervisor.pool import Policy, Pool, step

READY = Standing("2 of 2 children at work", ready=True)
STOPPING = Standing("stopping: 2 children to end", ready=True, stopping=True, grace_s=25.0)
LAST = "STOPPING=1\nEXTEND_TIMEOUT_USEC=30000000\nSTATUS=stopping: 2 children to end"


class Ear:
    """A manager that hears what is sent, unless it is deaf."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.deaf: int = 0

    def __call__(self, text: str) -> None:
        if self.deaf:
            raise OSError(self.deaf, "not now")
        self.heard.append(text)


# --- how things stand


def statuses(*events: Event, procs: int = 2) -> list[Standing]:
    """How things stand after each of these."""
    pool = Pool.of(procs, Policy())
    found = []
    for event in events:
        step(pool, 0.0, event)
        found.append(standing(pool, redis_away=False))
    return found


def test_the_status_follows_the_pool_from_the_import_to_the_last_child() -> None:
    begun, up, forked, forked_2, first, contact, second, died, stop, gone, gone_2 = statuses(
        Begin(),
        TemplateUp(1),
        Forked(0, 1, 100),
        Forked(1, 1, 101),
        ChildReady(0, 1),
        ContactMade(),
        ChildReady(1, 1),
        Exited(0, 1, 100, None, 9),
        Stop(StopMode.GRACEFUL),
        Exited(0, 2, 102, None, 9),
        Exited(1, 1, 101, 0, None),
    )
    assert begun == Standing("the application is being imported")
    assert up == forked == forked_2 == Standing("waiting for Redis; 0 of 2 children up")
    assert first == Standing("waiting for Redis; 1 of 2 children up")
    assert contact == died == Standing("1 of 2 children at work", ready=True)
    assert second == READY
    assert stop == STOPPING
    assert gone == replace(STOPPING, status="stopping: 1 child to end")
    assert gone_2 == replace(STOPPING, status="stopping: 0 children to end")


def test_nobody_is_ready_before_a_child_and_redis_are() -> None:
    assert not any(at.ready for at in statuses(Begin(), ContactMade(), TemplateUp(1), Forked(0, 1, 100)))
    assert statuses(Begin(), ContactMade(), TemplateUp(1))[-1].status == "0 of 2 children at work"


def test_an_import_that_fails_is_an_end() -> None:
    failed = statuses(Begin(), TemplateFailed(1, "no module"))[-1]
    assert failed == Standing("the application cannot be imported; the log says why", stopping=True)


def test_an_outage_is_told_and_takes_no_readiness_away() -> None:
    pool = Pool.of(1, Policy())
    for event in (Begin(), TemplateUp(1), Forked(0, 1, 100), ContactMade(), ChildReady(0, 1)):
        step(pool, 0.0, event)
    assert standing(pool, redis_away=True) == Standing("waiting for Redis; 1 of 1 child up", ready=True)


def test_a_reload_and_its_failure_are_told_and_take_no_readiness_away() -> None:
    pool = Pool.of(1, Policy(), rows=2)
    for event in (Begin(), TemplateUp(1), Forked(0, 1, 100), ContactMade(), ChildReady(0, 1), ReloadAsked()):
        step(pool, 0.0, event)
    assert standing(pool, redis_away=False) == Standing(
        "reloading (settings); 1 of 1 child at work", ready=True, reloading=True
    )
    step(pool, 1.0, SettingsRefused("no such setting"))
    assert standing(pool, redis_away=False) == Standing(
        "1 of 1 child at work; the last reload failed", ready=True
    )


def test_held_claims_and_another_number_of_children_are_told_and_take_no_readiness_away() -> None:
    pool = Pool.of(1, Policy(), most=2)
    for event in (Begin(), TemplateUp(1), Forked(0, 1, 100), ContactMade(), ChildReady(0, 1)):
        step(pool, 0.0, event)
    told = []
    for event in (ResizeAsked(1), QuietAsked(), ResumeAsked(), ResizeAsked(-1)):
        step(pool, 0.0, event)
        told.append(standing(pool, redis_away=False))
    assert [at.status for at in told] == [
        "1 of 2 children at work",
        "claims are held (SIGTSTP); 1 of 2 children up",
        "1 of 2 children at work",
        "1 of 1 child at work",
    ]
    assert all(at.ready for at in told)


# --- what is sent


def test_each_fact_is_told_once() -> None:
    ear = Ear()
    teller = Notifier(ear)
    importing = Standing("the application is being imported")
    for now, at in ((10.0, importing), (10.1, importing), (11.0, READY), (12.0, READY), (13.0, STOPPING)):
        teller.tell(now, at)
    assert ear.heard == [
        "STATUS=the application is being imported",
        "READY=1\nSTATUS=2 of 2 children at work",
        LAST,
    ]


def test_a_status_that_flickers_is_told_once_a_second_and_at_the_end_as_it_is() -> None:
    ear = Ear()
    teller = Notifier(ear)
    for tenth in range(25):
        teller.tell(10.0 + tenth / 10, Standing(str(tenth % 2), ready=True))
    assert len(ear.heard) == 3
    teller.tell(14.0, Standing("last", ready=True))
    assert ear.heard[-1] == "STATUS=last"


def test_ready_and_stopping_do_not_wait_for_the_second_to_pass() -> None:
    ear = Ear()
    teller = Notifier(ear)
    teller.tell(10.0, Standing("waiting"))
    teller.tell(10.1, READY)
    teller.tell(10.2, STOPPING)
    assert [text.splitlines()[0] for text in ear.heard] == ["STATUS=waiting", "READY=1", "STOPPING=1"]


def test_who_stops_before_being_ready_is_never_ready() -> None:
    ear = Ear()
    Notifier(ear).tell(10.0, STOPPING)
    assert ear.heard == [LAST]


def test_a_reload_is_told_with_its_moment_and_its_end_is_another_readiness() -> None:
    ear = Ear()
    teller = Notifier(ear)
    reloading = Standing("reloading (canary); 2 of 2 children at work", ready=True, reloading=True)
    for now, at in ((10.0, READY), (12.5, reloading), (12.6, reloading), (14.0, READY), (15.0, STOPPING)):
        teller.tell(now, at)
    assert ear.heard == [
        "READY=1\nSTATUS=2 of 2 children at work",
        "RELOADING=1\nMONOTONIC_USEC=12500000\nSTATUS=reloading (canary); 2 of 2 children at work",
        "READY=1\nSTATUS=2 of 2 children at work",
        LAST,
    ]


def test_a_stop_in_the_middle_of_a_reload_is_the_last_word() -> None:
    ear = Ear()
    teller = Notifier(ear)
    teller.tell(10.0, replace(READY, reloading=True))
    teller.tell(11.0, replace(STOPPING, reloading=True))
    teller.tell(12.0, STOPPING)
    assert [text.splitlines()[0] for text in ear.heard] == ["READY=1", "STOPPING=1"]


def test_the_watchdog_is_fed_at_half_of_its_time() -> None:
    ear = Ear()
    teller = Notifier(ear, watchdog_s=4.0)
    for tenth in range(100):
        teller.tell(10.0 + tenth / 10, READY)
    assert [text.count("WATCHDOG=1") for text in ear.heard] == [1] * 5
    assert teller.rest_s(19.9) == pytest.approx(0.1)
    assert teller.rest_s(30.0) == 0.0


def test_without_a_watchdog_the_loop_sleeps_as_it_likes() -> None:
    assert Notifier(Ear()).rest_s(10.0) == Notifier().rest_s(10.0) == float("inf")


def test_without_a_manager_nothing_happens() -> None:
    Notifier().tell(10.0, READY)


def test_what_was_not_taken_is_said_later_as_things_are_then_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "dtq.supervisor")
    ear = Ear()
    teller = Notifier(ear, watchdog_s=60.0)
    ear.deaf = errno.EAGAIN
    for tenth in range(20):
        teller.tell(10.0 + tenth / 10, READY)
    ear.deaf = 0
    teller.tell(12.0 + AGAIN_S, STOPPING)
    assert ear.heard == [f"{LAST}\nWATCHDOG=1"]
    assert [record.getMessage().partition(":")[2] for record in caplog.records] == [" not now"]


# --- the invitation


def test_the_invitation_is_taken_out_of_the_environment() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7", "PATH": "/bin"}
    assert Invitation.take(environ, 7) == Invitation("@x", 3.0)
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, 0.0),
        ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": "7"}, 0.0),
        ({"WATCHDOG_USEC": "0"}, 0.0),
        ({}, 0.0),
    ],
)
def test_only_a_watchdog_that_means_us_is_fed(environ: dict[str, str], seconds: float) -> None:
    assert Invitation.take(dict(environ), 7).watchdog_s == seconds


# --- the sockets


@pytest.fixture
def ears() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for ear in made:
        ear.close()


def listen(ears: list[socket.socket], address: str) -> socket.socket:
    ears.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    ears[-1].bind(address.replace("@", "\0", 1))
    ears[-1].settimeout(5)
    return ears[-1]


@pytest.mark.parametrize("kind", ["a path", "an abstract name"])
def test_both_kinds_of_addresses_are_spoken_to(ears: list[socket.socket], tmp_path: Path, kind: str) -> None:
    address = f"{tmp_path}/manager" if kind == "a path" else f"@dtq-test{tmp_path}"
    ear = listen(ears, address)
    notifier(Invitation(address)).tell(10.0, READY)
    assert ear.recv(4096) == b"READY=1\nSTATUS=2 of 2 children at work"


def consume(send: Send, texts: Iterable[str]) -> None:
    for text in texts:
        send(text)


def test_a_full_socket_and_one_that_nobody_listens_at_hold_nobody(
    ears: list[socket.socket], tmp_path: Path
) -> None:
    listen(ears, f"{tmp_path}/manager")
    send = sender(f"{tmp_path}/manager")
    with pytest.raises(BlockingIOError):
        consume(send, repeat("x" * 100, 100_000))
    ears[-1].close()
    with pytest.raises(ConnectionRefusedError):
        send("x")
    (tmp_path / "manager").unlink()
    listen(ears, f"{tmp_path}/manager")
    send("back")
    assert ears[-1].recv(4096) == b"back"


@pytest.mark.parametrize("address", ["vsock:2:1234", "manager", ""])
def test_an_address_that_is_none_is_told_and_then_left_alone(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtq.supervisor")
    notifier(Invitation(address)).tell(10.0, READY)
    assert len(caplog.records) == bool(address)
