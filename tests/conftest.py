"""Fixtures of all tests: private servers, tools that end with the test, and nothing left running."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import leftovers
from tests.support.binaries import VERSIONS, best_match, binary_for
from tests.support.ledger import VARIABLE as LEDGER
from tests.support.ledger import Ledger
from tests.support.proxy import FaultProxy
from tests.support.servers import RedisServer
from tests.support.supervisor import SupervisorProcess

MATRIX = os.environ.get("DTQ_TEST_MATRIX", "") not in ("", "0")
HERE = Path(__file__).parent
MARKS_BY_FOLDER = {"redis": ["redis"], "process": ["process"], "outage": ["process"]}
SESSION = f"dtq-{os.getpid()}-{os.urandom(3).hex()}"
_numbers = itertools.count(1)
_supervisors = pytest.StashKey[list[SupervisorProcess]]()

SupervisorStarter = Callable[..., SupervisorProcess]
ServerStarter = Callable[..., RedisServer]
ProxyStarter = Callable[[int], FaultProxy]


def every_version() -> list[str]:
    """Those that are promised, found or not (a missing one is seen as a skip), and Valkey where it is
    installed."""
    return [v for v in VERSIONS if v != "valkey" or best_match(v) is not None]


def versions_of_matrix() -> list[str]:
    return every_version() if MATRIX else ["any"]


# -- nothing is left running


def pytest_configure(config: pytest.Config) -> None:
    leftovers.adopt_orphans()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            for mark in MARKS_BY_FOLDER.get(item.path.relative_to(HERE).parts[0], ()):
                item.add_marker(mark)


def pytest_sessionfinish(session: pytest.Session) -> None:
    leftovers.kept.clear()
    found = leftovers.left_behind()
    if found:
        leftovers.kill_all(found)
        print("\nleft running at the end:", *found, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _nothing_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process behind, whatever the process did to hide, and ends it."""
    monkeypatch.setenv(leftovers.TAG, f"{SESSION}.{next(_numbers)}")
    yield
    found = leftovers.left_behind()
    if found:
        leftovers.kill_all(found)
        pytest.fail("left running:\n" + "\n".join(map(str, found)))


# -- servers


class SharedServers:
    """The servers of one module, one a version, started when first asked for and as new for each test."""

    def __init__(self) -> None:
        self._servers: dict[str, RedisServer] = {}

    def fresh(self, version: str) -> RedisServer:
        if version not in self._servers:
            self._servers[version] = RedisServer(binary_for(version), shared=True)
        self._servers[version].reset()
        return self._servers[version]

    def destroy(self) -> None:
        for server in self._servers.values():
            server.destroy()


@pytest.fixture(scope="module")
def shared_servers() -> Iterator[SharedServers]:
    servers = SharedServers()
    yield servers
    servers.destroy()


@pytest.fixture(params=versions_of_matrix())
def redis_version(request: pytest.FixtureRequest) -> str:
    """ "any", the newest that is installed; with DTQ_TEST_MATRIX=1 each promised version in turn."""
    return str(request.param)


@pytest.fixture
def redis_server(shared_servers: SharedServers) -> RedisServer:
    """An empty server of the newest version that is installed, shared by the module's tests one after the
    other."""
    return shared_servers.fresh("any")


@pytest.fixture
def any_redis(shared_servers: SharedServers, redis_version: str) -> RedisServer:
    """The same, but on each version under DTQ_TEST_MATRIX=1."""
    return shared_servers.fresh(redis_version)


@pytest.fixture(params=every_version())
def every_redis(shared_servers: SharedServers, request: pytest.FixtureRequest) -> RedisServer:
    """The same on each version, always: for the tests of scripts."""
    return shared_servers.fresh(str(request.param))


@pytest.fixture
def start_redis(redis_version: str) -> Iterator[ServerStarter]:
    """Starts servers of this test alone; takes RedisServer's keyword arguments."""
    servers: list[RedisServer] = []

    def start(**options: Any) -> RedisServer:
        servers.append(RedisServer(binary_for(redis_version), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.destroy()


@pytest.fixture
def fresh_redis(start_redis: ServerStarter) -> RedisServer:
    """A server of this test alone, without persistence: to be stopped, killed, paused."""
    return start_redis()


@pytest.fixture
def start_proxy() -> Iterator[ProxyStarter]:
    """Starts fault proxies before a port."""
    proxies: list[FaultProxy] = []

    def start(target_port: int) -> FaultProxy:
        proxies.append(FaultProxy(target_port))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


# -- supervisors and what they witness


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The outside ledger of this test, named in the environment for handlers."""
    path = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(path))
    return Ledger(path)


@pytest.fixture
def start_supervisor(
    request: pytest.FixtureRequest, tmp_path: Path, ledger: Ledger
) -> Iterator[SupervisorStarter]:
    """Starts supervisors that end with the test: `start_supervisor("module:app", server=…, procs=…, …)`.

    Takes SupervisorProcess's keyword arguments; the probe handlers and this test's ledger are the defaults.
    """
    started: list[SupervisorProcess] = request.node.stash.setdefault(_supervisors, [])

    def start(app: str = "tests.support.handlers:app", **options: Any) -> SupervisorProcess:
        started.append(SupervisorProcess(app, **{"folder": tmp_path, "ledger": ledger, **options}))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.destroy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows how the logs of a failed test's supervisors end."""
    report = yield
    if call.when == "call" and report.failed:
        for supervisor in item.stash.get(_supervisors, []):
            title = f"log of supervisor {supervisor.number} (exit code {supervisor.exit_code})"
            report.sections.append((title, supervisor.tail()))
    return report
