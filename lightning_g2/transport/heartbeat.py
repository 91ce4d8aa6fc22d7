"""Signs of life: a thread of each rank that sends them, and one of server 0 that misses them."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_g2.server import Heartbeats


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process is to be found by another of the same host.

    Attributes:
        host: what no other boot of any host has, and no other namespace of process ids.
        pid: its id there.
    """

    host: str
    pid: int

    @classmethod
    def own(cls) -> ProcessPlace:
        """This process's; without a host where the system does not say."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid())
        except OSError:
            return cls("", os.getpid())

    def ticks(self) -> int | None:
        """Processor time of all its threads since its start, in clock ticks; None where that is not to be read."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return int(fields[11]) + int(fields[12])  # user and system time: fields 14 and 15 of the whole line


class HeartbeatThread:
    """Sends signs of life of this rank, whatever its other threads are doing.

    Args:
        send: sends one, and returns the ranks that were dropped so far, each with the reason.
        interval_s: time from one to the next, seconds.
        on_drop: called from the thread with each rank that was dropped, once, and the reason.
    """

    def __init__(
        self, send: Callable[[], Mapping[int, str]], *, interval_s: float, on_drop: Callable[[int, str], None]
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._on_drop = on_drop
        self._known: set[int] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="g2-heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first one, by which the server knows this rank, and start."""
        self._send()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; may be called any number of times."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            try:
                dropped = self._send()
            except Exception:  # the server is gone, or busy; whoever needs it says so, and the next one may get through
                continue
            for rank in [rank for rank in dropped if rank not in self._known]:
                self._known.add(rank)
                self._on_drop(rank, dropped[rank])


class Watch:
    """Drops ranks that have died or are silent.

    The end of a process of this host is seen at once, whoever its parent is; what is left of others is their silence.

    Args:
        timeout_s: silence after which a rank is dropped, seconds.
        drop: called from the watching thread with the rank and what was seen of it.
        clock: seconds.
    """

    def __init__(
        self, timeout_s: float, drop: Callable[[int, str], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._heartbeats = Heartbeats(timeout_s)
        self._drop = drop
        self._clock = clock
        self._lock = threading.Lock()
        self._host = ProcessPlace.own().host
        self._places: dict[int, ProcessPlace] = {}  # of ranks on this host
        self._descriptors: dict[int, int] = {}  # rank by the descriptor that tells of its process's end
        self._poll = select.poll()

    def start(self) -> None:
        """Start the watching thread; it lives as long as the process."""
        threading.Thread(target=self._run, name="g2-watch", daemon=True).start()

    def beat(self, rank: int, place: ProcessPlace) -> None:
        """A rank has given a sign of life."""
        with self._lock:
            self._heartbeats.beat(rank, time_s=self._clock())
            if self._host and place.host == self._host and self._places.get(rank) != place:
                self._places[rank] = place
                # Rank 0 is the parent of this process, which knows of its end by the lifeline.
                if rank != 0 and hasattr(os, "pidfd_open"):
                    with suppress(OSError):
                        descriptor = os.pidfd_open(place.pid)
                        self._descriptors[descriptor] = rank
                        self._poll.register(descriptor, select.POLLIN)

    def forget(self, rank: int) -> None:
        """A rank has left."""
        with self._lock:
            self._heartbeats.forget(rank)
            self._places.pop(rank, None)
            for descriptor in [d for d, owner in self._descriptors.items() if owner == rank]:
                self._poll.unregister(descriptor)
                os.close(descriptor)
                del self._descriptors[descriptor]

    def _run(self) -> None:
        while True:
            limit_s = self._heartbeats.interval_s
            start_s = self._clock()
            ended = self._poll.poll(1000 * limit_s)
            for rank, place in self._ended([descriptor for descriptor, _ in ended]):
                self._lose(rank, f"its process {place.pid} has ended")
            if ended:
                time.sleep(max(0.0, limit_s - (self._clock() - start_s)))
            for rank in self._silent():
                self._lose(rank, f"it has not been heard of for {self._heartbeats.timeout_s:g} s")

    def _ended(self, descriptors: list[int]) -> list[tuple[int, ProcessPlace]]:
        with self._lock:
            ranks = [self._descriptors[descriptor] for descriptor in descriptors if descriptor in self._descriptors]
            return [(rank, self._places[rank]) for rank in ranks]

    def _silent(self) -> list[int]:
        with self._lock:
            now = self._clock()
            for rank, place in self._places.items():
                self._heartbeats.used(rank, place.ticks(), time_s=now)
            return self._heartbeats.silent(time_s=now)

    def _lose(self, rank: int, seen: str) -> None:
        self.forget(rank)
        self._drop(rank, seen)
