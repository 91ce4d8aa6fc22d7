"""Sync points: where ranks wait for each other, and how a rank that cannot come holds nobody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

FINAL_POINT = "train_end"
"""The sync point after which a rank pushes no more."""


@dataclass
class Rendezvous:
    """Ranks that train, and those of them that wait at a sync point.

    Ranks are released together when all live ranks wait at the same point. When all wait but at different points (one
    has ended a trial of a finder early), nobody could ever come: those not at the final point are then released alone,
    to go on without collectives.
    """

    ranks: Iterable[int]
    _live: set[int] = field(init=False)
    _waiting: dict[int, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._live = set(self.ranks)

    @property
    def live(self) -> frozenset[int]:
        """Ranks that have not left."""
        return frozenset(self._live)

    def arrive(self, rank: int, point: str) -> dict[int, tuple[int, ...]]:
        """A rank waits at a point; returns the ranks now released, each with those released together with it."""
        self._waiting[rank] = point
        return self._release()

    def leave(self, rank: int) -> dict[int, tuple[int, ...]]:
        """A rank takes no further part; returns the ranks released by that."""
        self._live.discard(rank)
        self._waiting.pop(rank, None)
        return self._release()

    def _release(self) -> dict[int, tuple[int, ...]]:
        if not self._waiting or set(self._waiting) != self._live:
            return {}
        points = set(self._waiting.values())
        if len(points) == 1:
            together = tuple(sorted(self._waiting))
            released = dict.fromkeys(together, together)
        else:
            released = {rank: (rank,) for rank, point in self._waiting.items() if point != FINAL_POINT}
        for rank in released:
            del self._waiting[rank]
        return released
