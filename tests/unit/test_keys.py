"""The names in Redis are what other programs are told (the table of keys)."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dtq_child.keys import GROUP, Keys, consumer, new_worker_id, park

QUEUES = st.from_regex(r"[A-Za-z0-9_.\-]{1,64}", fullmatch=True)

TABLE = {
    "stream": "dtq:stream:images:p7",
    "dead_letter": "dtq:stream:dead-letter",
    "audit": "dtq:stream:audit",
    "schedule": "dtq:retry:schedule",
    "claimed": "dtq:retry:claimed",
    "task": "dtq:task:t1",
    "result": "dtq:result:t1",
    "idempotency": "dtq:idempotency:images:a:b",
    "worker": "dtq:worker:w1",
    "workers": "dtq:workers",
    "queues": "dtq:queues",
    "task_types": "dtq:task_types",
    "paused": "dtq:queue:images:paused",
    "cancelled": "dtq:cancelled",
    "recent": "dtq:tasks:recent",
    "lock": "dtq:lock:scheduler",
    "bell_queue": "dtq:bell:q:images",
    "bell_worker": "dtq:bell:w:w1",
    "hint": "dtq:hint",
    "schema": "dtq:schema",
    "nil": "dtq:nil",
    "events": "dtq:events",
}
ARGUMENTS: dict[str, tuple[str | int, ...]] = {
    "stream": ("images", 7),
    "task": ("t1",),
    "result": ("t1",),
    "idempotency": ("images", "a:b"),
    "worker": ("w1",),
    "paused": ("images",),
    "bell_queue": ("images",),
    "bell_worker": ("w1",),
}


def names_under(prefix: str) -> dict[str, str]:
    keys = Keys(prefix)
    return {
        name: getattr(keys, name)(*ARGUMENTS[name]) if name in ARGUMENTS else getattr(keys, name)
        for name in TABLE
    }


def test_each_key_is_named_as_documented() -> None:
    assert names_under("dtq:") == TABLE
    assert GROUP == "workers"


def test_nothing_is_named_outside_the_table() -> None:
    public = {name for name in dir(Keys("")) if not name.startswith("_")}
    assert public - {"bands", "split_stream", "prefix"} == set(TABLE)


def test_all_names_stand_under_the_prefix() -> None:
    assert names_under("shop{1}:") == {name: "shop{1}:" + key[4:] for name, key in TABLE.items()}


def test_the_bands_of_a_queue_go_from_the_first_to_the_last_priority() -> None:
    assert Keys().bands("q") == [f"dtq:stream:q:p{band}" for band in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]


@given(QUEUES, st.integers(0, 9), st.sampled_from(["", "dtq:", "a:p1:", "stream:"]))
def test_a_band_is_split_into_what_it_was_made_of(queue: str, band: int, prefix: str) -> None:
    keys = Keys(prefix)
    assert keys.split_stream(keys.stream(queue, band)) == (queue, band)


@given(QUEUES, QUEUES)
def test_no_two_queues_share_a_name(one: str, other: str) -> None:
    keys = Keys()
    if one != other:
        ours = {*keys.bands(one), keys.paused(one), keys.bell_queue(one)}
        theirs = {*keys.bands(other), keys.paused(other), keys.bell_queue(other)}
        assert not ours & theirs
        assert not ours & {keys.dead_letter, keys.audit, keys.schedule}


def test_workers_and_their_consumers() -> None:
    first, second = new_worker_id(), new_worker_id()
    assert first != second
    assert re.fullmatch(r".+-\d+-[0-9a-f]{8}", first)
    assert consumer("w1", 3, 17) == "w1:3.17"
    assert park("w1") == "w1:park"
