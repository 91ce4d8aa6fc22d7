"""Openness of the gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_g2.metrics.push_metric import PushMetric, Records, as_records, mean_or


class Openness(PushMetric):
    """Mean weight that the gate gave to pushes; a rejected push counts with 0.

    Args:
        stale_only: count only pushes of staleness τ > 0. Fresh ones always pass, so they hide what the gate does.
        **kwargs: options of :class:`torchmetrics.Metric`.

    Returns:
        Of ``compute``: the mean, shape (), float32, 0 (closed) to 1 (open), dimensionless; 1 without a push.
    """

    higher_is_better = True

    def __init__(self, stale_only: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stale_only = stale_only
        prefix = "stale_openness" if stale_only else "openness"
        self._sum, self._count = f"{prefix}_sum", f"{prefix}_count"
        self.add_total(self._sum)
        self.add_total(self._count)

    def update(self, records: Records) -> None:
        """Take in one push or several."""
        counted = [r for r in as_records(records) if r.staleness > 0 or not self.stale_only]
        weights = self.column([0.0 if r.rejected else r.weight for r in counted])
        setattr(self, self._sum, getattr(self, self._sum) + weights.sum())
        setattr(self, self._count, getattr(self, self._count) + len(counted))

    def compute(self) -> Tensor:
        """Mean weight over all counted pushes since the last reset."""
        return mean_or(getattr(self, self._sum), getattr(self, self._count), 1.0)
