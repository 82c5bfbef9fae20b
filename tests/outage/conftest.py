"""Fixtures of the stories of outages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.outage.stage import Orders
from tests.support.ledger import Ledger
from tests.support.servers import RedisServer
from tests.support.witness import Witness


@pytest.fixture
def orders(fresh_redis: RedisServer, ledger: Ledger) -> Iterator[Orders]:
    """Orders to this test's own server."""
    with Orders(fresh_redis, ledger) as made:
        yield made


@pytest.fixture
def witness(fresh_redis: RedisServer) -> Iterator[Witness]:
    with Witness(fresh_redis) as made:
        yield made
