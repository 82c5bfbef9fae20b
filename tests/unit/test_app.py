"""The App without a Redis: settings, conflicts, includes, what is enqueued with a broker that takes notes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtq_child import (
    App,
    BadConfiguration,
    BrokerUnavailable,
    Call,
    EnqueueManyError,
    InvalidTask,
    PayloadError,
    QueueFull,
    Record,
    TaskNotFound,
)
from dtq_child import settings as settings_module
from dtq_child.ids import new_task_id


@dataclass(frozen=True)
class Taken:
    task_id: str
    deduplicated: bool = False


@dataclass
class Notebook:
    """Accepts everything, until it is told to refuse."""

    batches: list[list[Call]] = field(default_factory=list)
    refusal: Exception | None = None
    refuse_from: int = 0
    threads: set[int] = field(default_factory=set)

    def enqueue(self, calls: Sequence[Call], /) -> list[Taken]:
        self.threads.add(threading.get_ident())
        if self.refusal is not None and len(self.batches) >= self.refuse_from:
            raise self.refusal
        self.batches.append(list(calls))
        return [Taken(call.task_id) for call in calls]

    def record(self, task_id: str, /) -> Record | None:
        return None

    def status(self, task_id: str, /) -> str:
        raise TaskNotFound(task_id)

    def result(self, task_id: str, /) -> bytes | None:
        return None

    def cancel(self, task_id: str, /) -> str:
        return "unknown"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DTQ_REDIS_URL", "DTQ_KEY_PREFIX", "DTQ_PAYLOAD_MAX_BYTES", "DTQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
def app(notebook: Notebook) -> App:
    app = App()
    app.swap(None, notebook)
    return app


# -- settings


def test_an_argument_wins_over_the_environment_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTQ_REDIS_URL", "redis://from-env:1/0")
    monkeypatch.setenv("DTQ_KEY_PREFIX", "env:")
    settings = App(redis_url="redis://from-app:1/0", enqueue_timeout_s=2).settings()
    assert settings.redis_url == "redis://from-app:1/0"
    assert settings.key_prefix == "env:"
    assert (settings.enqueue_timeout_s, settings.queue_max_depth) == (2.0, 1_000_000)


def test_the_environment_is_read_at_first_use_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    monkeypatch.setenv("DTQ_KEY_PREFIX", "later:")
    assert app.settings().key_prefix == "later:"
    monkeypatch.setenv("DTQ_KEY_PREFIX", "too-late:")
    assert app.settings().key_prefix == "later:"


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "dtq.toml"
    file.write_text('[dtq]\nkey_prefix = "toml:"\n')
    assert App(config=str(file)).settings().key_prefix == "toml:"


def test_a_worker_puts_its_settings_in_force(app: App) -> None:
    given = settings_module.defaults(key_prefix="worker:", timeout_s=7)
    app.configure(given)
    assert app.settings() is given


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"redis_url": "127.0.0.1"}, "argument redis_url"),
        ({"key_prefix": "no spaces"}, "argument key_prefix"),
        ({"payload_max_bytes": -1}, "argument payload_max_bytes"),
        ({"redis": "redis://127.0.0.1"}, "no such setting; did you mean redis_url?"),
        ({"timeout_s": 60}, "argument timeout_s: only workers read it: give the supervisor DTQ_TIMEOUT_S"),
        ({"preload": False}, "argument preload: only workers read it"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadConfiguration) as caught:
        App(**arguments)
    assert problem in caught.value.problems[0]


def test_an_environment_that_cannot_work_is_refused_at_first_use(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTQ_PAYLOAD_MAX_BYTES", "huge")
    with pytest.raises(BadConfiguration, match="DTQ_PAYLOAD_MAX_BYTES"):
        app.enqueue("t", {})


@pytest.mark.parametrize(
    ("of_app", "of_supervisor", "conflicts"),
    [
        ({}, {"redis_url": "redis://a", "key_prefix": "other:"}, 0),
        ({"redis_url": "redis://a"}, {"redis_url": "redis://a:6379/0"}, 0),
        ({"redis_url": "redis://A:6379"}, {"redis_url": "redis://a/"}, 0),
        ({"redis_url": "redis://a/1"}, {"redis_url": "redis://a/0"}, 1),
        ({"redis_url": "redis://a"}, {"redis_url": "rediss://a"}, 1),
        ({"redis_url": "redis://u:x@a"}, {"redis_url": "redis://v:y@a"}, 0),
        ({"redis_url": "redis://a:6380"}, {"redis_url": "redis://a"}, 1),
        ({"redis_url": "unix:///run/a?db=1"}, {"redis_url": "unix:///run/a?db=2"}, 1),
        ({"redis_url": "unix:///run/a"}, {"redis_url": "unix:///run/a"}, 0),
        ({"redis_url": "redis+sentinel://a,b/s"}, {"redis_url": "redis+sentinel://b:26379,a/s/0"}, 0),
        ({"redis_url": "redis+sentinel://a,b/s"}, {"redis_url": "redis+sentinel://a,b/t"}, 1),
        ({"key_prefix": "dtq:"}, {}, 0),
        ({"key_prefix": "a:", "redis_url": "redis://a"}, {}, 2),
    ],
)
def test_an_app_that_names_other_data_than_its_supervisor_conflicts(
    of_app: dict[str, str], of_supervisor: dict[str, str], conflicts: int
) -> None:
    lines = App(**of_app).conflicts(settings_module.defaults(**of_supervisor))
    assert len(lines) == conflicts, lines
    assert all("leave it out of the App" in line for line in lines)


def test_a_conflict_shows_no_password() -> None:
    app = App(redis_url="redis://u:secret@a")
    [line] = app.conflicts(settings_module.defaults(redis_url="redis://u:other@b"))
    assert "secret" not in line
    assert "other" not in line


# -- includes


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path in which a test may make packages called dtq_shop_…"""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("dtq_shop")]:
        del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, source in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(source))


