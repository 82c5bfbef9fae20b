"""Settings: where values come from, what is refused, and that no secret is shown."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import typing
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtq_child
from dtq_child import task
from dtq_child.errors import BadConfiguration
from dtq_child.setting import READERS, Kind, Setting, has_password, mask_url
from dtq_child.settings import ACTIONS, SETTINGS, Loaded, Settings, defaults, describe, load
from dtq_supervisor.flags import add_arguments

BY_NAME = {setting.name: setting for setting in SETTINGS}
SECRET = "hunter2"


def loaded(
    flags: Mapping[str, str | bool | None] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    reader: str = "supervisor",
) -> Loaded:
    """What a reader sees; a supervisor is given an application unless the test names one."""
    held = files or {}

    def read_text(path: str) -> str:
        if path not in held:
            raise FileNotFoundError(2, "No such file or directory", path)
        return held[path]

    chosen = dict(flags or {})
    if reader == "supervisor" and "DTQ_APP" not in (environ or {}):
        chosen.setdefault("app", "shop:app")
    return load(chosen, environ or {}, reader=reader, read_text=read_text)


def problems(
    flags: Mapping[str, str | bool | None] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    reader: str = "supervisor",
) -> list[str]:
    with pytest.raises(BadConfiguration) as raised:
        loaded(flags, environ, files, reader)
    assert all("\n" not in problem for problem in raised.value.problems)
    return raised.value.problems


def only_problem(
    flags: Mapping[str, str | bool | None] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> str:
    (problem,) = problems(flags, environ, files)
    return problem


# -- where a value comes from


def test_a_flag_wins_over_the_environment_that_over_toml_that_over_the_default() -> None:
    files = {"/c.toml": "[dtq]\ntimeout_s = 10\nprefetch = 2\nblock_ms = 100\n"}
    environ = {"DTQ_CONFIG": "/c.toml", "DTQ_TIMEOUT_S": "20", "DTQ_PREFETCH": "3"}
    seen = loaded({"timeout_s": "30.5"}, environ, files)
    got = seen.settings
    assert (got.timeout_s, got.prefetch, got.block_ms, got.max_attempts) == (30.5, 3, 100, 3)
    assert seen.origins["timeout_s"] == "flag --timeout"
    assert seen.origins["prefetch"] == "environment DTQ_PREFETCH"
    assert seen.origins["block_ms"] == "/c.toml [dtq] block_ms"
    assert seen.origins["max_attempts"] == "default"


def test_a_value_that_a_stronger_source_overrides_is_not_judged() -> None:
    assert loaded({"prefetch": "4"}, {"DTQ_PREFETCH": "many"}).settings.prefetch == 4


def test_a_reader_is_not_disturbed_by_what_it_does_not_read() -> None:
    environ = {"DTQ_PROCS": "many", "DTQ_PAYLOAD_MAX_BYTES": "2M"}
    got = loaded(environ=environ, reader="producer").settings
    assert (got.procs, got.payload_max_bytes) == (None, 2 * 1024 * 1024)


def test_names_of_tests_and_demo_are_not_settings() -> None:
    assert loaded(environ={"DTQ_TEST_REQUIRE": "1", "DTQ_DEMO_FILES": "9", "PATH": "/bin"}).warnings == ()


def test_toml_has_numbers_and_lists_of_its_own() -> None:
    files = {"c": '[dtq]\nqueues = ["a", "b.c"]\ntimeout_s = 0.5\nresult_max_bytes = "8K"\n[shop]\nx = 1\n'}
    got = loaded({"config": "c"}, files=files).settings
    assert (got.queues, got.timeout_s, got.result_max_bytes, got.config) == (("a", "b.c"), 0.5, 8192, "c")


def test_none_takes_an_optional_value_back() -> None:
    files = {"c": "[dtq]\nsoft_timeout_s = 5\n"}
    assert loaded({"config": "c"}, files=files).settings.soft_timeout_s == 5
    assert loaded({"config": "c", "soft_timeout_s": "none"}, files=files).settings.soft_timeout_s is None


def test_queues_are_named_once_and_keep_their_order() -> None:
    assert loaded({"queues": " b, a ,b"}).settings.queues == ("b", "a")


# -- secrets


def test_a_secret_may_be_in_a_file_without_its_newline() -> None:
    url = f"redis://u:{SECRET}@h:1/2"
    seen = loaded(environ={"DTQ_REDIS_URL_FILE": "/run/url"}, files={"/run/url": url + "\n"})
    assert seen.settings.redis_url == url
    assert seen.origins["redis_url"] == "environment DTQ_REDIS_URL_FILE (/run/url)"


def test_toml_may_name_the_secret_file_too() -> None:
    files = {"c": '[dtq]\nredis_url_file = "url"\n', "url": "redis://h"}
    assert loaded({"config": "c"}, files=files).settings.redis_url == "redis://h"


def test_a_secret_and_its_file_at_once_are_refused() -> None:
    environ = {"DTQ_REDIS_URL_FILE": "/run/url", "DTQ_REDIS_URL": "redis://h"}
    assert "DTQ_REDIS_URL is given too" in only_problem(environ=environ, files={"/run/url": "redis://h"})


def test_a_secret_file_that_is_not_there_is_told_by_name() -> None:
    problem = only_problem(environ={"DTQ_REDIS_URL_FILE": "/run/url"})
    assert problem == (
        "environment DTQ_REDIS_URL_FILE is '/run/url': it cannot be read: No such file or directory"
    )


def test_only_secrets_have_a_file_variant() -> None:
    assert "no such setting" in only_problem(environ={"DTQ_TIMEOUT_S_FILE": "/x"})


def test_a_password_in_a_flag_is_warned_about_and_only_there() -> None:
    url = f"redis://:{SECRET}@h/0"
    (warning,) = loaded({"redis_url": url}).warnings
    assert "--redis-url" in warning
    assert "DTQ_REDIS_URL_FILE" in warning
    assert SECRET not in warning
    assert loaded({"redis_url": "redis://h/0"}).warnings == ()
    assert loaded(environ={"DTQ_REDIS_URL": url}).warnings == ()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h/0",
        f"rediss://u:{SECRET}@h:6380/0?ssl_cert_reqs=none",
        f"redis+sentinel://u:{SECRET}@a:1,b:2/main/0",
        f"unix:///run/redis.sock?password={SECRET}",
        f"redis://h/0?db=1&sentinel_password={SECRET}",
    ],
)
def test_no_password_is_shown_anywhere(url: str) -> None:
    seen = loaded(environ={"DTQ_REDIS_URL": url})
    assert seen.settings.redis_url == url
    assert has_password(url)
    assert SECRET not in describe(seen) + repr(seen.settings) + str(seen.origins)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:pa/{SECRET}@h/0",
        f"redis://:pa#{SECRET}@h/0",
        f"redis://:pa?{SECRET}@h/0",
        f"redis://:pa {SECRET}@h/0",
        f"redis://u:{SECRET}",
        f"http://u:{SECRET}@h",
        SECRET,
        f"redis://u:{SECRET}@h:99999/0",
    ],
)
def test_a_broken_url_is_refused_without_telling_the_password(url: str) -> None:
    problem = only_problem(environ={"DTQ_REDIS_URL": url})
    assert problem.startswith("environment DTQ_REDIS_URL is ")
    assert SECRET not in problem


@given(
    st.text(alphabet="abc:/@?#[]% ,.&=", max_size=30), st.sampled_from(["redis://", "redis+sentinel://", ""])
)
def test_masking_hides_what_stands_before_the_last_at_sign(rest: str, scheme: str) -> None:
    shown = mask_url(f"{scheme}u:{SECRET}{rest}@h/0")
    assert SECRET not in shown
    assert not scheme or shown.startswith(scheme)


# -- what is refused


def test_all_problems_are_told_at_once() -> None:
    told = problems(
        {"prefetch": "17", "config": "c"},
        {"DTQ_REDIS_ULR": "x", "DTQ_TIMEOUT_S": "soon"},
        {"c": "[dtq]\nprocz = 3\npreload = false\n"},
    )
    assert told == [
        "environment DTQ_REDIS_ULR: no such setting; did you mean DTQ_REDIS_URL?",
        "c [dtq] procz: no such setting; did you mean procs?",
        "c [dtq] preload: no such setting here; it is only a flag, --no-preload",
        "flag --prefetch is '17': give a whole number, from 1 to 16",
        "environment DTQ_TIMEOUT_S is 'soon': give seconds, from 0.05 to 604800",
    ]


def test_an_environment_name_in_small_letters_is_not_taken_for_the_setting() -> None:
    assert only_problem(environ={"DTQ_timeout_s": "3"}).endswith("did you mean DTQ_TIMEOUT_S?")


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.env], ids=lambda setting: setting.env)
def test_an_empty_value_is_refused_not_ignored(setting: Setting) -> None:
    problem = only_problem(environ={setting.env: " "})
    assert problem.startswith(f"environment {setting.env} is ")
    assert "it is empty" in problem


NUMBERS = [s for s in SETTINGS if s.kind in (Kind.INT, Kind.SECONDS, Kind.SIZE)]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_numbers_stay_within_their_bounds(setting: Setting) -> None:
    assert setting.read(str(setting.low)) == setting.low
    assert setting.read(setting.high) == setting.high
    beyond = [setting.low - 0.01, setting.high + 1, "nan", math.inf, "-inf", "1e400", "9" * 500, 10**500]
    for wrong in [*beyond, True, [1], "1s", "0x10", {}]:
        with pytest.raises(ValueError, match=r"give .* from .* to "):
            setting.read(wrong)


def test_a_whole_number_has_no_fraction() -> None:
    assert "whole number" in only_problem({"procs": "1.5"})
    assert loaded({"procs": "2.0"}).settings.procs == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512K", 512 * 1024),
        ("8m", 8 * 1024**2),
        ("1 MiB", 1024**2),
        ("4096", 4096),
        ("64kb", 65536),
        (100, 100),
    ],
)
def test_sizes_take_units(text: object, size: int) -> None:
    assert BY_NAME["payload_max_bytes"].read(text) == size


@pytest.mark.parametrize("text", ["1T", "K", "-1K", "1.5M", "1G"])
def test_sizes_beyond_bounds_or_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bytes, or like 512K"):
        BY_NAME["payload_max_bytes"].read(text)


@pytest.mark.parametrize("queues", ["a b", "a,,b", "x" * 65, "dtq:a", "é", "a\nb"])
def test_queue_names_have_one_alphabet(queues: str) -> None:
    assert "names of 1 to 64" in only_problem({"queues": queues})


@pytest.mark.parametrize("queues", ["a,", ",a", "a,,b", "a, ,b", ","])
def test_an_empty_name_in_a_list_is_called_empty(queues: str) -> None:
    assert "is empty" in only_problem({"queues": queues})


def test_space_around_a_value_is_no_part_of_it() -> None:
    got = loaded(
        {"queues": "a\n", "procs": " 2 ", "key_prefix": " x: ", "redis_url": " redis://h\n"}
    ).settings
    assert (got.queues, got.procs, got.key_prefix, got.redis_url) == (("a",), 2, "x:", "redis://h")


def test_the_alphabet_of_queues_is_the_one_of_tasks() -> None:
    assert BY_NAME["queues"].pattern == task.QUEUE_ALPHABET.pattern


@pytest.mark.parametrize(
    "app", ["shop", "shop:", ":app", "shop/tasks.py:app", "shop:app()", "a b:app", "../x:app"]
)
def test_the_application_is_a_module_and_an_attribute(app: str) -> None:
    assert "module:attribute" in only_problem({"app": app})


@pytest.mark.parametrize("prefix", ["", "a b", "p" * 25, "dtq*", "dtq\x00"])
def test_a_prefix_that_would_break_keys_or_scans_is_refused(prefix: str) -> None:
    assert "1 to 24 of" in only_problem({"key_prefix": prefix})


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://[::1]:6379/0",
        "rediss://u:p%40@h.example:6380/15?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=2",
        "unix://u:p@/run/redis.sock",
        "redis+sentinel://a,b:26380,[::1]:26379/main",
        "redis+sentinel://u:p@a/main/3",
    ],
)
def test_urls_that_are_right(url: str) -> None:
    assert loaded({"redis_url": url}).settings.redis_url == url


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("localhost:6379", "redis://"),
        ("http://h", "redis+sentinel://"),
        ("redis://", "needs a host"),
        ("redis:///0", "needs a host"),
        ("redis://h:port/0", "needs a host"),
        ("redis://h:0/0", "1 to 65535"),
        ("redis://h/zero", "/DB, a number"),
        ("redis://h/0/1", "/DB, a number"),
        ("unix://run", "unix:///the/path"),
        ("redis+sentinel://h", "SERVICE"),
        ("redis+sentinel://h/main/x", "SERVICE"),
        ("redis+sentinel://,h/main", "needs a host"),
    ],
)
def test_urls_that_cannot_work_are_told_why(url: str, hint: str) -> None:
    assert hint in only_problem({"redis_url": url})


def test_choices_are_listed() -> None:
    assert only_problem({"log_level": "loud"}).endswith("give one of debug, info, warning, error")
    assert loaded({"log_level": "WARNING"}).settings.log_level == "warning"


# -- pairs


@pytest.mark.parametrize(("heartbeat", "fine"), [("10", True), ("10.1", False)])
def test_two_heartbeats_fit_in_a_lease(heartbeat: str, fine: bool) -> None:
    flags = {"visibility_timeout_s": "20", "heartbeat_interval_s": heartbeat}
    if fine:
        assert loaded(flags).settings.visibility_timeout_s == 20
    else:
        assert only_problem(flags).startswith(
            "heartbeat_interval_s 10.1 (flag --heartbeat-interval) with "
            "visibility_timeout_s 20 (flag --visibility-timeout): "
        )


def test_a_pair_may_be_impossible_because_of_a_default() -> None:
    assert "heartbeat_interval_s 10 (default)" in only_problem({"visibility_timeout_s": "15"})


@pytest.mark.parametrize(("soft", "fine"), [("29.9", True), ("30", False), ("31", False)])
def test_the_soft_timeout_comes_before_the_hard_one(soft: str, fine: bool) -> None:
    flags = {"soft_timeout_s": soft, "timeout_s": "30"}
    if fine:
        assert loaded(flags).settings.soft_timeout_s == 29.9
    else:
        assert "set it below the timeout" in only_problem(flags)


def test_a_bad_value_is_not_blamed_a_second_time_through_its_pair() -> None:
    assert only_problem({"visibility_timeout_s": "-1", "heartbeat_interval_s": "100"}).startswith(
        "flag --visibility-timeout"
    )


def test_an_embedded_redis_and_one_given_by_a_flag_exclude_each_other() -> None:
    assert "leave one out" in only_problem({"embedded": True, "redis_url": "redis://h"})
    (warning,) = loaded({"embedded": True}, {"DTQ_REDIS_URL": "redis://h"}).warnings
    assert "not used" in warning


def test_a_supervisor_needs_an_application_a_producer_does_not() -> None:
    assert "DTQ_APP" in problems({"app": None})[0]
    assert loaded(reader="producer").settings.app is None


# -- the TOML file


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, "it cannot be read: No such file"),
        ("[dtq\n", "it cannot be understood"),
        ("[dtq]\nx = " + 5000 * "[", "it cannot be understood"),
        ("timeout_s = 3\n", "has no table [dtq]"),
        ("dtq = 3\n", "has no table [dtq]"),
        ('[dtq]\nconfig = "d"\n', "cannot name another"),
        ("[dtq]\nDTQ_TIMEOUT_S = 3\n", "did you mean timeout_s?"),
        ("[dtq.api]\nbind = 1\n", "no such setting"),
        ("[dtq]\ntimeout_s = true\n", "give seconds"),
        ("[dtq]\nqueues = [1]\n", "names of 1 to 64"),
        ("[dtq]\nqueues = []\n", "names of 1 to 64"),
        ("[dtq]\napp = 3\n", "module:attribute"),
    ],
)
def test_a_toml_file_that_does_not_fit_is_told_why(text: str | None, hint: str) -> None:
    files = {} if text is None else {"c": text}
    assert hint in problems({"config": "c", "app": None}, files=files)[0]


# -- carrying settings about


def test_settings_survive_the_way_to_another_process() -> None:
    settings = loaded({"queues": "a,b", "soft_timeout_s": "2.5", "preload": False}).settings
    assert Settings.from_json(settings.to_json()) == settings
    assert Settings.from_json(json.loads(settings.to_json())) == settings
    assert hash(Settings.from_json(settings.to_json())) == hash(settings)


@pytest.mark.parametrize("change", [{"add": 1}, {"drop": "procs"}])
def test_settings_of_another_version_are_refused(change: dict[str, object]) -> None:
    held = json.loads(Settings().to_json())
    held.pop(change.get("drop"), None)
    held.update({"newer": 1} if "add" in change else {})
    with pytest.raises(BadConfiguration, match="restart the service"):
        Settings.from_json(json.dumps(held))


def test_defaults_checks_what_python_code_gives() -> None:
    got = defaults(queues=["a"], timeout_s=3, redis_url="redis://h")
    assert (got.queues, got.timeout_s, got.redis_url, got.procs) == (("a",), 3.0, "redis://h", None)
    assert type(got.timeout_s) is float
    with pytest.raises(BadConfiguration) as raised:
        defaults(timeout_s=-1, quues=["a"], preload="yes")
    assert raised.value.problems == [
        "argument quues: no such setting; did you mean queues?",
        "argument preload is 'yes': give true or false",
        "argument timeout_s is -1: give seconds, from 0.05 to 604800",
    ]


@pytest.mark.parametrize(
    "bind", ["off", "127.0.0.1:0", "0.0.0.0:9646", "[::1]:65535", "pods.example:80", "unix:/run/dtq/endpoint"]
)
def test_the_endpoint_has_an_address_a_path_or_is_off(bind: str) -> None:
    assert loaded({"metrics_bind": bind}).settings.metrics_bind == bind


@pytest.mark.parametrize(
    "bind", [":9646", "127.0.0.1", "::1:9646", "127.0.0.1:65536", "unix:", "http://a:1", "on"]
)
def test_another_word_for_the_endpoint_is_refused(bind: str) -> None:
    assert "host:port, [v6 address]:port, unix:/path or off" in only_problem({"metrics_bind": bind})


def test_the_endpoints_token_is_never_shown() -> None:
    environ = {"DTQ_APP": "shop:app", "DTQ_METRICS_TOKEN": "s3cret-s3cret"}
    seen = load({}, environ, reader="supervisor", read_text=str)
    assert seen.settings.metrics_token == "s3cret-s3cret"
    assert "s3cret" not in describe(seen) + repr(seen.settings)
    assert "s3cret" not in only_problem(environ={"DTQ_METRICS_TOKEN": "s3cret with blanks"})


def test_arguments_win_over_everything() -> None:
    seen = load(
        {"timeout_s": "9"},
        {"DTQ_TIMEOUT_S": "8"},
        reader="child",
        read_text=str,
        arguments={"timeout_s": 7},
    )
    assert (seen.settings.timeout_s, seen.origins["timeout_s"]) == (7.0, "argument timeout_s")


def test_describe_tells_every_value_and_its_origin() -> None:
    lines = describe(loaded({"timeout_s": "30"})).splitlines()
    assert [line.split()[0] for line in lines] == [setting.name for setting in SETTINGS]
    by_name = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert by_name["timeout_s"].split(maxsplit=1) == ["30", "flag --timeout"]
    assert by_name["procs"].endswith("default")


# -- the table


def test_each_row_has_the_type_that_its_kind_promises() -> None:
    types = {
        Kind.TEXT: str,
        Kind.INT: int,
        Kind.SECONDS: float,
        Kind.SIZE: int,
        Kind.BOOL: bool,
        Kind.LIST: tuple[str, ...],
        Kind.CHOICE: str,
        Kind.URL: str,
        Kind.PATH: str,
    }
    hints = typing.get_type_hints(Settings)
    for setting in SETTINGS:
        promised = types[setting.kind]
        assert hints[setting.name] == (promised | None if setting.default is None else promised), setting.name


def test_each_default_is_a_value_that_its_own_check_accepts_unchanged() -> None:
    for setting in SETTINGS:
        value = setting.read(setting.default)
        assert value == setting.default, setting.name
        assert type(value) is type(setting.default), setting.name
    assert defaults() == Settings()


def test_each_row_is_complete() -> None:
    flags = [flag for setting in (*SETTINGS, *ACTIONS) for flag in setting.flags]
    assert len(flags) == len(set(flags))
    for setting in (*SETTINGS, *ACTIONS):
        assert setting.read_by, setting.name
        assert set(setting.read_by) <= set(READERS), setting.name
        assert setting.help.endswith("."), setting.name
        assert setting.group, setting.name
        assert setting.flags or setting.env, setting.name
        assert math.isfinite(setting.low + setting.high) == (setting in NUMBERS), setting.name
        assert bool(setting.choices) == (setting.kind in (Kind.CHOICE, Kind.URL)), setting.name


def test_seconds_and_milliseconds_are_told_by_the_name() -> None:
    for setting in SETTINGS:
        assert setting.name.endswith("_s") == (setting.kind is Kind.SECONDS), setting.name


def test_every_setting_of_a_reader_with_a_flag_can_be_given_on_its_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "supervisor")
    words = ["shop:app", "-Q", "a", "--queues", "b", "-c", "2", "--no-preload", "--check", "--timeout", "9"]
    given_flags = vars(parser.parse_args(words))
    assert given_flags["check"] is True
    seen = load(given_flags, {}, reader="supervisor", read_text=str)
    got = seen.settings
    assert (got.app, got.queues, got.procs, got.preload, got.timeout_s) == (
        "shop:app",
        ("a", "b"),
        2,
        False,
        9,
    )
    assert (got.burst, seen.origins["burst"]) == (False, "default")
    assert set(given_flags) == {s.name for s in (*SETTINGS, *ACTIONS) if s.flags and s.name != "version"}


def test_the_help_names_environment_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "supervisor")
    text = " ".join(parser.format_help().split())
    assert "(DTQ_TIMEOUT_S; default: 300)" in text
    text.encode("ascii")  # a terminal that knows nothing else shows it, too


def test_a_producer_has_only_its_own_flags() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "producer")
    assert set(vars(parser.parse_args([]))) == {"redis_url", "key_prefix", "config"}


def test_importing_the_settings_looks_at_no_environment_and_brings_no_parser() -> None:
    code = (
        "import sys, types\n"
        "door = sys.modules['dtq_child'] = types.ModuleType('dtq_child')\n"  # not what its door opens
        f"door.__path__ = {list(dtq_child.__path__)!r}\n"
        "import dtq_child.settings, dtq_child.settings_page\n"
        "print(sorted({'argparse', 'redis', 'asyncio', 'logging'} & set(sys.modules)))"
    )
    environ = {**os.environ, "DTQ_TIMEOUT_S": "broken", "DTQ_NONSENSE": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ, timeout=30
    )
    assert (answer.stderr, answer.stdout.strip()) == ("", "[]")


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout_s = 3  # type: ignore[misc]
