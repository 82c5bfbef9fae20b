"""What stands under deploy/ fits the programs, the settings and their defaults."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtq_child.settings import SETTINGS, Loaded, Settings, defaults, load
from dtq_supervisor import cli, embedded
from dtq_supervisor.events import EXIT_CONFIG, EXIT_INTERRUPTED
from dtq_supervisor.platform_check import TESTED
from dtq_supervisor.tools import reload

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EACH_UNIT = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXIT_USAGE = 2
END_S = 2.0
"""After the grace everything is gone within this time (R36)."""
SPARE_S = 10.0
OVERHEAD = 128 << 20
"""What supervisor and template take, with room for the import of an application."""
NOBODY = 65534


def accepted(environ: dict[str, str], *arguments: str) -> Loaded:
    """The settings of a supervisor that is started so. Raises what it would end with."""
    flags = vars(cli._parser().parse_args(arguments))
    return load(flags, environ, reader="supervisor", read_text=lambda path: "redis://127.0.0.1/0")


def fits_the_grace(seconds: float) -> bool:
    """Enough for a stop with the default grace, and not much more."""
    least = defaults().shutdown_grace_s + END_S
    return least <= seconds <= least + SPARE_S


def fits_the_memory(settings: Settings, limit: int) -> bool:
    """Every child at its limit, and the two processes above them."""
    assert settings.procs
    assert settings.hard_memory_per_child
    return settings.procs * settings.hard_memory_per_child + OVERHEAD <= limit


# --- names

FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
OUR_COMMAND = re.compile(r"dtq-supervisor(?: [^`\n#|;]*)?")


def names_of_settings() -> set[str]:
    found = {setting.env for setting in SETTINGS if setting.env}
    return found | {f"{setting.env}_FILE" for setting in SETTINGS if setting.secret}


@pytest.mark.parametrize("file", [*FILES, *PAGES], ids=lambda file: file.name)
def test_every_setting_that_is_named_is_there(file: Path) -> None:
    named = set(re.findall(r"\bDTQ_(?!TEST_|DEMO_)[A-Z][A-Z_]*[A-Z]\b", file.read_text()))
    assert named - names_of_settings() == set()


@pytest.mark.parametrize("file", [*FILES, *PAGES], ids=lambda file: file.name)
def test_every_flag_of_a_command_that_is_shown_is_there(file: Path) -> None:
    known = set(FLAG.findall(cli._parser().format_help()))
    shown = {flag for command in OUR_COMMAND.findall(file.read_text()) for flag in FLAG.findall(command)}
    assert shown - known == set()


# --- systemd


def directives(unit: Path) -> dict[str, list[str]]:
    """Directive → its values. The sections do not share names."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found[name].append(value)
    return dict(found)


@EACH_UNIT
def test_a_unit_lets_the_supervisor_speak_start_and_end_as_it_does(unit: Path) -> None:
    said = directives(unit)
    assert said["Type"] == ["notify"]
    assert said["NotifyAccess"] == ["main"]
    assert said["KillMode"] == ["mixed"]
    assert fits_the_grace(float(said["TimeoutStopSec"][0]))
    assert said["SuccessExitStatus"] == [str(EXIT_INTERRUPTED)]
    assert said["Restart"] == ["always"]
    assert said["RestartPreventExitStatus"] == [f"{EXIT_USAGE} {EXIT_CONFIG}"]
    assert Path(said["ExecStart"][0]).name in PROJECT["scripts"]
    assert_reloads(said["ExecReload"][0], said["SuccessExitStatus"])


def assert_reloads(command: str, no_failures: list[str]) -> None:
    """It asks our own verb, and a reload that failed ends with no exit code that systemd takes for good."""
    program, *words = shlex.split(shlex.split(command)[2].partition(" || ")[0])
    assert Path(program).name in PROJECT["scripts"]
    parser = argparse.ArgumentParser()
    reload.add_verb(parser.add_subparsers(dest="verb"))
    options = parser.parse_args([word.replace("$MAINPID", "17") for word in words])
    assert (options.verb, options.pid, options.wait) == ("reload", 17, 300.0)
    assert command.endswith(" || exit 3'")
    assert "3" not in no_failures


@EACH_UNIT
def test_one_child_that_is_killed_for_want_of_memory_does_not_end_the_pool(unit: Path) -> None:
    assert directives(unit)["OOMPolicy"] == ["continue"]


def test_both_units_are_alike() -> None:
    one, template = (directives(unit) for unit in UNITS)
    different = {name for name in one | template if one.get(name) != template.get(name)}
    assert different == {"Description", "EnvironmentFile"}


