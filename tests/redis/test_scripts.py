"""Scripts are loaded by their hash, whatever the server forgets, whoever parses its replies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from redis._parsers import _RESP2Parser  # the parser of those who have no hiredis

from dtq_child.broker import Broker
from dtq_child.connection import Link, connector
from dtq_child.errors import BadConfiguration
from dtq_child.keys import Keys, consumer
from dtq_child.scripts import Constants, Scripts, event_base
from dtq_child.settings import defaults
from dtq_child.turns import Turns, Want
from dtq_child.wire import RawConnection
from tests.redis.desk import OPERATOR, Desk, buried, call, handed_back, pair, retried, succeeded
from tests.support.servers import RedisServer

Make = Callable[[], RawConnection]


def life(server: RedisServer, make: Make, before_each: Callable[[], object] = lambda: None) -> str:
    """One of everything that a producer, an operator and a child ask for; all answers and all records in the
    end, without what differs from one run to the next."""
    settings = defaults(redis_url=server.url, prefetch=2)
    broker = Broker(settings, lambda: Link(make))
    links = [Link(make), Link(make)]
    one, two = (
        Turns(link, broker.keys, settings, "w1", consumer("w1", slot, 1), ["default", "images"])
        for slot, link in enumerate(links)
    )
    told: list[object] = []

    def ask(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before_each()
        answer = work(*args, **options)
        told.append(answer)
        return answer

    def outcome_of(claimed: Any) -> Any:
        assert claimed is not None
        return claimed

    ask(broker.enqueue, [call(f"t{n}", idempotency_key=f"k{n}", metadata='{"n":1}') for n in range(4)])
    ask(broker.enqueue, [call("t0"), call("t9", idempotency_key="k1"), call("later", delay_ms=60_000)])
    ask(one.wait, ["default"], 1)
    reply = ask(one.turn, None, Want(own=True, park=True, woken=True))
    reply = ask(one.turn, succeeded(outcome_of(reply.claimed)), Want(), reply.held)
    reply = ask(one.turn, retried(outcome_of(reply.claimed), 60_000), Want(), reply.held)
    ask(one.settle, handed_back(outcome_of(reply.claimed)))
    ask(one.settle, handed_back(outcome_of(reply.claimed)))
    ask(one.release, [], reply.held)
    reply = ask(two.turn, None, Want(park=True))
    ask(two.release, [outcome_of(reply.claimed).token], to_anyone=False)
    reply = ask(two.turn, None, Want(park=True))
    ask(two.settle, buried(outcome_of(reply.claimed)))
    dead = outcome_of(reply.claimed).token.task_id
    ask(broker.requeue, dead, OPERATOR)
    ask(broker.pause, "default", OPERATOR)
    ask(one.turn, None, Want(own=True, park=True))
    ask(broker.resume, "default", OPERATOR)
    ask(broker.paused, "default")
    ask(broker.cancel, "later", OPERATOR)
    ask(broker.cancel, "never", OPERATOR)
    ask(broker.discard, "t0", OPERATOR)
    ask(broker.result, "t0")
    ask(broker.depth, "default")
    told += [sorted(ask(broker.record, f"t{number}").as_dict().items()) for number in range(4)]
    for link in links:
        link.close()
    broker.close()
    return re.sub(r"<[^>]*object at[^>]*>|\d{12,}(-\d+)?|waited_ms=\d+", "#", "\n".join(map(repr, told)))


@pytest.fixture
def usual(every_redis: RedisServer) -> str:
    """What everybody should see."""
    told = life(every_redis, connector(every_redis.url))
    every_redis.reset()
    assert told.count("settled") > 2
    return told


@pytest.mark.parametrize(
    "options", ["?protocol=3", "?decode_responses=true", "?protocol=3&decode_responses=1"]
)
def test_what_a_url_asks_of_the_client_makes_no_difference(
    every_redis: RedisServer, usual: str, options: str
) -> None:
    assert life(every_redis, connector(every_redis.url + options)) == usual


def test_without_hiredis_it_is_the_same(every_redis: RedisServer, usual: str) -> None:
    make = connector(every_redis.url)

    def plain() -> RawConnection:
        raw: Any = make()
        raw.set_parser(_RESP2Parser)
        return raw  # type: ignore[no-any-return]

    assert life(every_redis, plain) == usual


def test_a_server_that_forgets_its_scripts_is_told_them_again(every_redis: RedisServer, usual: str) -> None:
    make = connector(every_redis.url)
    assert life(every_redis, make, lambda: every_redis.cli("SCRIPT", "FLUSH")) == usual


def test_a_forgotten_script_costs_three_commands_once(every_redis: RedisServer) -> None:
    with Desk(every_redis) as desk:
        desk.redis.config_resetstat()
        for number in range(3):
            desk.enqueue(f"t{number}")
        stats = {
            name.removeprefix("cmdstat_"): n["calls"] for name, n in desk.redis.info("commandstats").items()
        }
        assert stats["evalsha"] == 4
        assert stats.get("script|load", stats.get("script")) == 1


def test_the_hash_is_the_servers(every_redis: RedisServer) -> None:
    scripts = Scripts(Keys(), Constants.of(defaults()))
    text = scripts.text("enqueue")
    assert every_redis.cli("SCRIPT", "LOAD", text).decode() == scripts.sha("enqueue")
    assert hashlib.sha1(text, usedforsecurity=False).hexdigest() == scripts.sha("enqueue")


def test_settings_are_written_into_the_text() -> None:
    constants = Constants.of(
        defaults(task_retention_s=12.4, succeeded_retention_s=1.2, dlq_maxlen=77, idem_ttl_s=33.0)
    )
    assert (constants.retention_s, constants.succeeded_retention_s) == (12, 1)
    assert Constants.of(defaults(task_retention_s=12.4)).succeeded_retention_s == 12
    texts = [Scripts(Keys(), c).text("settle_and_claim") for c in (constants, Constants.of(defaults()))]
    assert texts[0] != texts[1]
    assert b"77" in texts[0]


def test_a_prefix_that_would_break_the_text_is_refused() -> None:
    for prefix in ("it's:", "back\\slash:", "line\nbreak:"):
        with pytest.raises(BadConfiguration, match="key prefix"):
            Scripts(Keys(prefix), Constants.of(defaults())).text("enqueue")


def test_event_bases_are_24_hex_digits_and_never_the_same() -> None:
    bases = {event_base() for _ in range(1000)}
    assert len(bases) == 1000
    assert all(re.fullmatch("[0-9a-f]{24}", base) for base in bases)


def test_the_turns_of_two_children_never_share_an_event_id(every_redis: RedisServer) -> None:
    with Desk(every_redis) as desk:
        children = [desk.child(slot) for slot in range(2)]
        desk.enqueue(*(f"t{n}" for n in range(6)))
        for child in children * 3:
            claimed = child.turn(None, Want()).claimed
            assert claimed is not None
            child.settle(retried(claimed, 60_000))
            assert desk.owner(*pair(claimed)) is None
        ids = [event["event_id"] for event in desk.events()]
        assert len(ids) == 6 + 6 * 3
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch("[0-9a-f]{32}", event_id) for event_id in ids)
        assert json.loads(desk.record("t0")["execution:1"])["outcome"] == "raised"
