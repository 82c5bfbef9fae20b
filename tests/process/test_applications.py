"""An application may do anything at its import, and lie in a folder of any content: either its tasks run, or
its operator is told in one line what stands in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dtq_child import App
from dtq_supervisor.descriptors import MARGIN
from tests.conftest import SupervisorStarter
from tests.support.processes import look
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

SUPERVISOR = (sys.executable, "-m", "dtq_supervisor")


def written(folder: Path, **modules: str) -> Path:
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return folder


def run(
    folder: Path, *arguments: str, program: tuple[str, ...] = SUPERVISOR
) -> subprocess.CompletedProcess[str]:
    """A supervisor that is to end by itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
    return subprocess.run(
        [*program, *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), "DTQ_METRICS_BIND": "off"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


SHOP = """
    import os
    from dtq_child import App
    app = App()
    @app.task(name="where")
    def where():
        return [os.getpid(), __file__]
"""


# --- the folder


@pytest.mark.parametrize("flags", [[], ["--no-preload"]])
def test_modules_called_like_those_that_dtq_needs_are_in_nobodys_way(
    tmp_path: Path, redis_server: RedisServer, flags: list[str]
) -> None:
    """They are not what dtq imports; what the application imports by other names comes from its folder."""
    names = ("redis", "queue", "orjson", "logging", "select", "subprocess", "psutil", "dtq_child")
    ours = dict.fromkeys(names, "raise ImportError('not what you look for')")
    folder = written(tmp_path, shop=f"import mailing\n{textwrap.dedent(SHOP)}", mailing="", **ours)
    url = redis_server.url
    task = App(redis_url=url).enqueue("where")
    done = run(folder, "shop:app", "--procs", "1", "--redis-url", url, "--burst", *flags)
    assert done.returncode == 0, done.stderr
    assert task.result(timeout=0)[1] == str(folder / "shop.py")


def test_an_application_called_like_a_module_in_use_is_told_which_one_was_found(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    done = run(written(tmp_path, queue=SHOP), "queue:app", "--redis-url", redis_server.url)
    assert done.returncode == 78, done.stderr
    assert "queue.py has no 'app'" in done.stderr


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    program = (
        "import os, sys; os.rmdir(os.getcwd()); "
        "os.execv(sys.executable, [sys.executable, '-m', 'dtq_supervisor', 'shop:app'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DTQ_METRICS_BIND": "off"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 78, done.stderr
    assert "the working directory is gone" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- the import


def test_a_crash_at_the_import_shows_where(tmp_path: Path, redis_server: RedisServer) -> None:
    folder = written(tmp_path, shop="def deep():\n    import ctypes; ctypes.string_at(0)\ndeep()")
    done = run(folder, "shop:app", "--procs", "1", "--redis-url", redis_server.url)
    assert done.returncode == 4, done.stderr
    assert "SIGSEGV" in done.stderr
    assert f'File "{folder}/shop.py", line 2 in deep' in done.stderr


def test_a_crash_at_the_import_of_a_child_shows_where(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    """It is tried again and again, so that is all that there is to be seen."""
    code = "def deep():\n    import ctypes; ctypes.string_at(0)\ndeep()"
    env = {"PYTHONPATH": f"{written(tmp_path, shop=code)}:{ROOT}"}
    flags = ["--no-preload"]
    pool = start_supervisor("shop:app", server=redis_server, procs=1, flags=flags, env=env)
    until(lambda: f'File "{tmp_path}/shop.py", line 2 in deep' in pool.log(), 10, pool.describe)
    assert "Fatal Python error: Segmentation fault" in pool.log()
    assert pool.stop() == 0


def test_a_syntax_error_shows_its_file_and_line(tmp_path: Path, redis_server: RedisServer) -> None:
    done = run(written(tmp_path, shop="x = 1\ndef x(:\n"), "shop:app", "--redis-url", redis_server.url)
    assert done.returncode == 4, done.stderr
    assert f"{tmp_path}/shop.py" in done.stderr
    assert "def x(:" in done.stderr


IN_THE_COPY = {
    "comes back": "pass",
    "comes back late": "import time; time.sleep(0.5)",
    "raises": "raise ValueError",
    "ends": "raise SystemExit(3)",
}


@pytest.mark.parametrize("flags", [[], ["--no-preload"]])
@pytest.mark.parametrize("how", IN_THE_COPY)
def test_a_process_that_the_import_forks_is_no_second_template_and_no_second_child(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer, flags: list[str], how: str
) -> None:
    """It has our socket, or our place on the scoreboard."""
    fork = "with open('forked', 'a') as file: file.write(f'{forked} ')"
    code = f"{textwrap.dedent(SHOP)}\nforked = os.fork()\nif not forked: {IN_THE_COPY[how]}\n{fork}\n"
    env = {"PYTHONPATH": f"{written(tmp_path, shop=code)}:{ROOT}"}
    pool = start_supervisor("shop:app", server=redis_server, procs=1, flags=flags, env=env)
    app = App(redis_url=redis_server.url)

    first = app.enqueue("where").result(timeout=10)
    assert app.enqueue("where").result(timeout=10) == first
    until(lambda: copies_are_gone(pool), 5, pool.describe)
    assert pool.log().count("came back from it, and is ended") == (0 if how == "ends" else 1)
    assert pool.stop() == 0


# --- its tasks


def test_what_a_task_prints_never_goes_to_redis(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    """Another one has closed the standard streams, and the connection is then made anew."""
    code = """
        import os
        from dtq_child import App
        app = App()
        @app.task(name="close")
        def close():
            os.closerange(0, 3)
        @app.task(name="say")
        def say():
            for fd in (1, 2):
                os.write(fd, b"SET said 1\\r\\n")
            return [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
    """
    env = {"PYTHONPATH": f"{written(tmp_path, shop=code)}:{ROOT}"}
    start_supervisor("shop:app", server=redis_server, procs=1, env=env)
    app = App(redis_url=redis_server.url)
    redis: Any = redis_server.client()
    assert app.enqueue("close").result(timeout=10) is None
    redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    say = App(redis_url=redis_server.url).enqueue("say")
    assert say.result(timeout=10) == ["/dev/null"] * 3
    assert redis.get("said") is None
    assert [execution.get("outcome") for execution in say.record().executions()] == ["succeeded"]


# --- descriptors


def test_more_children_than_descriptors_raise_the_limit_for_all_but_the_tasks(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    """As many as the kernel lets us; the tasks find the limit that the service was given."""
    code = """
        import resource
        from dtq_child import App
        app = App()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        @app.task(name="limits")
        def limits():
            return [limit, resource.getrlimit(resource.RLIMIT_NOFILE)]
    """
    pool = start_supervisor(
        "shop:app",
        server=redis_server,
        procs=12,
        env={"PYTHONPATH": f"{written(tmp_path, shop=code)}:{ROOT}"},
        program=limited_to(soft=80, hard=4096),
    )
    app = App(redis_url=redis_server.url)
    needed = 24 + 30 + MARGIN  # with room for as many again
    assert app.enqueue("limits").result(timeout=10) == [[needed + 80, 4096], [80, 4096]]
    assert pool.stop() == 0


def test_a_limit_that_cannot_be_raised_is_one_line_with_the_need(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    for most, procs, needed in ((1024, 900, 900 + 1125 + MARGIN), (24, 1, 1 + 2 + MARGIN)):
        told = ("shop:app", "--procs", str(procs), "--redis-url", redis_server.url)
        done = run(written(tmp_path, shop=SHOP), *told, program=limited_to(soft=most, hard=most))
        assert done.returncode == 78, done.stderr
        refusal = f"{procs} children need {needed} descriptors, and at most {most} are allowed"
        assert refusal in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def limited_to(*, soft: int, hard: int) -> tuple[str, ...]:
    code = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        "os.execv(sys.executable, [sys.executable, '-m', 'dtq_supervisor', *sys.argv[1:]])"
    )
    return (sys.executable, "-c", code)


def test_a_process_that_a_hook_forks_is_no_second_child(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    code = f"""{SHOP}
    @app.on_child_start
    def fork():
        forked = os.fork()
        with open("forked", "a") as file: file.write(f"{{forked}} ")
    """
    env = {"PYTHONPATH": f"{written(tmp_path, shop=code)}:{ROOT}"}
    pool = start_supervisor("shop:app", server=redis_server, procs=1, env=env)
    app = App(redis_url=redis_server.url)

    pids = {app.enqueue("where").result(timeout=10)[0] for _ in range(3)}
    assert pids == set(pool.child_pids())
    until(lambda: copies_are_gone(pool), 5, pool.describe)
    assert pool.log().count("a hook at the start of a child forked a process") == 1
    assert pool.stop() == 0


def copies_are_gone(pool: SupervisorProcess) -> bool:
    forked = {int(pid) for pid in (pool.folder / "forked").read_text().split()} - {0}
    return all((found := look(pid)) is None or found.status == "zombie" for pid in forked)