def test_includes_are_imported_when_a_worker_asks(shop: Path) -> None:
    write(shop, dtq_shop__tasks="LOADED = True")
    app = App(include=["dtq_shop.tasks"])
    assert "dtq_shop.tasks" not in sys.modules
    app.load_includes()
    assert "dtq_shop.tasks" in sys.modules
    assert App(include="dtq_shop.tasks").include == ("dtq_shop.tasks",)


def test_packages_are_searched_for_tasks_and_their_errors_seen(shop: Path) -> None:
    write(shop, dtq_shop_a__tasks="", dtq_shop_b__views="", dtq_shop_c__jobs="")
    app = App()
    app.autodiscover(["dtq_shop_a", "dtq_shop_b"])
    app.autodiscover(["dtq_shop_c"], related_name="jobs")
    app.load_includes()
    assert {"dtq_shop_a.tasks", "dtq_shop_c.jobs"} <= sys.modules.keys()
    assert "dtq_shop_b.tasks" not in sys.modules

    write(shop, dtq_shop_d__tasks="import dtq_shop_missing")
    app.autodiscover(["dtq_shop_d"])
    with pytest.raises(ModuleNotFoundError, match="dtq_shop_missing"):
        app.load_includes()


DJANGO = """
    class Config:
        def __init__(self, name): self.name = name
    class Registry:
        ready = False
        def get_app_configs(self):
            assert self.ready
            return [Config("dtq_shop_a"), Config("dtq_shop_b")]
    apps = Registry()
"""


def test_djangos_installed_apps_are_searched_after_setting_django_up(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(shop, dtq_shop_a__tasks="", dtq_shop_b__views="", django__apps=DJANGO)
    (shop / "django" / "__init__.py").write_text(
        "def setup():\n    from django.apps import apps\n    apps.ready = True\n"
    )
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "dtq_shop.settings")
    app = App()
    app.autodiscover()
    try:
        app.load_includes()
    finally:
        for name in ("django", "django.apps"):
            sys.modules.pop(name, None)
    assert "dtq_shop_a.tasks" in sys.modules
    assert "dtq_shop_b.tasks" not in sys.modules


def test_without_django_autodiscover_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    app.autodiscover()
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    with pytest.raises(BadConfiguration, match="DJANGO_SETTINGS_MODULE is not set"):
        app.load_includes()
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "x")
    monkeypatch.setitem(sys.modules, "django", None)
    with pytest.raises(BadConfiguration, match="install it, or name the packages"):
        app.load_includes()


# -- enqueueing


def test_a_task_known_here_is_bound_by_name_too(app: App, notebook: Notebook) -> None:
    @app.task(name="resize", queue="images", priority=9)
    def resize(path: str, width: int = 1) -> None: ...

    app.enqueue("resize", {"width": 2, "path": "a"})
    resize.delay("a", 2)
    [by_name], [by_task] = notebook.batches
    assert (by_name.queue, by_name.priority, by_name.payload) == ("images", 9, b'{"path":"a","width":2}')
    assert by_name.payload == by_task.payload
    assert by_name.task_id != by_task.task_id
    for wrong in ({"path": "a", "hight": 1}, {}):
        with pytest.raises(TypeError, match=r"resize\(\)"):
            app.enqueue("resize", wrong)
    assert len(notebook.batches) == 2


def test_an_unknown_type_is_enqueued_as_it_is(app: App, notebook: Notebook) -> None:
    app.enqueue("of.others", {"b": 1, "a": [2]}, queue="theirs", priority=1)
    app.enqueue("of.others")
    [first], [second] = notebook.batches
    assert (first.task_type, first.queue, first.priority) == ("of.others", "theirs", 1)
    assert first.payload == b'{"b":1,"a":[2]}'
    assert (second.queue, second.priority, second.payload) == ("default", 5, b"{}")


@pytest.mark.parametrize("arguments", [[], "a", {1: 2}, {"a": object()}, {"a": 2**70}])
def test_arguments_that_are_no_json_object_are_refused(app: App, notebook: Notebook, arguments: Any) -> None:
    with pytest.raises(PayloadError):
        app.enqueue("of.others", arguments)
    assert notebook.batches == []


