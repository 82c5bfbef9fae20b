"""Every script says what it takes, gives and must be atomic for; its parts fit; it is Lua on every server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from dtq_child import scripts as scripts_module
from dtq_child.connection import open_link
from dtq_child.keys import GROUP, Keys
from dtq_child.scripts import Constants, Scripts, names, source
from dtq_child.settings import defaults
from tests.rules.lua_bytecode import globals_of
from tests.support.servers import RedisServer

ROOT = Path(__file__).parents[2]
LUA = ROOT / "dtq_child" / "lua"
PARTS = sorted(path.stem for path in LUA.glob("_*.lua"))
SCRIPTS = names()
NEEDS = re.compile(r"^--!(include|lazily) (\w+)$", re.MULTILINE)
EXPORTS = re.compile(r"^--!exports (.+)$", re.MULTILINE)
# What every server's sandbox has, and scripts need.
KNOWN_GLOBALS = {
    *("redis", "cjson", "KEYS", "ARGV", "string", "table", "math", "type", "tonumber", "tostring"),
    *("pairs", "ipairs", "next", "select", "unpack", "pcall", "error"),
}
LOADERS_WORDS = {
    *(
        "P",
        "GROUP",
        "KEEP_S",
        "SCHEDULE",
        "CLAIMED",
        "DEAD_LETTERS",
        "AUDIT",
        "CANCELLED",
        "RECENT",
        "QUEUES",
    ),
    *("HINT", "EVENTS", *(name.upper() for name in Constants.__dataclass_fields__)),
}
EACH_SCRIPT = pytest.mark.parametrize("name", SCRIPTS)
EACH_PART = pytest.mark.parametrize("part", PARTS)


def text_of(name: str, prefix: str = "dtq:") -> bytes:
    return Scripts(Keys(prefix), Constants.of(defaults())).text(name)


def header(name: str) -> str:
    """The comments at the top, without the loader's words."""
    lines = []
    for line in source(name).splitlines():
        if not line.startswith("--"):
            break
        if not line.startswith("--!"):
            lines.append(line[2:].strip())
    return " ".join(lines)


def needs(name: str) -> list[tuple[str, str]]:
    return NEEDS.findall(source(name))


# -- what a file says


def test_there_are_scripts_and_parts() -> None:
    assert {
        "enqueue",
        "settle_and_claim",
        "release",
        "cancel",
        "pause",
        "resume",
        "requeue",
        "discard",
    } <= set(SCRIPTS)
    assert not set(SCRIPTS) & set(PARTS)
    assert len(PARTS) > 10


@EACH_SCRIPT
def test_a_script_says_what_it_takes_gives_and_is_atomic_for(name: str) -> None:
    said = header(name)
    at = [said.find(word) for word in ("KEYS: nil", "ARGV: event base", "Returns: ", "Atomic")]
    assert all(place > 0 for place in at), dict(zip(("KEYS", "ARGV", "Returns", "Atomic"), at, strict=True))
    assert at == sorted(at)
    assert len(said[: at[0]]) > 20, "and first of all what it does"


@EACH_PART
def test_a_part_says_what_it_is_for(part: str) -> None:
    assert len(header(part)) > 20
    assert len(source(part).splitlines()) < 150


@pytest.mark.parametrize("name", [*SCRIPTS, *PARTS])
def test_what_a_file_needs_is_there(name: str) -> None:
    for how, needed in needs(name):
        assert f"_{needed}" in PARTS, needed
        if how == "lazily":
            assert EXPORTS.search(source(f"_{needed}")), f"{needed} says not what it exports"
    unknown = set(re.findall(r"^--!.*$", source(name), re.MULTILINE))
    unknown -= {f"--!{how} {needed}" for how, needed in needs(name)}
    assert all(EXPORTS.fullmatch(line) for line in unknown), unknown


@EACH_PART
def test_a_parts_exports_are_its_functions(part: str) -> None:
    for exported in EXPORTS.findall(source(part)):
        for name in exported.split():
            assert re.search(rf"^local function {name}\(", source(part), re.MULTILINE), name


@EACH_PART
def test_every_part_is_needed_by_somebody(part: str) -> None:
    assert any(part[1:] == needed for name in [*SCRIPTS, *PARTS] for _, needed in needs(name))


@EACH_SCRIPT
def test_every_script_is_run_by_somebody(name: str) -> None:
    files = [*(ROOT / "dtq_child").rglob("*.py"), *(ROOT / "dtq_supervisor").rglob("*.py")]
    assert any(f'"{name}"' in file.read_text() for file in files)


# -- what the server gets


@EACH_SCRIPT
def test_a_script_touches_no_global_that_a_server_does_not_have(name: str) -> None:
    found = globals_of(text_of(name))
    assert found.written == set()
    assert found.read <= KNOWN_GLOBALS


def test_the_look_at_globals_would_see_one() -> None:
    found = globals_of(b"local function f() if false then hidden = typo.x end end return f")
    assert (found.read, found.written) == ({"typo"}, {"hidden"})
    with pytest.raises(AssertionError, match="expected near"):
        globals_of(b"local = 1")


