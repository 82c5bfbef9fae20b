"""Who may import whom, and who alone may do what; told from the source, so also where no test comes by."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dtq_child", "dtq_supervisor")
TALKS_TO_REDIS = {"dtq_child.connection", "dtq_child.wire", "dtq_child.scripts"}
FORKS = {"dtq_child.template"}
SPELLS_KEYS = {"dtq_child.keys"}
# From low to high: a module imports none of a higher layer.
LAYERS = {
    "dtq_child": [
        {"errors", "settings", "keys"},
        {"task", "outcome", "payload", "scoreboard"},
        {"connection", "scripts"},
        {"broker", "turns"},
        {"app", "handle", "context", "runner"},
        {"child", "testing"},
        {"template"},
    ],
    "dtq_supervisor": [
        {"events"},
        {"slot", "deadlines"},
        {"pool"},
        {"signals", "process", "death", "heartbeat", "leader", "scheduler", "reaper", "reconcile", "settler"},
        {"duties"},
        {"supervisor"},
        {"cli"},
    ],
}
PURE = {
    *(
        "dtq_child.task",
        "dtq_child.outcome",
        "dtq_child.payload",
        "dtq_child.retry",
        "dtq_child.sentinel_url",
    ),
    *("dtq_supervisor.events", "dtq_supervisor.slot", "dtq_supervisor.pool", "dtq_supervisor.deadlines"),
    *("dtq_supervisor.recycling", "dtq_supervisor.retirement"),
    *("dtq_supervisor.snapshot", "dtq_supervisor.idleness", "dtq_supervisor.health", "dtq_supervisor.status"),
    "dtq_supervisor.visitor",
}
IMPURE = {"os", "time", "signal", "socket", "redis", "logging", "subprocess", "threading", "random"}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
EACH_MODULE = pytest.mark.parametrize("module", MODULES)


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs: not what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield child
            yield from walk(child)


def named_by(node: ast.AST) -> set[str]:
    """The modules that an import statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        base = node.module or ""
        return {full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return set()


def imports(module: str) -> set[str]:
    return {name for node in walk(TREES[module]) for name in named_by(node)}


def root(name: str) -> str:
    return name.partition(".")[0]


# -- directions


def test_the_child_does_not_know_the_supervisor() -> None:
    for module in MODULES:
        if root(module) == "dtq_child":
            assert not [name for name in imports(module) if root(name) == "dtq_supervisor"], module


def test_no_two_modules_need_each_other() -> None:
    graph = {module: imports(module) & set(MODULES) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", PACKAGES)
def test_lower_layers_do_not_import_higher_ones(package: str) -> None:
    height = {f"{package}.{name}": at for at, layer in enumerate(LAYERS[package]) for name in layer}
    assert set(height) <= set(MODULES), "a layer names a module that is gone"
    for module, own in height.items():
        above = [name for name in imports(module) if height.get(name, -1) > own]
        assert not above, f"{module} imports {above}"


@EACH_MODULE
def test_nothing_of_ours_is_imported_within_a_function(module: str) -> None:
    """It would only hide a circle."""
    for outer in walk(TREES[module]):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(outer):
                inside = {name for name in named_by(node) if root(name) in PACKAGES}
                assert not inside, f"{module}.{outer.name} imports {inside}"


# -- who alone may do what


def test_only_the_connection_talks_to_redis() -> None:
    assert {module for module in MODULES if any(root(name) == "redis" for name in imports(module))} <= (
        TALKS_TO_REDIS
    )


def test_only_the_template_forks() -> None:
    forking = re.compile(r"\bos\.(fork|forkpty)\b|\bmultiprocessing\b|\bfrom os import .*\bfork")
    assert {module for module, tree in TREES.items() if forking.search(ast.unparse(tree))} == FORKS


@pytest.mark.parametrize("module", sorted(PURE))
def test_the_core_is_pure(module: str) -> None:
    assert not {root(name) for name in imports(module)} & IMPURE
    assert "open(" not in ast.unparse(TREES[module])


# -- key names

KEY_TEXT = re.compile(
    r"\b(stream|retry|task|result|idempotency|worker|queue|lock|bell):(?!\s)"
    r"|\btasks:recent\b|:paused\b|^dtq:(?! )"
)
NOT_KEYS = {("dtq_child.settings_table", "dtq:")}  # the default of a setting


def spelled_in(module: str) -> set[str]:
    """The texts of a module, docstrings left out."""
    tree = TREES[module]
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    after_fields = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docs | after_fields
    }


@pytest.mark.parametrize("module", [module for module in MODULES if module not in SPELLS_KEYS])
def test_key_names_are_spelled_in_one_place(module: str) -> None:
    spelled = {text for text in spelled_in(module) if KEY_TEXT.search(text)}
    assert not {text for text in spelled if (module, text) not in NOT_KEYS}


def test_the_look_for_key_names_would_see_one() -> None:
    for text in ("dtq:stream:", "bell:q:", "retry:schedule", "task:", "queue:x:paused", "tasks:recent"):
        assert KEY_TEXT.search(text), text


# -- weight


def test_a_web_application_that_only_enqueues_imports_little() -> None:
    heavy = ("psutil", "setproctitle", "prometheus_client", "dtq_child.child", "dtq_child.template")
    code = f"import sys, dtq_child; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
