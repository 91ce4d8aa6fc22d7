"""Who runs when: the operating system, or turns in a modelled time that come out the same every time."""

from __future__ import annotations

import contextvars
import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from lightning_g2.errors import G2Error

Pass = Literal["forward", "backward"]
Cost = Callable[[Pass, int], float]
"""Modelled time of one layer in one pass, seconds, by the pass and the layer's index."""


class Scheduler(ABC):
    """What threads wait through.

    State that threads wait for is changed within :meth:`changing`, and read in the predicates of :meth:`wait_for`.
    """

    @abstractmethod
    def start(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread; it has the caller's context variables."""

    @abstractmethod
    def join(self) -> None:
        """Wait until all threads have ended."""

    @abstractmethod
    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once the predicate holds."""

    @abstractmethod
    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change state that others may wait for."""

    @abstractmethod
    def spend(self, which: Pass, layer: int) -> None:
        """Let the modelled time of a layer pass, if time is modelled."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on this scheduler's clock."""


class ThreadScheduler(Scheduler):
    """Threads run as the operating system lets them.

    Args:
        cost: sleep so long for each layer, to model compute that needs no core; None sleeps nowhere.
    """

    def __init__(self, cost: Cost | None = None) -> None:
        self._cost = cost
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, target: Callable[[], None]) -> None:
        """See :meth:`Scheduler.start`."""
        thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name=name)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """See :meth:`Scheduler.join`."""
        while self._threads:
            self._threads[-1].join()
            self._threads.pop()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """See :meth:`Scheduler.wait_for`."""
        with self._condition:
            self._condition.wait_for(predicate)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See :meth:`Scheduler.changing`."""
        with self._condition:
            yield
            self._condition.notify_all()

    def spend(self, which: Pass, layer: int) -> None:
        """See :meth:`Scheduler.spend`."""
        if self._cost is not None:
            time.sleep(self._cost(which, layer))

    def now(self) -> float:
        """See :meth:`Scheduler.now`."""
        return time.perf_counter()


class TurnScheduler(Scheduler):
    """The same threads, one at a time, in an order that modelled time decides.

    Work itself takes no time; :meth:`spend` does. A thread gives its turn away where it spends time, waits or ends. The
    next is the longest-waiting one whose predicate holds, else the one whose time is over first, and the clock moves
    there. So a run is the same every time, on any machine.

    Args:
        cost: modelled time of each layer. It is asked in the order of the run, so it may draw from a seeded generator.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._time = 0.0
        self._count = 0
        self._alive: list[threading.Thread] = []
        self._asleep: list[tuple[float, int, threading.Lock]] = []
        self._waiting: list[tuple[Callable[[], bool], threading.Lock]] = []
        self._stuck = False

    def start(self, name: str, target: Callable[[], None]) -> None:
        """See :meth:`Scheduler.start`."""
        door = _closed()
        context = contextvars.copy_context()

        def body() -> None:
            door.acquire()
            try:
                context.run(target)
            finally:
                self._alive.remove(thread)
                self._pass_on()

        thread = threading.Thread(target=body, name=name)
        self._alive.append(thread)
        self._sleep_until(self._time, door)
        thread.start()

    def join(self) -> None:
        """See :meth:`Scheduler.join`."""
        threads = list(self._alive)
        self.wait_for(lambda: not self._alive)
        for thread in threads:
            thread.join()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """See :meth:`Scheduler.wait_for`.

        Raises:
            G2Error: no thread can ever go on.
        """
        if predicate():
            return
        door = _closed()
        self._waiting.append((predicate, door))
        self._pass_on()
        door.acquire()
        if self._stuck:
            raise G2Error("every thread waits for another; none can go on")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See :meth:`Scheduler.changing`; whoever has the turn is alone."""
        yield

    def spend(self, which: Pass, layer: int) -> None:
        """See :meth:`Scheduler.spend`."""
        door = _closed()
        self._sleep_until(self._time + self._cost(which, layer), door)
        self._pass_on()
        door.acquire()

    def now(self) -> float:
        """Modelled time, seconds."""
        return self._time

    def _sleep_until(self, wake: float, door: threading.Lock) -> None:
        self._count += 1  # equal times: first come, first served
        heapq.heappush(self._asleep, (wake, self._count, door))

    def _pass_on(self) -> None:
        for number, (predicate, door) in enumerate(self._waiting):
            if predicate():
                del self._waiting[number]
                door.release()
                return
        if self._asleep:
            self._time, _, door = heapq.heappop(self._asleep)
            door.release()
        elif self._waiting:
            self._stuck = True
            self._waiting.pop(0)[1].release()


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
