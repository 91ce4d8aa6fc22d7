"""Which ranks are alive: from when they were heard of, and from what else shows that a silent one is at work."""

from __future__ import annotations

from dataclasses import dataclass

BEATS = 5
"""Heartbeats, and looks at them, in the time after which a silent rank is dropped."""


@dataclass
class _Rank:
    heard_s: float
    ticks: int | None = None


class Heartbeats:
    """Tells which ranks are silent for so long that the job shall go on without them.

    Being slow is not being dead: a rank whose interpreter is held up by a long call sends no heartbeat, and yet its
    process uses the processor. Where its processor time is known, each change of it counts as a heartbeat. When
    nobody has been heard of lately, nobody waits for anyone (a job stopped as a whole, from a terminal or with its
    host), and nobody is dropped.

    Args:
        timeout_s: silence after which a rank is dropped, seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.interval_s = timeout_s / BEATS
        self._ranks: dict[int, _Rank] = {}
        self._looked_s: float | None = None

    def beat(self, rank: int, *, time_s: float) -> None:
        """A rank was heard of; with the first time it is watched."""
        self._ranks.setdefault(rank, _Rank(time_s)).heard_s = time_s

    def used(self, rank: int, ticks: int | None, *, time_s: float) -> None:
        """Processor time that a rank's process has used since its start, in any unit; None where nobody knows."""
        watched = self._ranks.get(rank)
        if watched is None or ticks is None:
            return
        if watched.ticks is not None and ticks != watched.ticks:
            watched.heard_s = time_s
        watched.ticks = ticks

    def forget(self, rank: int) -> None:
        """A rank has left, or was dropped."""
        self._ranks.pop(rank, None)

    def silent(self, *, time_s: float) -> list[int]:
        """Ranks to be dropped now; to be called once in every :attr:`interval_s`.

        They are named early enough to be dropped within the timeout. A look that comes late says that whoever looks has
        been held up itself: the time it has missed does not count as anyone's silence.
        """
        if self._looked_s is not None:
            missed = time_s - self._looked_s - 2 * self.interval_s
            for watched in self._ranks.values() if missed > 0 else ():
                watched.heard_s = min(watched.heard_s + missed, time_s)
        self._looked_s = time_s
        silence = {rank: time_s - watched.heard_s for rank, watched in self._ranks.items()}
        if not silence or min(silence.values()) > 2 * self.interval_s:
            return []
        return [rank for rank, length in sorted(silence.items()) if length > self.timeout_s - self.interval_s]
