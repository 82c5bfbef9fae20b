"""Finds TCP ports that nobody will take while a server of ours is down."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 15000


def free_port() -> int:
    """A port of 127.0.0.1 that is free now and below the ephemeral range.

    Not bind(0): from the ephemeral range, a client that keeps knocking at a stopped server would sooner or
    later be given that very port as its own and be connected to itself.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    highest = max(min(ephemeral, 32768) - 1, LOWEST + 1000)
    # Not the module's own dice: a plugin may have seeded them alike in two sessions.
    dice = random.SystemRandom()
    for _ in range(200):
        port = dice.randint(LOWEST, highest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port of 127.0.0.1 in {LOWEST}–{highest}")
