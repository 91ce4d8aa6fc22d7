"""Who arrives when: ranks in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from lightning_g2.routing import Gate
from lightning_g2.server import TraceWriter
from lightning_g2.simulate.delay import Delays, rank_stream
from lightning_g2.simulate.job import Gradient, Job, gradient_seed
from lightning_g2.simulate.trace import entry_of


class Clock:
    """Lets ranks begin, read and arrive in the order of simulated time; ties go by rank.

    Args:
        job: the job.
        delays: how long gradients take.
        seed: of durations and of each gradient's randomness.
        schedule: factor of the learning rate by the fraction of the run that is done.
        pushes: end after so many; None for any number.
        time_limit: end before the first arrival after it; None for none.
        writer: takes what is recorded; None for nothing.
    """

    def __init__(
        self,
        job: Job,
        delays: Delays,
        *,
        seed: int,
        schedule: Callable[[float], float] | None,
        pushes: int | None,
        time_limit: float | None,
        writer: TraceWriter | None,
    ) -> None:
        self._job, self._delays, self._seed, self._schedule = job, delays, seed, schedule
        self._pushes, self._time_limit, self._writer = pushes, time_limit, writer
        self._random = {rank: rank_stream(seed, rank) for rank in range(job.ranks)}
        self._events: list[tuple[float, int, int]] = []  # time, rank, groups of blocks read before
        self._under_way: dict[int, Gradient] = {}
        self._waiting: dict[int, float] = {}  # for the gate's word, since when
        self._in_round: dict[int, float] = {}  # for their round to end, since when
        self._waits = type(job.gate(0)).may_begin is not Gate.may_begin
        self._begun = [0] * job.ranks
        self._number = 0
        self.waited = [0.0] * job.ranks

    def run(self, fractions: list[float]) -> None:
        """Run to the end.

        Args:
            fractions: when each group of blocks is read, as fractions of the gradient's duration, ascending from 0.
        """
        for rank in range(self._job.ranks):
            self._begin(rank, 0.0, fractions)
        time = 0.0
        while self._pushes is None or self._job.count < self._pushes:
            if not self._events:  # all wait: for slower ranks, or for a round that nobody can join
                self._job.close_rounds(self._waiting, time)
                if not self._go_on(time, fractions):
                    break
                continue
            time, rank, read = heapq.heappop(self._events)
            if self._time_limit is not None and time > self._time_limit:
                break
            if read < len(fractions):
                under_way = self._under_way[rank]
                versions = (*under_way.versions, self._job.versions.hold())
                self._under_way[rank] = replace(under_way, versions=versions)
                continue
            gradient = self._under_way.pop(rank)
            decision, receipt = self._job.arrive(gradient, time)
            if self._writer is not None:
                self._writer.write(entry_of(gradient, decision, receipt, time, viewed=self._job.count - 1))
            (self._in_round if receipt.waits else self._waiting)[rank] = time
            self._go_on(time, fractions)

    def _go_on(self, time: float, fractions: list[float]) -> bool:
        """Let those begin whose round has ended and whose gates let them, in order of rank; whether there were any."""
        for rank in self._job.released():
            if rank in self._in_round:
                self._waiting[rank] = self._in_round.pop(rank)
        begun = len(self._events)
        counts = [self._job.pushed(rank) for rank in range(self._job.ranks)] if self._waits else []
        for rank in sorted(self._waiting):
            lead = counts[rank] - min(counts) if self._waits else 0
            if self._job.gate(rank).may_begin(lead):
                self.waited[rank] += time - self._waiting.pop(rank)
                self._begin(rank, time, fractions)
        return len(self._events) > begun

    def _begin(self, rank: int, time: float, fractions: list[float]) -> None:
        k = self._begun[rank]
        self._job.begin(rank, time)
        self._under_way[rank] = Gradient(
            rank=rank,
            k=k,
            number=self._number,
            read=self._job.count,
            versions=(self._job.versions.hold(),),
            lr_factor=1.0 if self._schedule is None else float(self._schedule(self._fraction(time))),
            seed=gradient_seed(self._seed, rank, k),
        )
        self._begun[rank], self._number = k + 1, self._number + 1
        duration = self._delays.duration(rank, self._job.ranks, self._random[rank])
        for group, fraction in enumerate((*fractions[1:], 1.0), start=1):
            heapq.heappush(self._events, (time + fraction * duration, rank, group))

    def _fraction(self, time: float) -> float:
        by_pushes = 0.0 if self._pushes is None else self._job.count / self._pushes
        by_time = 0.0 if self._time_limit is None else time / self._time_limit
        return min(1.0, max(by_pushes, by_time))
