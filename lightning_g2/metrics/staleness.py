"""Staleness of pushes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_g2.metrics.push_metric import PushMetric, Records, as_records, mean_or


class Staleness(PushMetric):
    """Mean and maximum staleness τ: versions that were applied between a push's base and the push itself.

    Rejected pushes count, with the age at which they came.

    Args:
        **kwargs: options of :class:`torchmetrics.Metric`.

    Returns:
        Of ``compute``: a dict of ``staleness_mean`` and ``staleness_max``, each of shape (), float32, in versions;
        both 0 without a push.
    """

    higher_is_better = False

    staleness_sum: Tensor
    staleness_count: Tensor
    staleness_peak: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_total("staleness_sum")
        self.add_total("staleness_count")
        self.add_total("staleness_peak", reduce="max")

    def update(self, records: Records) -> None:
        """Take in one push or several."""
        ages = self.column([r.staleness for r in as_records(records)])
        self.staleness_sum += ages.sum()
        self.staleness_count += ages.numel()
        self.staleness_peak = torch.cat([ages, self.staleness_peak.view(1)]).max()

    def compute(self) -> dict[str, Tensor]:
        """Mean and maximum over all pushes since the last reset."""
        return {
            "staleness_mean": mean_or(self.staleness_sum, self.staleness_count, 0.0),
            "staleness_max": self.staleness_peak.float(),
        }
