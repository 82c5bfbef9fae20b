"""What becomes of several signals that came between two looks."""

from __future__ import annotations

from signal import SIGCONT, SIGHUP, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU

import pytest

from dtq_supervisor.signals import COUNTED, MEANINGLESS, MEANINGS, in_order


@pytest.mark.parametrize(
    ("numbers", "came"),
    [
        ([], []),
        ([SIGTERM, SIGTERM, SIGHUP, SIGTERM], [(SIGHUP, 1), (SIGTERM, 1)]),
        ([SIGTSTP, SIGCONT, SIGTSTP], [(SIGCONT, 1), (SIGTSTP, 1)]),
        ([SIGCONT, SIGTSTP, SIGCONT], [(SIGTSTP, 1), (SIGCONT, 1)]),
        ([SIGTTIN, SIGTTIN, SIGTTOU, SIGTTIN], [(SIGTTIN, 2), (SIGTTOU, 1), (SIGTTIN, 1)]),
        ([SIGTTIN, SIGTERM, SIGTTIN, SIGTERM], [(SIGTTIN, 2), (SIGTERM, 1)]),
    ],
)
def test_the_last_of_equal_ones_counts_and_of_some_each(
    numbers: list[int], came: list[tuple[int, int]]
) -> None:
    assert in_order(numbers) == came


def test_each_signal_has_a_meaning_or_has_none() -> None:
    assert set(MEANINGS).isdisjoint(MEANINGLESS)
    assert set(MEANINGS) >= COUNTED
