"""A TCP proxy before Redis whose faults the tests script: cuts, silence, delays, lost and false replies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Self, TypeVar

from tests.support.link import Link
from tests.support.ports import free_port
from tests.support.rule import Match, Rule

T = TypeVar("T")
Direction = Literal["request", "reply", "both"]
_ENDLESS = 1 << 62
_CALL_SECONDS = 30.0


class FaultProxy:
    """Listens on a port of its own and passes whole commands and replies on, until told otherwise.

    Every method may be called from any thread; a fault is in force when the method returns. Rules are asked
    in the order in which they were made, the first that strikes is it. A connection that subscribed is
    passed on unread.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.connections = 0
        self.round_trips = 0
        self.commands: Counter[str] = Counter()
        self.rules: list[Rule] = []
        self.target_port = target_port
        self.links: set[Link] = set()
        self.request_delay = 0.0
        self.reply_delay = 0.0
        self.swallow_new: Literal["no", "lose", "hold"] = "no"
        self.loop = asyncio.new_event_loop()
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        self._await(self._find_port())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def open(self) -> int:
        """How many clients are connected now."""
        return self._call(lambda: sum(1 for link in self.links if link.client is not None))

    # -- faults

    def cut(self) -> None:
        """Resets every connection, both ends. New ones are welcome."""
        self._call(self._reset_all)

    def refuse(self) -> None:
        """New connections are refused by the kernel; existing ones stay."""
        self._await(self._unlisten())

    def black_hole(self, existing: bool = True, new: bool = False, *, hold: bool = False) -> None:
        """Lets bytes and closings vanish in both directions without a sign.

        Without `hold` they are lost, and the connections that met this stay dumb after heal(), too, like
        those that a firewall has forgotten. With `hold` they arrive at heal(), as TCP's own resends do
        after a short partition; but what a client sent before it *reset* its connection never does.
        """

        def swallow() -> None:
            if new:
                self.swallow_new = "hold" if hold else "lose"
            for link in self.links if existing else ():
                link.swallow(hold)

        self._call(swallow)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Each message from now on arrives that much later, in order. The two directions add up."""

        def change() -> None:
            if direction in ("request", "both"):
                self.request_delay = seconds
            if direction in ("reply", "both"):
                self.reply_delay = seconds

        self._call(change)

    def drop_reply(self, match: Match, count: int = 1, *, skip: int = 0) -> Rule:
        """The next `count` commands that match, after the first `skip`, are executed, but instead of the
        reply the connection is reset. `match`: bytes found in the words joined by blanks, or a question
        about the words."""
        return self._add(Rule("drop_reply", match, skip, count))

    def drop_request(self, match: Match, count: int = 1, *, skip: int = 0) -> Rule:
        """Such commands never reach Redis, and the connection is reset. What came before them is executed."""
        return self._add(Rule("drop_request", match, skip, count))

    def answer(self, match: Match, error: bytes, count: int = _ENDLESS) -> Rule:
        """Such commands never reach Redis; they get this reply (`-LOADING …`, without line end) until
        heal()."""
        return self._add(Rule("answer", match, count=count, answer=error.removesuffix(b"\r\n") + b"\r\n"))

    def heal(self) -> None:
        """Ends every fault. Rules are forgotten, held bytes arrive, connections are accepted again."""

        def end_faults() -> None:
            self.rules.clear()
            self.request_delay = self.reply_delay = 0.0
            self.swallow_new = "no"
            for link in list(self.links):
                link.heal()

        self._call(end_faults)
        self._await(self._listen())

    def retarget(self, port: int) -> None:
        """New connections lead there; existing ones stay where they are (cut() them)."""
        self._call(lambda: setattr(self, "target_port", port))

    def close(self) -> None:
        if self.loop.is_closed():
            return
        self._await(self._unlisten())
        self._await(self._hang_up())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CALL_SECONDS)
        self.loop.close()

    # -- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _find_port(self) -> None:
        for _ in range(20):
            self.port = free_port()
            try:
                return await self._listen()
            except OSError:  # somebody was quicker to bind it
                continue
        raise RuntimeError("20 chosen ports in a row were taken by others")

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await self.loop.create_server(
                lambda: Link(self).end("client"), "127.0.0.1", self.port, backlog=512, reuse_address=True
            )

    async def _unlisten(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            await asyncio.sleep(0)

    def _reset_all(self) -> None:
        for link in list(self.links):
            link.reset()

    async def _hang_up(self) -> None:
        """Ends every connection, and waits until the loop has let go of the sockets."""
        self._reset_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(_CALL_SECONDS)

    def _call(self, action: Callable[[], T]) -> T:
        async def run() -> T:
            answer = action()
            await asyncio.sleep(0)  # what was closed is closed when the caller goes on
            return answer

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_CALL_SECONDS)

    def _add(self, rule: Rule) -> Rule:
        self._call(lambda: self.rules.append(rule))
        return rule
