"""For tests of applications: tasks without workers.

    from dtq_child.testing import faked, inline, work

    def test_thumbnails(tmp_path):
        with inline(app):                          # executed at .delay(), here, without Redis
            handle = resize.delay("a.jpg", width=64)
            assert handle.result() == {"width": 64}

    def test_pipeline():
        with faked(app):                           # the real scripts on fakeredis[lua], executed by work()
            handle = resize.options(delay=60).delay("a.jpg")
            assert handle.status() == "scheduled"
            work(app, due=True)
            assert handle.result() == {"width": 128}

With `pytest_plugins = ["dtq_child.testing"]` in the conftest there is the fixture `dtq_app`, an App on
fakeredis."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dtq_child.app import App
from dtq_child.inline import InlineBroker

if TYPE_CHECKING:
    from dtq_child.fake import fake_app, faked, work

__all__ = ["InlineBroker", "fake_app", "faked", "inline", "work"]

pytest_plugins = ["dtq_child.pytest_plugin"]


@contextlib.contextmanager
def inline(app: App, *, propagate: bool = False) -> Iterator[InlineBroker]:
    """Executes each task of `app` at its enqueue, until the block ends. `propagate`: a task that ends in the
    dead letters raises there, instead of only at `handle.result()`. Yields the broker, whose `records` tell
    what was enqueued."""
    broker = InlineBroker(app, propagate)
    was = app.swap(app.settings(), broker)
    try:
        yield broker
    finally:
        app.swap(*was)


def __getattr__(name: str) -> Any:
    # Those need fakeredis and Linux, inline execution needs neither.
    if name in ("fake_app", "faked", "work"):
        return getattr(importlib.import_module("dtq_child.fake"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
