"""Signals at every possible instant: an outcome is never lost, and nothing is raised where it is not
meant."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from dtq_child import guards, interrupter, loop, raised, runner
from dtq_child.scoreboard import Order
from dtq_child.signals import SOFT_SIGNAL
from tests.unit.runner_bench import Bench, runner_bench, value_of

OURS = {module.__file__ for module in (runner, interrupter, guards, loop, raised)}
ROUNDS = 2000
PATIENCE_S = 20.0
LOOKING = ("RESUME", "CALL", "JUMP_BACKWARD", "SEND")


@pytest.fixture
def bench() -> Iterator[Bench]:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with runner_bench() as bench:
        yield bench
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class StepByStep:
    """Strikes (raises a signal) at the n-th of those instants in our own code at which the interpreter looks
    for signals: at the beginning of a function, after a call, before a loop's next round."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self.strike = strike
        self.steps = 0
        self.counting = True
        self.at = 0
        self._looks = False

    @property
    def struck(self) -> bool:
        return self.steps >= self.at > 0

    def run(self, at: int, body: Callable[[], Any]) -> Any:
        self.steps, self.at = 0, at
        sys.settrace(self._enter)
        try:
            return body()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in OURS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event != "opcode":
            self._looks = False
            return self._step
        looks, self._looks = self._looks, opname_at(frame).startswith(LOOKING)
        if looks and self.counting:
            self.steps += 1
            if self.steps == self.at:
                self.strike()
        return self._step


def opname_at(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def every_step(strike: Callable[[], None], one: Callable[[StepByStep, int], bool]) -> int:
    """Calls `one` for each step until it was not struck any more; how many there were."""
    steps = StepByStep(strike)
    at = 1
    while one(steps, at):
        at += 1
    return at


@pytest.mark.parametrize("how", ["plain", "async"])
def test_a_soft_signal_at_every_step_of_a_handler_that_returns(bench: Bench, how: str) -> None:
    finished: list[int] = []

    def plain() -> str:
        finished.append(1)
        return "value"

    async def not_plain() -> str:
        await asyncio.sleep(0)
        finished.append(1)
        return "value"

    kinds: list[str] = []
    coming = [0]

    def strike() -> None:
        bench.board.order(0, Order.SOFT_TIMEOUT, coming[0])
        signal.raise_signal(SOFT_SIGNAL)

    def one(steps: StepByStep, at: int) -> bool:
        finished.clear()
        coming[0] = bench.row().seq + 1
        outcome = steps.run(at, bench.run)
        kinds.append(outcome.decision.kind)
        if finished:
            assert value_of(outcome) == "value"
        else:
            assert outcome.decision.reason == "soft_timeout"
            assert steps.struck
        # The order still stands in the row: the next task must not be hit by it.
        signal.raise_signal(SOFT_SIGNAL)
        assert value_of(bench.run(task_type="next")) == "next"
        bench.board.clear_order(0)
        return steps.struck

    bench.handle(plain if how == "plain" else not_plain)
    bench.handle(lambda: "next", name="next")
    assert every_step(strike, one) > 40
    assert set(kinds) == {"succeed", "retry"}


@pytest.mark.parametrize("how", ["plain", "async"])
def test_a_soft_signal_at_every_step_of_a_handler_that_raises(bench: Bench, how: str) -> None:
    def plain() -> None:
        raise ValueError

    async def not_plain() -> None:
        raise ValueError

    classes: set[str] = set()
    coming = [0]

    def strike() -> None:
        bench.board.order(0, Order.SOFT_TIMEOUT, coming[0])
        signal.raise_signal(SOFT_SIGNAL)

    def one(steps: StepByStep, at: int) -> bool:
        coming[0] = bench.row().seq + 1
        decision = steps.run(at, bench.run).decision
        assert decision.kind == "retry"
        classes.add(decision.error_class)
        bench.board.clear_order(0)
        return steps.struck

    bench.handle(plain if how == "plain" else not_plain)
    assert every_step(strike, one) > 40
    assert classes == {"ValueError", "SoftTimeout"}


def test_a_handler_of_the_tasks_own_that_raises_at_every_step_after_its_end(bench: Bench) -> None:
    """The task is over, its value is there, and its signal handler still stands until it is put back."""

    def one(steps: StepByStep, at: int) -> bool:
        def surprise(*_: object) -> None:
            raise KeyError("a signal handler that the task left behind")

        def leave() -> str:
            signal.signal(signal.SIGUSR1, surprise)
            steps.counting = True
            return "value"

        steps.counting = False
        bench.handle(leave)
        outcome = steps.run(at, bench.run)
        assert value_of(outcome) == "value"
        assert signal.getsignal(signal.SIGUSR1) is not surprise
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        return steps.struck

    assert every_step(lambda: signal.raise_signal(signal.SIGUSR1), one) > 15


def test_a_storm_of_alarms_that_a_task_leaves_behind(bench: Bench) -> None:
    def alarm(*_: object) -> None:
        raise TimeoutError("alarm")

    def leave() -> str:
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4), 1e-4)
        return "value"

    for _ in range(300):
        decision = bench.run(leave).decision
        assert decision.kind == "succeed" or decision.error_class == "TimeoutError", decision
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        assert value_of(bench.run(lambda: "next")) == "next"


@contextlib.contextmanager
def _tormentor(bench: Bench, orders: list[Order]) -> Iterator[None]:
    """Another process, which writes orders into the row and sends the soft signal a little later."""
    # Hypothesis watches the collector by a callback in Python, and an exception in there is lost.
    gc.disable()
    target, pid = os.getpid(), os.fork()
    if pid == 0:
        dice = random.Random(7)
        try:
            while os.getppid() == target:
                bench.board.order(0, dice.choice(orders), bench.row().seq + dice.choice((0, 0, 1)))
                time.sleep(dice.uniform(0, 3e-4))
                os.kill(target, SOFT_SIGNAL)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        gc.enable()


def test_soft_signals_from_outside_at_random_instants(bench: Bench) -> None:
    """As in life: another process, its order in the row, its signal some time later."""
    finished: list[int] = []
    orders = {Order.SOFT_TIMEOUT: "retry", Order.CANCELLED: "cancelled", Order.SHUTDOWN: "release"}

    def handler() -> str:
        end = time.perf_counter() + random.uniform(0, 2e-4)
        while time.perf_counter() < end:
            pass
        finished.append(1)
        return "value"

    bench.handle(handler)
    kinds: Counter[str] = Counter()
    with _tormentor(bench, list(orders)):
        end = time.monotonic() + PATIENCE_S
        # As many as it takes: on a busy machine most signals come when nothing runs.
        while kinds.total() < ROUNDS or (
            set(kinds) != {"succeed", *orders.values()} and time.monotonic() < end
        ):
            finished.clear()
            outcome = bench.run()
            kinds[outcome.decision.kind] += 1
            if outcome.decision.kind == "succeed":
                assert value_of(outcome) == "value"
                assert finished
    assert set(kinds) == {"succeed", *orders.values()}, kinds