@EACH_SCRIPT
def test_what_a_script_keeps_count_of_exists_once(name: str) -> None:
    """A second copy of these in a lazy part would begin anew at each of its calls."""
    text = text_of(name).decode()
    # A turn in full is entered at most once, as the last thing that is done.
    text = text.removeprefix("local function part_turn()\n")
    calls = re.findall(r"^.*\bwhole_turn\(", text, re.MULTILINE)
    assert all("return whole_turn(" in call or "local function" in call for call in calls)
    for state in ("local event_number", "local counts =", "local clock ="):
        assert text.count(state) <= 1, state
        at = text.find(state)
        assert at < 0 or not re.search(r"^local function part_", text[:at], re.MULTILINE), state


@pytest.mark.parametrize("name", [*SCRIPTS, *PARTS])
def test_no_text_holds_a_word_that_the_loader_would_replace(name: str) -> None:
    """It writes constants where their names stand, and knows strings only by the quote beside a name."""
    code = re.sub(r"^\s*--.*$", "", source(name), flags=re.MULTILINE)
    for text in re.findall(r"'([^'\n]*)'", code):
        assert text in LOADERS_WORDS or not LOADERS_WORDS & set(re.findall(r"\w+", text)), text


def test_another_prefix_is_written_everywhere() -> None:
    for name in SCRIPTS:
        assert b"dtq:" not in text_of(name, "shop-2.{x}:@/+")
    assert b"'shop-2.{x}:@/+'" in text_of("enqueue", "shop-2.{x}:@/+")


def test_only_what_adds_may_be_refused_by_a_full_server() -> None:
    """R13: all other scripts see to it that maxmemory refuses nothing of them."""
    readers = {name for name in SCRIPTS if re.search(r"\b[Cc]hanges nothing\b", header(name))}
    refusable = {name for name in SCRIPTS if "unrefusable()" not in source(name)} - readers
    # Its usual turn has no functions. After the result, which may be refused, comes what never is.
    usual = source("settle_and_claim")
    writes = re.findall(r"(?:call|try)\('(SET|XACK|XDEL|DEL|HSET|EXPIRE|PUBLISH)'", usual)
    assert writes[:2] == ["SET", "XACK"]
    refusable.remove("settle_and_claim")
    assert refusable == {"enqueue", "pause", "resume", "requeue", "discard"}


def unrun(name: str) -> bytes:
    """A script that compiles to its end and does nothing."""
    return b"do return 'compiled' end\n" + text_of(name)


def test_every_script_compiles_on_every_server(every_redis: RedisServer) -> None:
    for name in SCRIPTS:
        assert every_redis.cli("EVAL", unrun(name), 0) == b"compiled", name


def test_every_script_compiles_in_fakeredis() -> None:
    fake: Any = fakeredis.FakeRedis()
    for name in SCRIPTS:
        assert fake.eval(unrun(name), 0) == b"compiled", name


# -- names

PROBE = """--!include base
--!include bell
return { key_task('t'), key_result('t'), key_idempotency('q', 'k'), key_stream('q', 3),
  key_bell('q'), key_worker('w'), key_worker_bell('w'), key_paused('q'),
  SCHEDULE, CLAIMED, DEAD_LETTERS, AUDIT, CANCELLED, RECENT, QUEUES, HINT, EVENTS, GROUP,
  P, split_stream(key_stream('a:p1', 7)) }
"""


@pytest.mark.parametrize("prefix", ["dtq:", "", "shop-2.{x}:@/+"])
def test_scripts_name_keys_as_python_does(
    every_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(scripts_module, "source", lambda name: PROBE if name == "probe" else source(name))
    keys = Keys(prefix)
    link = open_link(every_redis.url)
    told = Scripts(keys, Constants.of(defaults())).run(link, "probe", [], [])
    link.close()
    assert [word.decode() if isinstance(word, bytes) else word for word in told] == [
        *(keys.task("t"), keys.result("t"), keys.idempotency("q", "k"), keys.stream("q", 3)),
        *(keys.bell_queue("q"), keys.worker("w"), keys.bell_worker("w"), keys.paused("q")),
        *(keys.schedule, keys.claimed, keys.dead_letter, keys.audit, keys.cancelled, keys.recent),
        *(keys.queues, keys.hint, keys.events, GROUP, prefix, *keys.split_stream(keys.stream("a:p1", 7))),
    ]


def test_no_other_key_is_spelled_in_lua() -> None:
    """Where a task's path is hot, a name is put together in place: by the same word as in the prelude."""
    prelude = set(re.findall(r"P \.\. '([^']*)'", source("_base")))
    assert len(prelude) == 8
    for name in [*SCRIPTS, *PARTS]:
        assert set(re.findall(r"P \.\. '([^']*)'", source(name))) <= prelude, name
        assert not re.search(
            r"'(dtq:|stream:|retry:|tasks:|lock:)", re.sub(r"P \.\. '[^']*'", "", source(name))
        )