def test_a_bad_type_or_option_is_refused(app: App) -> None:
    with pytest.raises(InvalidTask, match="task type"):
        app.enqueue("", {})
    with pytest.raises(TypeError, match="no such option: colour"):
        app.enqueue("t", {}, colour="red")  # type: ignore[call-arg]
    with pytest.raises(InvalidTask, match="task id"):
        app.handle("no/slashes")


def test_an_id_that_was_given_is_used(app: App, notebook: Notebook) -> None:
    assert app.enqueue("t", task_id="mine-1").id == "mine-1"
    assert app.handle("mine-1") == app.handle("mine-1") != App().handle("mine-1")


# -- many


def calls(app: App, number: int, size: int = 0) -> list[Call]:
    return [app.call("t", {"n": n, "x": "x" * size}) for n in range(number)]


def test_many_go_in_batches_and_in_order(app: App, notebook: Notebook) -> None:
    made = calls(app, 450)
    handles = app.enqueue_many(iter(made))
    assert [len(batch) for batch in notebook.batches] == [200, 200, 50]
    assert [handle.id for handle in handles] == [call.task_id for call in made]
    assert app.enqueue_many([]) == []
    app.enqueue_many(made[:5], batch=2)
    assert [len(batch) for batch in notebook.batches[3:]] == [2, 2, 1]


def test_large_payloads_make_small_batches(app: App, notebook: Notebook) -> None:
    app.enqueue_many(calls(app, 10, 1_000_000))
    assert [len(batch) for batch in notebook.batches] == [4, 4, 2]


@pytest.mark.parametrize("batch", [0, 501, -1, 1.5, True, "200"])
def test_a_batch_has_bounds(app: App, batch: Any) -> None:
    with pytest.raises(InvalidTask, match="batch"):
        app.enqueue_many([], batch=batch)


def test_a_batch_that_fails_tells_what_was_accepted_before_it(app: App, notebook: Notebook) -> None:
    notebook.refusal, notebook.refuse_from = QueueFull("default", 3, 3), 2
    made = calls(app, 7)
    with pytest.raises(EnqueueManyError) as caught:
        app.enqueue_many(made, batch=2)
    assert [handle.id for handle in caught.value.accepted] == [call.task_id for call in made[:4]]
    assert caught.value.cause is notebook.refusal is caught.value.__cause__

    notebook.refusal = None
    rest = app.enqueue_many(made[len(caught.value.accepted) :], batch=2)
    assert [handle.id for handle in rest] == [call.task_id for call in made[4:]], (
        "the same ids: safe to resend"
    )


@pytest.mark.parametrize("wrong", [1, "t", None, {"n": 1}])
def test_what_is_no_call_is_a_type_error_unless_something_was_accepted(app: App, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is no Call: make one by task\.call"):
        app.enqueue_many([*calls(app, 1), wrong])
    with pytest.raises(EnqueueManyError, match="is no Call") as caught:
        app.enqueue_many([*calls(app, 3), wrong], batch=2)
    assert len(caught.value.accepted) == 2


def test_a_producer_that_fails_midway_learns_what_was_accepted(app: App) -> None:
    def broken() -> Iterator[Call]:
        yield from calls(app, 3)
        raise LookupError("the table ended")

    with pytest.raises(EnqueueManyError) as caught:
        app.enqueue_many(broken(), batch=2)
    assert len(caught.value.accepted) == 2
    assert isinstance(caught.value.cause, LookupError)


# -- async twins


def test_the_async_twins_leave_the_loop_alone(app: App, notebook: Notebook) -> None:
    @app.task(name="t")
    def task(n: int) -> None: ...

    async def produce() -> list[str]:
        one = await task.adelay(1)
        two = await task.options(priority=9).adelay(2)
        three = await app.aenqueue("t", {"n": 3}, priority=9)
        [four] = await app.aenqueue_many([task.call(4)])
        with pytest.raises(TypeError):
            await app.aenqueue("t", {})
        with pytest.raises(TaskNotFound):
            await one.astatus()
        assert await one.acancel() == "unknown"
        return [one.id, two.id, three.id, four.id]

    ids = asyncio.run(produce())
    assert ids == [batch[0].task_id for batch in notebook.batches]
    assert threading.get_ident() not in notebook.threads


def test_an_error_of_the_broker_reaches_the_awaiting_task(app: App, notebook: Notebook) -> None:
    notebook.refusal = BrokerUnavailable("away")
    with pytest.raises(BrokerUnavailable):
        asyncio.run(app.aenqueue("t"))


# -- ids, the door


def test_ids_sort_by_time_and_never_repeat() -> None:
    ids = [new_task_id() for _ in range(2000)]
    assert len(set(ids)) == 2000
    assert all(len(made) == 32 and made[12] == "7" and made[16] in "89ab" for made in ids)
    assert [made[:16] for made in ids] == sorted(made[:16] for made in ids)


def test_importing_the_package_imports_neither_redis_nor_asyncio() -> None:
    code = """
        import sys, dtq_child
        app = dtq_child.App()
        @app.task(name="t")
        def t(): pass
        t.call()
        print(*sorted({"redis", "asyncio", "hiredis", "pytest", "fakeredis"} & sys.modules.keys()))
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == ""
