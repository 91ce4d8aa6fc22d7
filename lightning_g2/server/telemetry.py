"""What a server remembers of the pushes it has taken in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lightning_g2.values import PushRecord, RankTotals

_KEPT_RECORDS = 100_000
"""Records kept between two reads; older ones are forgotten, so a job that never reads cannot grow."""


@dataclass
class _Sums:
    samples: int = 0
    pushes: int = 0
    rejected: int = 0
    late: int = 0
    late_samples: int = 0
    staleness: int = 0
    staleness_max: int = 0
    weight: float = 0.0
    bytes_sent: int = 0
    bytes_saved: int = 0


@dataclass
class Telemetry:
    """Push records since the last read, and totals by rank since the start."""

    _records: deque[PushRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_RECORDS))
    _sums: dict[int, _Sums] = field(default_factory=dict)
    _apply_s: dict[int, float] = field(default_factory=dict)

    def add(self, record: PushRecord) -> None:
        """Take in one record."""
        self._records.append(record)
        sums = self._sums.setdefault(record.rank, _Sums())
        if record.rejected:
            sums.rejected += 1
        elif record.late:
            sums.late += 1
            sums.late_samples += record.samples
        else:
            sums.samples += record.samples
            sums.pushes += 1
        sums.staleness += record.staleness
        sums.staleness_max = max(sums.staleness_max, record.staleness)
        sums.weight += record.weight
        sums.bytes_sent += record.bytes_sent
        sums.bytes_saved += record.bytes_saved

    def applied(self, rank: int, seconds: float) -> None:
        """Taking in the rank's latest push took so long."""
        self._apply_s[rank] = self._apply_s.get(rank, 0.0) + seconds

    def drain(self) -> list[PushRecord]:
        """The records since the last call, oldest first."""
        records = list(self._records)
        self._records.clear()
        return records

    def totals(self) -> dict[int, RankTotals]:
        """Totals by rank."""
        return {
            rank: RankTotals(
                samples=s.samples,
                pushes=s.pushes,
                rejected=s.rejected,
                staleness_mean=s.staleness / (s.pushes + s.rejected + s.late),
                staleness_max=s.staleness_max,
                weight_mean=s.weight / (s.pushes + s.rejected + s.late),
                late=s.late,
                late_samples=s.late_samples,
                bytes_sent=s.bytes_sent,
                bytes_saved=s.bytes_saved,
                apply_s=self._apply_s.get(rank, 0.0),
            )
            for rank, s in sorted(self._sums.items())
        }
