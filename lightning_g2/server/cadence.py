"""``rounds="auto"``: which size of rounds, or asynchrony, the measured times of arrival speak for.

A way to gather pushes is judged by its expected pace, in effective versions a second:

    pace = u / (k + c·s + noise)

with u the pushes a second that count, k the pushes of a version, s the mean age of those pushes in pushes (staleness
times k), c the cost of that age, and the noise of a gradient in pushes. A mean of k fresh gradients is k times the work
for one step, which pays as long as k lies below the gradient's noise; N ranks that never wait have s = N - 1, whatever
their speeds. With c = 1 the divisor grows as the known bounds do on steps with mini-batches and with mean delays (arXiv
2206.08307, 2501.16168). What c is under momentum and a gate was measured: docs/decisions/2026-12-01-rounds-auto.md.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_g2.routing.option import require_within
from lightning_g2.values import Late, RoundsChoice

_KEPT = 8
"""Latest times kept of each rank."""

_REPLAYED = 32
"""Versions over which a size of rounds is tried on the measured times."""

_SIZES = 16
"""Sizes of rounds that are tried: all of them up to so many ranks."""

_MARGIN = 1.05
"""How much better another way has to look before it takes the place of the one in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What the expected pace takes for granted.

    Attributes:
        staleness_cost: c, see the module; 0 makes asynchrony as good as its throughput.
        noise: of a gradient, in pushes, beyond which more of them in a mean do not help.
    """

    staleness_cost: float = 1.0
    noise: float = 0.5

    def __post_init__(self) -> None:
        require_within("staleness_cost", self.staleness_cost, 0.0, math.inf, "1 counts age like size, 0 not at all")

    def pace(self, pushes_per_s: float, per_version: int, age: float) -> float:
        """Effective versions a second.

        Args:
            pushes_per_s: that count.
            per_version: pushes of a version.
            age: mean age of those that count, in pushes.
        """
        return pushes_per_s / (per_version + self.staleness_cost * age + self.noise)


def staleness_cost_of(optimizers: Iterable[Optimizer], gate_cost: float) -> float:
    """What a push's age costs under these optimizers and this gate.

    Momentum repeats a stale step 1/(1-β) times in all, unless each step is normalised by its own size (Adam).

    Args:
        optimizers: the module's.
        gate_cost: :attr:`lightning_g2.routing.Gate.staleness_cost`.
    """
    momenta = [float(g.get("momentum") or 0.0) for optimizer in optimizers for g in optimizer.param_groups]
    return gate_cost / (1.0 - min(max(momenta, default=0.0), 0.99))


class Cadence:
    """Measures how long each rank takes for a push, and decides from time to time how pushes are gathered.

    Args:
        criterion: judges.
        aggregate: K, pushes of a version where there are no rounds.
        late: what becomes of late pushes in rounds.
        kept: what :meth:`state_dict` gave in an earlier training.
    """

    def __init__(
        self, criterion: Criterion, *, aggregate: int, late: Late, kept: Mapping[str, Any] | None = None
    ) -> None:
        self._criterion, self._aggregate, self._late = criterion, aggregate, late
        self._times: dict[int, deque[float]] = {}
        self._begun: dict[int, float] = {}
        self._arrivals = 0  # since the last decision
        self._decided = kept is not None and kept["decided"]
        for rank, times in ({} if kept is None else kept["times"]).items():
            self._times[rank] = deque(times, maxlen=_KEPT)

    def first(self, ranks: int) -> int | None:
        """How pushes are gathered before anything is known: early on stale gradients do the most harm.

        Args:
            ranks: number of ranks.

        Returns:
            Half of them for rounds; None, no rounds, where age costs little.
        """
        return max(2, (ranks + 1) // 2) if ranks > 1 and self._criterion.staleness_cost >= 1.0 else None

    def begin(self, rank: int, time_s: float) -> None:
        """A rank begins to compute: it has been given weights, or a window of batches."""
        self._begun[rank] = time_s

    def arrive(self, rank: int, time_s: float) -> None:
        """A rank's push has come; its first of all, in which much is done once, is not measured."""
        self._arrivals += 1
        begun = self._begun.pop(rank, None)
        if rank not in self._times:
            self._times[rank] = deque(maxlen=_KEPT)
        elif begun is not None:
            self._times[rank].append(time_s - begun)

    def pause(self, rank: int) -> None:
        """A rank waits for a window, or at a sync point: that is not measured."""
        self._begun.pop(rank, None)

    def leave(self, rank: int) -> None:
        """A rank takes no further part."""
        self._times.pop(rank, None)
        self._begun.pop(rank, None)

    def due(self, live: Collection[int], *, meeting: bool = False) -> bool:
        """Whether enough has come since the last decision for the next: more, unless all ranks meet anyway."""
        least = 3 * len(live)
        return self._arrivals >= (max(32, 8 * len(live)) if self._decided and not meeting else least)

    def decide(self, live: Collection[int], rounds: int | None, *, version: int, time_s: float) -> RoundsChoice | None:
        """Choose; None where nothing is known yet.

        Args:
            live: ranks that take part. Those of which no time is known count as absent.
            rounds: what is in force.
            version: current version.
            time_s: now. A rank that has been at it for longer than it usually takes is taken to need that long.
        """
        self._arrivals = 0
        times = {rank: known for rank in sorted(live) if (known := self._known(rank, time_s))}
        if not times or max(map(max, times.values())) <= 0.0:
            return None
        ranks = len(times)
        throughput = sum(len(known) / sum(known) for known in times.values() if sum(known) > 0.0)
        asynchronous = self._criterion.pace(throughput, min(self._aggregate, ranks), ranks - 1.0)
        paces = {m: self._pace(times, m) for m in _sizes(ranks)} if ranks > 1 else {1: asynchronous}
        best = max(paces, key=paces.__getitem__)
        chosen = best if paces[best] > asynchronous else None
        if self._decided and ranks > 1:  # keep to it, unless another is clearly better
            kept = rounds if rounds is None else min(rounds, ranks)
            in_force = asynchronous if kept is None else paces.get(kept, 0.0)
            chosen = chosen if max(paces[best], asynchronous) > _MARGIN * in_force else kept
        self._decided = True
        cost = self._criterion.staleness_cost
        return RoundsChoice(version, chosen, asynchronous, best, paces[best], ranks, cost)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"decided": self._decided, "times": {rank: list(times) for rank, times in self._times.items()}}

    def _known(self, rank: int, time_s: float) -> list[float]:
        known = list(self._times.get(rank, ()))
        if rank in self._begun:
            elapsed = time_s - self._begun[rank]
            if not known or elapsed > sum(known) / len(known):
                known.append(elapsed)
        return known

    def _pace(self, times: Mapping[int, Sequence[float]], m: int) -> float:
        pushes_per_s, age = replayed(times, m, self._late)
        return self._criterion.pace(pushes_per_s, m, age)


