"""Pytest fixtures for applications: `pytest_plugins = ["dtq_child.testing"]` in the conftest loads them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtq_child.app import App
from dtq_child.fake import faked


@pytest.fixture
def dtq_application() -> App:
    """The App that `dtq_app` puts on fakeredis: override it to return your own."""
    return App()


@pytest.fixture
def dtq_app(dtq_application: App) -> Iterator[App]:
    """The application on an empty fakeredis; `testing.work(dtq_app)` executes what was enqueued."""
    with faked(dtq_application) as app:
        yield app
