"""Who may look and act at the supervisor's endpoint."""

from __future__ import annotations

import pytest

from dtq_supervisor.visitor import Visitor, host_is_ours, is_loopback, why_not_act

TOKEN = "s3cret-s3cret"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9646",
        "LOCALHOST",
        "127.0.0.1:9646",
        "127.8.9.1",
        "[::1]:9646",
        "10.0.0.7:1",
        None,
    ],
)
def test_the_names_of_this_machine_and_of_the_bound_address_are_ours(host: str | None) -> None:
    assert host_is_ours(host, "10.0.0.7")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9646",
        "localhost.evil.example",
        "10.0.0.8",
        "",
        " ",
        "a@localhost",
        "::1",
        "[::1",
    ],
)
def test_another_name_may_be_a_page_that_had_itself_led_here(host: str) -> None:
    assert not host_is_ours(host, "10.0.0.7")


def test_bound_to_every_address_any_address_is_ours_and_no_name() -> None:
    for everywhere in ("0.0.0.0", "::"):
        assert host_is_ours("10.1.2.3:9646", everywhere)
        assert host_is_ours("[fe80::1]", everywhere)
        assert not host_is_ours("pods.example", everywhere)


def test_over_a_unix_socket_the_host_says_nothing() -> None:
    assert host_is_ours("whatever", "")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_is_known_in_every_spelling(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_whoever_comes_through_a_proxy_is_not_near() -> None:
    assert Visitor("127.0.0.1", {}).near
    assert Visitor("", {}, uid=1000).near
    assert not Visitor("127.0.0.1", {"x-forwarded-for": "9.9.9.9"}).near
    assert not Visitor("10.0.0.1", {}).near


def test_acting_needs_a_unix_socket_or_the_token_from_this_machine() -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert why_not_act(Visitor("", {}, uid=1000), None) == ""
    assert why_not_act(Visitor("127.0.0.1", bearer), TOKEN) == ""
    assert "set DTQ_METRICS_TOKEN" in why_not_act(Visitor("127.0.0.1", bearer), None)
    for wrong in (
        {},
        {"authorization": TOKEN},
        {"authorization": "Bearer x"},
        {"authorization": f"Basic {TOKEN}"},
    ):
        assert "Authorization" in why_not_act(Visitor("127.0.0.1", wrong), TOKEN)
    assert "from this machine" in why_not_act(Visitor("10.0.0.1", bearer), TOKEN)


def test_the_audit_gets_a_claimed_actor_and_a_door_that_cannot_be_chosen() -> None:
    plain = Visitor("", {}, uid=1000)
    assert (plain.actor(), plain.via("here"), plain.request_id()) == ("uid:1000", "unix:1000@here", "")
    named = Visitor("127.0.0.1", {"x-actor": "ann", "x-request-id": "r-1"})
    assert (named.actor(), named.via("here"), named.request_id()) == ("ann", "http:metrics@127.0.0.1", "r-1")
    odd = Visitor("127.0.0.1", {"x-actor": "a\nb", "x-request-id": "x" * 65})
    assert (odd.actor(), odd.request_id()) == ("token", "")
