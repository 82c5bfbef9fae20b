"""Every setting, declared once: flags, environment names, checks and docs/settings.md all come from here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dtq_child.errors import BadConfiguration
from dtq_child.setting import (
    API,
    CHILD,
    PRODUCER,
    READERS,
    SUPERVISOR,
    URL_SCHEMES,
    Kind,
    Setting,
    declare,
    table_of,
)

_ALL = READERS
_POOL = (SUPERVISOR, CHILD)
_TASKS = (PRODUCER, SUPERVISOR, CHILD, API)
_DAY = 86400
_TEN_YEARS = 3650 * _DAY
_WEEK = 7 * _DAY
_MIB = 1024 * 1024
_TEN_TIB = 10 * _MIB * _MIB
_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One value for each setting. Durations are seconds unless the name ends in `_ms`; sizes are bytes."""

    app: str | None = declare(
        None,
        Kind.TEXT,
        "The application: the module that makes it and its name there, like shop.tasks:app.",
        group="Application and pool",
        read_by=_POOL,
        flags=("APP",),
        pattern=r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*",
        pattern_says="module:attribute, like shop.tasks:app",
    )
    queues: tuple[str, ...] = declare(
        ("default",),
        Kind.LIST,
        "Queues to work on. The order is no priority: they are served in turn within each of the ten bands.",
        group="Application and pool",
        read_by=_POOL,
        flags=("-Q", "--queues"),
        pattern=r"[A-Za-z0-9_.\-]{1,64}",
        pattern_says="names of 1 to 64 letters, digits, _ . - with commas between them",
        reloadable=True,
    )
    procs: int | None = declare(
        None,
        Kind.INT,
        "Child processes, each executing one task at a time.",
        group="Application and pool",
        read_by=(SUPERVISOR,),
        flags=("-c", "--procs", "--concurrency"),
        low=1,
        high=1024,
        none="the CPUs allowed by affinity and cgroup",
    )
    prefetch: int = declare(
        1,
        Kind.INT,
        "Entries one child may hold. More than one makes short tasks wait behind long ones.",
        group="Application and pool",
        read_by=_POOL,
        flags=("--prefetch",),
        low=1,
        high=16,
        reloadable=True,
    )
    boot_timeout_s: float = declare(
        60.0,
        Kind.SECONDS,
        "How long importing the application, or one child's start, may take.",
        group="Application and pool",
        read_by=(SUPERVISOR,),
        flags=("--boot-timeout",),
        low=0.1,
        high=3600,
        reloadable=True,
    )
    shutdown_grace_s: float = declare(
        25.0,
        Kind.SECONDS,
        "How long running tasks may go on after TERM or INT before they are killed and released.",
        group="Application and pool",
        read_by=(SUPERVISOR,),
        flags=("--shutdown-grace",),
        low=0,
        high=_WEEK,
        reloadable=True,
    )
    preload: bool = declare(
        True,
        Kind.BOOL,
        "Each child imports the application by itself, instead of being forked from a process that did.",
        group="Application and pool",
        read_by=_POOL,
        flags=("--no-preload",),
        only_flag=True,
    )
    burst: bool = declare(
        False,
        Kind.BOOL,
        "Stop when nothing is undelivered or pending in the queues.",
        group="Application and pool",
        read_by=(SUPERVISOR,),
        flags=("--burst",),
        only_flag=True,
    )

    max_tasks_per_child: int | None = declare(
        None,
        Kind.INT,
        "A child is replaced after it has executed this many tasks. With 1, no task finds anything in its "
        "process that another one left there.",
        group="Recycling",
        read_by=(SUPERVISOR,),
        flags=("--max-tasks-per-child",),
        low=1,
        high=1_000_000_000,
        none="no limit",
        reloadable=True,
    )
    max_tasks_jitter: int | None = declare(
        None,
        Kind.INT,
        "Up to this many tasks more, spread over slots and lives, so that children are not replaced all at "
        "once.",
        group="Recycling",
        read_by=(SUPERVISOR,),
        flags=("--max-tasks-jitter",),
        low=0,
        high=1_000_000_000,
        none="none",
        reloadable=True,
    )
    max_memory_per_child: int | None = declare(
        None,
        Kind.SIZE,
        "A child whose resident size is above this is replaced when its task is over. Refused if it is below "
        "1.1 times the size of a new child.",
        group="Recycling",
        read_by=(SUPERVISOR,),
        flags=("--max-memory-per-child",),
        low=_MIB,
        high=_TEN_TIB,
        none="no limit",
        reloadable=True,
    )
    hard_memory_per_child: int | None = declare(
        None,
        Kind.SIZE,
        "A child whose resident size is above this while it executes a task is killed at once, and the task "
        "pays for a crash. Refused like the other.",
        group="Recycling",
        read_by=(SUPERVISOR,),
        flags=("--hard-memory-per-child",),
        low=_MIB,
        high=_TEN_TIB,
        none="no limit",
        reloadable=True,
    )

    redis_url: str = declare(
        "redis://127.0.0.1:6379/0",
        Kind.URL,
        "The Redis or Valkey server: redis://[user:password@]host:6379/DB, rediss:// for TLS, "
        "unix:///path/of/socket?db=0, redis+sentinel://[user:password@]host:26379,host2:26379/SERVICE/DB.",
        group="Redis",
        read_by=_ALL,
        flags=("--redis-url",),
        choices=URL_SCHEMES,
        secret=True,
    )
    key_prefix: str = declare(
        "dtq:",
        Kind.TEXT,
        "The beginning of every key. Installations with different prefixes share a Redis and nothing else.",
        group="Redis",
        read_by=_ALL,
        flags=("--key-prefix",),
        # 24, because a band's whole key must fit a row of the scoreboard beside a queue name of 64.
        pattern=r"[A-Za-z0-9_.:@/{}+\-]{1,24}",
        pattern_says="1 to 24 of letters, digits and _ . : @ / { } + -",
    )
    embedded: bool = declare(
        False,
        Kind.BOOL,
        "Start a private Redis on loopback for trying out; it and its data are gone at exit.",
        group="Redis",
        read_by=(SUPERVISOR,),
        flags=("--embedded",),
        only_flag=True,
    )
    allow_eviction: bool = declare(
        False,
        Kind.BOOL,
        "Start even if Redis may evict keys, tasks included, when its memory is full.",
        group="Redis",
        read_by=(SUPERVISOR,),
        flags=("--allow-eviction",),
        only_flag=True,
    )
    block_ms: int = declare(
        500,
        Kind.INT,
        "Milliseconds an idle child waits for a bell before it looks by itself.",
        group="Redis",
        read_by=_POOL,
        low=10,
        high=30_000,
        reloadable=True,
    )
    enqueue_timeout_s: float = declare(
        5.0,
        Kind.SECONDS,
        "A producer's call ends within this time, with an error if Redis has not answered.",
        group="Redis",
        read_by=_TASKS,
        low=0.05,
        high=600,
    )

    timeout_s: float = declare(
        300.0,
        Kind.SECONDS,
        "A task that names no timeout is killed after this long.",
        group="Tasks that name nothing else",
        read_by=_POOL,
        flags=("--timeout",),
        low=0.05,
        high=_WEEK,
        reloadable=True,
    )
    soft_timeout_s: float | None = declare(
        None,
        Kind.SECONDS,
        "A task that names no soft timeout has SoftTimeout raised in it after this long.",
        group="Tasks that name nothing else",
        read_by=_POOL,
        flags=("--soft-timeout",),
        low=0.05,
        high=_WEEK,
        none="no soft timeout",
        reloadable=True,
    )
    max_attempts: int = declare(
        3,
        Kind.INT,
        "Attempts that errors and timeouts may spend before a task is dead-lettered.",
        group="Tasks that name nothing else",
        read_by=_POOL,
        low=1,
        high=1_000_000,
        reloadable=True,
    )
    max_crashes: int = declare(
        3,
        Kind.INT,
        "Deaths of its process that a task may cause before it is dead-lettered as poison.",
        group="Tasks that name nothing else",
        read_by=_POOL,
        low=1,
        high=1000,
        reloadable=True,
    )
    unknown_task_ttl_s: float = declare(
        float(_DAY),
        Kind.SECONDS,
        "How long a task of an unknown type is tried again before it is dead-lettered.",
        group="Tasks that name nothing else",
        read_by=_POOL,
        low=0,
        high=_TEN_YEARS,
        reloadable=True,
    )

    visibility_timeout_s: float = declare(
        30.0,
        Kind.SECONDS,
        "The lease: a running task whose heartbeats stay away this long is taken over by another supervisor.",
        group="Leases",
        read_by=_POOL,
        flags=("--visibility-timeout",),
        low=0.2,
        high=_DAY,
    )
    heartbeat_interval_s: float = declare(
        10.0,
        Kind.SECONDS,
        "How often leases are renewed; at most half of the visibility timeout.",
        group="Leases",
        read_by=(SUPERVISOR,),
        flags=("--heartbeat-interval",),
        low=0.05,
        high=_DAY / 2,
    )
    cancel_grace_s: float = declare(
        5.0,
        Kind.SECONDS,
        "How long a cancelled task may clean up before it is killed.",
        group="Leases",
        read_by=(SUPERVISOR,),
        low=0,
        high=3600,
        reloadable=True,
    )

    task_retention_s: float = declare(
        float(_WEEK),
        Kind.SECONDS,
        "How long the record of an ended task is kept.",
        group="Bounds and retention",
        read_by=_TASKS,
        low=1,
        high=_TEN_YEARS,
        reloadable=True,
    )
    succeeded_retention_s: float | None = declare(
        None,
        Kind.SECONDS,
        "The same for tasks that succeeded.",
        group="Bounds and retention",
        read_by=_POOL,
        low=1,
        high=_TEN_YEARS,
        none="as DTQ_TASK_RETENTION_S",
        reloadable=True,
    )
    result_retention_s: float = declare(
        3600.0,
        Kind.SECONDS,
        "How long a result is kept.",
        group="Bounds and retention",
        read_by=_POOL,
        low=1,
        high=_TEN_YEARS,
        reloadable=True,
    )
    result_max_bytes: int = declare(
        8192,
        Kind.SIZE,
        "A larger result is cut, and flagged as cut.",
        group="Bounds and retention",
        read_by=_POOL,
        low=64,
        high=64 * _MIB,
        reloadable=True,
    )
    idem_ttl_s: float = declare(
        float(_DAY),
        Kind.SECONDS,
        "How long an idempotency key lasts, counted from enqueue or due time.",
        group="Bounds and retention",
        read_by=_TASKS,
        low=1,
        high=_TEN_YEARS,
        reloadable=True,
    )
    payload_max_bytes: int = declare(
        _MIB,
        Kind.SIZE,
        "A larger payload is refused at enqueue.",
        group="Bounds and retention",
        read_by=_TASKS,
        low=64,
        high=64 * _MIB,
    )
    queue_max_depth: int = declare(
        1_000_000,
        Kind.INT,
        "Tasks that one queue, or the schedule, may hold before enqueue is refused.",
        group="Bounds and retention",
        read_by=_TASKS,
        low=1,
        high=1_000_000_000,
    )
    dlq_maxlen: int = declare(
        10_000,
        Kind.INT,
        "Dead letters kept, about; the oldest go, and are counted.",
        group="Bounds and retention",
        read_by=_POOL,
        low=1,
        high=100_000_000,
        reloadable=True,
    )
    audit_maxlen: int = declare(
        10_000,
        Kind.INT,
        "Audit entries kept, about.",
        group="Bounds and retention",
        read_by=_TASKS,
        low=1,
        high=100_000_000,
    )
    recent_max: int = declare(
        10_000,
        Kind.INT,
        "Newest tasks remembered for listing and for the search for stranded work.",
        group="Bounds and retention",
        read_by=_TASKS,
        low=1,
        high=10_000_000,
    )

    metrics_bind: str = declare(
        "127.0.0.1:9646",
        Kind.TEXT,
        "Where the supervisor answers /healthz, /readyz, /status, /metrics: host:port, unix:/path or off.",
        group="Health and metrics",
        read_by=(SUPERVISOR,),
        flags=("--metrics-bind",),
        pattern=rf"off|unix:/.+|(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+):{_PORT}",
        pattern_says="host:port, [v6 address]:port, unix:/path or off",
    )
    metrics_token: str | None = declare(
        None,
        Kind.TEXT,
        "What a POST to the supervisor over TCP must bear; over a unix socket it needs none.",
        group="Health and metrics",
        read_by=(SUPERVISOR,),
        pattern=r"[!-~]{8,256}",
        pattern_says="8 to 256 printable characters without blanks",
        none="no POST over TCP",
        secret=True,
    )

    log_level: str = declare(
        "info",
        Kind.CHOICE,
        "The least important lines that are written.",
        group="Logs and files",
        read_by=_POOL,
        flags=("--log-level",),
        choices=("debug", "info", "warning", "error"),
        reloadable=True,
    )
    log_format: str = declare(
        "auto",
        Kind.CHOICE,
        "Logs go to stderr; auto is text on a terminal, else json.",
        group="Logs and files",
        read_by=_POOL,
        flags=("--log-format",),
        choices=("auto", "text", "json"),
    )
    pidfile: str | None = declare(
        None,
        Kind.PATH,
        "A file that is locked and holds the supervisor's pid while it runs.",
        group="Logs and files",
        read_by=(SUPERVISOR,),
        flags=("--pidfile",),
    )
    config: str | None = declare(
        None,
        Kind.PATH,
        "A TOML file whose table [dtq] holds settings under their names in lower case, without DTQ_.",
        group="Logs and files",
        read_by=_ALL,
        flags=("--config",),
    )

    def to_json(self) -> str:
        """For another process of this installation, over a descriptor; it holds secrets."""
        return json.dumps({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> Settings:
        """The other end of `to_json`, also as the already read object. Raises BadConfiguration."""
        held: Mapping[str, Any] = text if isinstance(text, Mapping) else json.loads(text)
        strange = {field.name for field in dataclasses.fields(cls)} ^ held.keys()
        if strange:
            names = ", ".join(sorted(strange))
            raise BadConfiguration([f"settings of another version of dtq ({names}): restart the service"])
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in held.items()}
        return cls(**values)


SETTINGS: tuple[Setting, ...] = table_of(Settings)

ACTIONS: tuple[Setting, ...] = (
    Setting(
        name="check",
        kind=Kind.ACTION,
        default=None,
        help="Check the settings, print each value with its origin, and end.",
        group="Only looking",
        read_by=(SUPERVISOR,),
        flags=("--check",),
        only_flag=True,
    ),
    Setting(
        name="version",
        kind=Kind.ACTION,
        default=None,
        help="Print the version and end.",
        group="Only looking",
        read_by=(SUPERVISOR,),
        flags=("--version",),
        only_flag=True,
    ),
)