@EACH_UNIT
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    """As far as it can be told without running it."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze: apt install systemd")
    there = Path(sys.executable).parent
    copy = tmp_path / unit.name.replace("@", "@images")
    copy.write_text(unit.read_text().replace("/opt/shop/.venv/bin", str(there)))
    done = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_settings_of_the_unit_are_accepted() -> None:
    lines = (DEPLOY / "systemd" / "dtq-supervisor.env").read_text().splitlines()
    environ = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert accepted(environ).settings.app == "shop.tasks:app"
    commented = dict(line[1:].split("=", 1) for line in lines if line.startswith("#DTQ_"))
    url = environ.pop("DTQ_REDIS_URL")
    assert accepted({**environ, **commented}).settings.procs
    assert url == defaults().redis_url


# --- containers


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest of its line), lines joined."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_holds_what_is_installed_and_runs_it_as_nobody_without_a_shell() -> None:
    last_stage = instructions()[max(n for n, (word, _) in enumerate(instructions()) if word == "FROM") :]
    said = dict(last_stage)
    assert said["USER"] == f"{NOBODY}:{NOBODY}"
    assert said["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(said["ENTRYPOINT"])[0] in PROJECT["scripts"]
    assert not {word for word, _ in last_stage} & {"RUN", "VOLUME", "EXPOSE"}


def test_the_image_asks_where_the_supervisor_answers() -> None:
    (check,) = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    host, _, port = defaults().metrics_bind.rpartition(":")
    assert f"'{host}', {port}" in check
    assert "'/healthz'" in check
    assert json.loads(check.partition("CMD ")[2])[0] == "python"


def test_the_image_is_built_from_what_is_here_with_a_python_that_is_tested() -> None:
    for word, rest in instructions():
        if word == "FROM":
            version = re.match(r"python:(\d+)\.(\d+)-slim", rest)
            assert version is not None
            assert (int(version[1]), int(version[2])) in TESTED
        if word == "RUN":
            assert json.loads(rest)


def test_the_build_sees_all_that_an_installation_needs() -> None:
    copied = {
        name
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for name in rest.split()[:-1]
    }
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "dtq_child", "dtq_supervisor"}
    assert copied == needed
    assert all((ROOT / name).exists() for name in copied)
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == needed


def seconds(text: str) -> float:
    assert re.fullmatch(r"\d+s", text)
    return float(text[:-1])


def test_the_services_of_compose_are_accepted() -> None:
    said = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    supervisor, redis = said["services"]["supervisor"], said["services"]["redis"]
    environ = {
        name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in supervisor["environment"].items()
    }
    assert environ.pop("DTQ_APP").startswith("${DTQ_APP:?")
    settings = accepted(environ, "shop.tasks:app").settings
    assert settings.redis_url == "redis://redis:6379/0"
    assert supervisor["mem_limit"] == "1g"
    assert fits_the_memory(settings, 1 << 30)
    assert fits_the_grace(seconds(supervisor["stop_grace_period"]))
    assert supervisor["user"] == f"{NOBODY}:{NOBODY}"
    assert supervisor["read_only"]
    assert supervisor["cap_drop"] == ["ALL"]
    build = supervisor["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "docker" / "Dockerfile"
    mounted = [volume.partition(":")[0] for volume in redis["volumes"]]
    assert all(
        (DEPLOY / name).is_file() if name.startswith("./") else name in said["volumes"] for name in mounted
    )


# --- Kubernetes


@pytest.fixture
def pod() -> Any:
    said = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
    assert (said["apiVersion"], said["kind"]) == ("apps/v1", "Deployment")
    template = said["spec"]["template"]
    assert said["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    return template["spec"]


def test_the_pod_starts_a_supervisor_that_accepts_its_settings(pod: Any) -> None:
    (container,) = pod["containers"]
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    settings = accepted(environ, *container["args"]).settings
    limits = container["resources"]["limits"]
    assert settings.procs == int(limits["cpu"])
    assert limits["memory"] == "1Gi"
    assert fits_the_memory(settings, 1 << 30)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert Path(environ["DTQ_REDIS_URL_FILE"]).parent == Path(mounts["redis-url"])


def test_the_pod_has_the_time_of_a_stop_and_no_rights(pod: Any) -> None:
    assert fits_the_grace(pod["terminationGracePeriodSeconds"])
    assert pod["securityContext"]["runAsUser"] == NOBODY
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_pod_is_asked_where_its_supervisor_answers(pod: Any) -> None:
    (container,) = pod["containers"]
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    (port,) = container["ports"]
    assert environ["DTQ_METRICS_BIND"] == f"0.0.0.0:{port['containerPort']}"
    probes = {name: container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert probes["livenessProbe"]["path"] == "/healthz"
    assert probes["readinessProbe"]["path"] == "/readyz"


# --- Redis


def test_the_redis_of_deploy_is_told_what_the_private_one_is_told() -> None:
    lines = (DEPLOY / "redis.conf").read_text().splitlines()
    said = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    renamed = {name.replace("ziplist", "listpack"): value for name, value in embedded.TUNING.items()}
    assert renamed.items() <= said.items()
