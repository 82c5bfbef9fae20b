"""deploy/redis.conf: a server that is told so starts, keeps what it has, and is found fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtq_supervisor.preflight import keeps_data, look
from tests.conftest import every_version
from tests.redis.scene import US, Scene
from tests.support.binaries import binary_for
from tests.support.servers import RedisServer

CONF = Path(__file__).parents[2] / "deploy" / "redis.conf"
ZIPLIST = ("hash-max-listpack-value", "hash-max-ziplist-value")


@pytest.mark.parametrize("version", every_version())
def test_a_server_told_so_is_fit_and_keeps_what_it_has(version: str, tmp_path: Path) -> None:
    binary = binary_for(version)
    conf = tmp_path / "redis.conf"
    old = binary.flavour == "redis" and binary.version < (7,)
    conf.write_text(CONF.read_text().replace(*ZIPLIST) if old else CONF.read_text())
    with RedisServer(binary, settings={"include": str(conf)}) as server, Scene(server) as scene:
        for name, value in (("maxmemory-policy", "noeviction"), ("stream-node-max-entries", "16")):
            assert scene.redis.config_get(name) == {name: value}
        assert scene.redis.config_get(ZIPLIST[old])[ZIPLIST[old]] == "1024"
        line = scene.line(US, ["default"])
        assert look(line, allow_eviction=False)
        assert keeps_data(line)
