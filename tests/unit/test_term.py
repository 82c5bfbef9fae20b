"""A term has a number, and is not trusted up to its end."""

from __future__ import annotations

from dtq_supervisor.term import LOCK_MS, MARGIN_S, Term

LOCK_S = LOCK_MS / 1000


def test_it_is_trusted_from_the_confirmation_to_a_margin_before_its_end() -> None:
    term = Term()
    assert not term.trusted(0.0)
    assert term.confirmed(100.0) is True
    assert term.trusted(100.0)
    assert term.trusted(100.0 + LOCK_S - MARGIN_S - 0.01)
    assert not term.trusted(100.0 + LOCK_S - MARGIN_S)


def test_a_renewal_goes_on_with_the_same_term() -> None:
    term = Term()
    term.confirmed(100.0)
    assert term.confirmed(103.0) is False
    assert term.number == 1
    assert term.trusted(110.0)


def test_after_a_time_without_trust_it_is_a_new_one() -> None:
    term = Term()
    term.confirmed(100.0)
    assert term.confirmed(100.0 + LOCK_S) is True
    assert term.number == 2


def test_a_doubted_one_is_not_trusted_until_it_is_confirmed_again() -> None:
    term = Term()
    term.doubt()
    assert not term.doubted(), "there is nothing to doubt"
    term.confirmed(100.0)
    term.doubt()
    assert term.doubted()
    assert not term.trusted(100.1)
    assert term.confirmed(100.2) is False
    assert not term.doubted()
    assert term.trusted(100.3)


def test_an_ended_one_is_trusted_no_more() -> None:
    term = Term()
    assert term.ended() is False
    term.confirmed(100.0)
    assert term.ended() is True
    assert not term.trusted(100.1)
    assert term.ended() is False
    assert term.confirmed(101.0) is True