def replayed(times: Mapping[int, Sequence[float]], m: int, late: Late) -> tuple[float, float]:
    """What rounds of m would have made of measured times.

    Args:
        times: how long each rank's pushes took, repeated as often as need be.
        m: pushes that end a round.
        late: what becomes of late ones.

    Returns:
        Pushes a second that count, and their mean age in pushes.
    """
    taken = dict.fromkeys(times, 0)
    under_way: list[tuple[float, int, int]] = []  # time of arrival, rank, version of its weights

    def begin(rank: int, time_s: float, version: int) -> None:
        series = times[rank]
        heapq.heappush(under_way, (time_s + series[taken[rank] % len(series)], rank, version))
        taken[rank] += 1

    for rank in times:
        begin(rank, 0.0, 0)
    version = count = age = 0
    time_s = 0.0
    ready: list[int] = []
    while version < _REPLAYED:
        time_s, rank, base = heapq.heappop(under_way)
        is_late = base < version
        if not (is_late and late == "drop"):
            count, age = count + 1, age + version - base
        released = [rank] if is_late else []
        ready += [] if is_late else [rank]
        if count == m:
            version, count, released, ready = version + 1, 0, [*released, *ready], []
        for each in released:
            begin(each, time_s, version)
    return m * version / time_s if time_s > 0.0 else 0.0, age / version


def _sizes(ranks: int) -> list[int]:
    """Sizes of rounds to try: all, or some that grow by equal factors."""
    if ranks <= _SIZES:
        return list(range(1, ranks + 1))
    return sorted({round(ranks ** (i / (_SIZES - 1))) for i in range(_SIZES)})
