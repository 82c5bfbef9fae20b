"""Imports an application named as `module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from dtq_child import forked
from dtq_child.app import App
from dtq_child.errors import BadConfiguration
from dtq_child.settings import Settings


def load_app(name: str) -> App:
    """The App called `name`, with everything imported that it includes.

    The module keeps its own name, so that its tasks are called the same here and in producers. Raises
    BadConfiguration if nothing of that name is there; what the application's code raises is not caught."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise BadConfiguration([f"APP is {name!r}: write it as module:attribute, like shop.tasks:app"])
    _look_here_first()
    app = _attribute(_module(module_name, name), attribute, name)
    app.load_includes()
    return app


def load_configured(name: str, settings: Settings) -> App:
    """The App for a worker: the supervisor's settings win. Raises BadConfiguration also if the App names
    another server or prefix, where its tasks would be enqueued and nobody would look."""
    app = _load_alone(name)
    conflicts = app.conflicts(settings)
    if conflicts:
        raise BadConfiguration(conflicts)
    app.configure(settings)
    return app


def _load_alone(name: str) -> App:
    """`load_app`, out of which only the process comes that went in."""
    pid, failure = os.getpid(), None
    try:
        return load_app(name)
    except BaseException as error:
        failure = error
        raise
    finally:
        if os.getpid() != pid:
            forked.end_copy("the application's import", failure)


def _look_here_first() -> None:
    """As `python` itself does it for a script, but only now: what dtq needs is imported, so a queue.py of the
    application takes nobody's place but in what the application imports."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise BadConfiguration(
            [f"the working directory is gone ({error.strerror}): start in one that exists"]
        ) from None
    if here not in sys.path:
        sys.path.insert(0, here)


def _module(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise  # the module is there, and one that it imports is not: its own traceback says so best
        raise BadConfiguration(
            [
                f"APP is {name!r}: there is no module {missing!r} in {os.getcwd()} or on Python's path; "
                "start in the application's folder, or install the application"
            ]
        ) from error


def _attribute(module: ModuleType, attribute: str, name: str) -> App:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadConfiguration(
                [f"APP is {name!r}: the module{_file_of(module)} has no {attribute!r}{_meant(module)}"]
            )
        found = getattr(found, part)
    if not isinstance(found, App):
        raise BadConfiguration(
            [f"APP is {name!r}: that is a {type(found).__name__}, no dtq_child.App{_meant(module)}"]
        )
    return found


def _file_of(module: ModuleType) -> str:
    """A file of the application that is called like a module in use already is not what was found."""
    file = getattr(module, "__file__", None)
    return f" {file}" if isinstance(file, str) else ""


def _meant(module: ModuleType) -> str:
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    if not apps:
        return "; make one there, like app = dtq_child.App()"
    return "; do you mean " + " or ".join(f"{module.__name__}:{name}" for name in apps) + "?"
