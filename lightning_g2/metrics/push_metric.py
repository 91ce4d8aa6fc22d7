"""What the metrics of pushes have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_g2.values import PushRecord

Records = PushRecord | Sequence[PushRecord]


class PushMetric(Metric):
    """A metric whose states are totals over pushes.

    Totals are kept in float64: a float32 sum stops growing after 2²⁴ pushes, and a server's clock in float32 is
    good to a tenth of a second only. Names of states are told apart by metric, since a ``MetricCollection`` merges
    metrics whose states look alike after the first update.
    """

    is_differentiable = False
    full_state_update = False

    def add_total(self, name: str, start: float = 0.0, *, reduce: str = "sum", shape: tuple[int, ...] = ()) -> None:
        """Add a state of one value in every place.

        Args:
            name: attribute that holds it.
            start: value before the first push.
            reduce: how the states of replicas are merged: ``"sum"``, ``"min"`` or ``"max"``.
            shape: its shape.
        """
        self.add_state(name, torch.full(shape, start, dtype=torch.float64), dist_reduce_fx=reduce)

    def column(self, values: Sequence[float]) -> Tensor:
        """Values of several pushes, shape (pushes,), float64, on the metric's device."""
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def as_records(records: Records) -> Sequence[PushRecord]:
    """One record or many, as a sequence."""
    return [records] if isinstance(records, PushRecord) else records


def mean_or(total: Tensor, count: Tensor, default: float) -> Tensor:
    """Mean of what was counted, or a default where nothing was.

    Args:
        total: sum of the values, shape (), float64.
        count: their number, shape (), float64.
        default: the result for a count of 0.

    Returns:
        Mean, shape (), float32.
    """
    return torch.where(count > 0, total / count.clamp(min=1.0), default).float()
