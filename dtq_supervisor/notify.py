"""What a service manager is told of the whole: ready, reloading, stopping, a line of status, and that the
main loop goes round (the protocol of sd_notify: datagrams to NOTIFY_SOCKET).

Nothing here waits. What the socket does not take now is said in a later round, as it is then.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace

from dtq_supervisor.logs import say
from dtq_supervisor.roster import Pool

SOCKET, WATCHDOG_US, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
STATUS_EVERY_S = 1.0
"""Children that come and go many times a second need not be counted as often."""
AGAIN_S = 1.0
"""After a message that was not taken."""
END_S = 5.0
"""What a stop may take beyond its grace, generously (R36): a manager that is told so waits for it, though its
own limit is shorter."""

Send = Callable[[str], None]
"""Sends one message without waiting. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the environment says about a manager. `address`: as in NOTIFY_SOCKET; `watchdog_s`: how long it
    bears our silence, 0.0 for ever."""

    address: str = ""
    watchdog_s: float = 0.0

    @classmethod
    def take(cls, environ: MutableMapping[str, str], pid: int) -> Invitation:
        """Takes it out of the environment: what we start must not speak, or be expected to, in our name."""
        address, period, meant = (environ.pop(name, "") for name in (SOCKET, WATCHDOG_US, WATCHDOG_PID))
        ours = not meant or meant == str(pid)
        return cls(address, int(period) / 1e6 if ours and period.isdecimal() else 0.0)


def sender(address: str) -> Send:
    """To a path, or to a name in the abstract namespace (`@name`). Raises OSError if it is neither."""
    target = "\0" + address[1:] if address.startswith("@") else address
    if not target.startswith(("/", "\0")):
        raise OSError(f"{SOCKET}={address} is neither a path nor an abstract name")

    def send(text: str) -> None:
        # A new one each time: a manager that was replaced listens at the same address.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
            line.sendto(text.encode(), target)

    return send


@dataclass(frozen=True, slots=True)
class Standing:
    """How things stand. Equal ones need not be told twice. `grace_s`: of a stop."""

    status: str
    ready: bool = False
    reloading: bool = False
    stopping: bool = False
    grace_s: float = 0.0


def standing(pool: Pool, *, redis_away: bool) -> Standing:
    """`redis_away`: it was there once, and does not answer now."""
    stop = pool.stopping
    grace_s = stop.over_at - stop.asked_at if stop else 0.0
    return Standing(
        _status(pool, redis_away),
        ready=pool.told_ready,
        reloading=pool.reload is not None and pool.told_ready,
        stopping=stop is not None or pool.left,
        grace_s=grace_s,
    )


def _status(pool: Pool, redis_away: bool) -> str:
    if pool.stopping:
        return f"stopping: {_children(len(pool.living()))} to end"
    if pool.left:
        return "the application cannot be imported; the log says why"
    if not pool.imported:
        return "the application is being imported"
    up = f"{pool.at_work()} of {_children(pool.procs())}"
    if redis_away or not pool.contact:
        return _with_reload(pool, f"waiting for Redis; {up} up")
    return _with_reload(pool, f"claims are held (SIGTSTP); {up} up" if pool.quiet else f"{up} at work")


def _with_reload(pool: Pool, words: str) -> str:
    if pool.reload:
        return f"reloading ({pool.reload.phase}); {words}"
    failed = pool.reloaded is not None and not pool.reloaded.done
    return f"{words}; the last reload failed" if failed else words


def _children(count: int) -> str:
    return f"{count} child" if count == 1 else f"{count} children"


@dataclass(slots=True)
class Notifier:
    """Tells a manager how things stand, and feeds its watchdog. For the main thread.

    Without a manager (`send` None) it does nothing."""

    send: Send | None = None
    watchdog_s: float = 0.0
    _told: Standing = field(default_factory=lambda: Standing(""))
    _told_at: float = 0.0
    _feed_at: float = 0.0
    _silent_until: float = 0.0
    _complained: bool = False

    def tell(self, now: float, at: Standing) -> None:
        """Says what is new. To be called in each round of the main loop."""
        if self.send is None or now < self._silent_until:
            return
        words = list(self._marks(now, at))
        fresh = at.status != self._told.status and (words or now - self._told_at >= STATUS_EVERY_S)
        if fresh:
            words.append(f"STATUS={at.status}")
        if self.watchdog_s and now >= self._feed_at:
            words.append("WATCHDOG=1")
        if not words or not self._sent(self.send, "\n".join(words), now):
            return
        if "WATCHDOG=1" in words:
            self._feed_at = now + self.watchdog_s / 2
        if fresh:
            self._told_at = now
        self._told = at if fresh else replace(at, status=self._told.status)

    def rest_s(self, now: float) -> float:
        """How long the main loop may sleep without a call of `tell`."""
        if self.send is None or not self.watchdog_s:
            return math.inf
        return max(0.0, max(self._feed_at, self._silent_until) - now)

    def _marks(self, now: float, at: Standing) -> Iterator[str]:
        """READY once, and after each reload; STOPPING once, and after that nothing else."""
        told = self._told
        if at.stopping:
            if not told.stopping:
                yield "STOPPING=1"
                yield f"EXTEND_TIMEOUT_USEC={round((at.grace_s + END_S) * 1e6)}"
        elif at.reloading and told.ready and not told.reloading:
            yield "RELOADING=1"
            yield f"MONOTONIC_USEC={round(now * 1e6)}"
        elif at.ready and (not told.ready or (told.reloading and not at.reloading)):
            yield "READY=1"

    def _sent(self, send: Send, text: str, now: float) -> bool:
        try:
            send(text)
        except OSError as error:
            self._silent_until = now + min(AGAIN_S, self.watchdog_s / 4 or AGAIN_S)
            if not self._complained:
                self._complained = True
                say("warning", "manager_deaf", {"reason": error.strerror or str(error)})
            return False
        return True


def notifier(invitation: Invitation) -> Notifier:
    """Whoever invited us is told; if that cannot be, nobody is, and the log says so."""
    if not invitation.address:
        return Notifier()
    try:
        return Notifier(sender(invitation.address), invitation.watchdog_s)
    except OSError as error:
        say("warning", "manager_deaf", {"reason": str(error)})
        return Notifier()
