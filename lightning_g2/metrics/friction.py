"""Friction of pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_g2.errors import ConfigurationError
from lightning_g2.metrics.push_metric import PushMetric, Records, as_records, mean_or

MAX_FRICTION = 8.0 / 3.0
"""Largest eigenvalue of the Fano-Fisher metric, and so the largest friction."""

_BINS = 1024


class Friction(PushMetric):
    """Mean friction E of the pushes that a gate has judged, and quantiles of it on request.

    A push rejected for NaN or Inf was never judged: it carries no friction and does not count. A push rejected by the
    gate's rule does.

    Quantiles come from a histogram of 1,024 bins over 0 to 8/3, so they are right to within a bin, 0.0026, in constant
    memory, and the states of replicas add up.

    Args:
        quantiles: which quantiles to give beside the mean, each 0 to 1.
        **kwargs: options of :class:`torchmetrics.Metric`.

    Returns:
        Of ``compute``: the mean, shape (), float32, 0 to 8/3, dimensionless; 0 without a judged push. With quantiles a
        dict of such values: ``friction_mean``, and ``friction_q50`` for the quantile 0.5.

    Raises:
        ConfigurationError: a quantile is out of range.
    """

    higher_is_better = False

    friction_sum: Tensor
    friction_count: Tensor
    friction_histogram: Tensor

    def __init__(self, quantiles: Sequence[float] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for quantile in quantiles:
            if not 0.0 <= quantile <= 1.0:
                raise ConfigurationError(f"quantiles={list(quantiles)}: each must be ≥ 0 and ≤ 1; 0.5 is the median")
        self.quantiles = tuple(quantiles)
        self.add_total("friction_sum")
        self.add_total("friction_count")
        if quantiles:
            self.add_total("friction_histogram", shape=(_BINS,))

    def update(self, records: Records) -> None:
        """Take in one push or several."""
        judged = [r.energy for r in as_records(records) if r.energy > 0.0 or not r.rejected]
        values = self.column(judged)
        self.friction_sum += values.sum()
        self.friction_count += len(judged)
        if self.quantiles:
            bins = (values / MAX_FRICTION * _BINS).long().clamp(0, _BINS - 1)
            self.friction_histogram += torch.bincount(bins, minlength=_BINS)

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Mean, or mean and quantiles, over all pushes since the last reset."""
        mean = mean_or(self.friction_sum, self.friction_count, 0.0)
        if not self.quantiles:
            return mean
        return {"friction_mean": mean, **{f"friction_q{100 * q:g}": self._quantile(q) for q in self.quantiles}}

    def _quantile(self, quantile: float) -> Tensor:
        """Middle of the first bin that brings the count to at least this share of all; 0 without a push."""
        filled = self.friction_histogram.cumsum(0)
        # The first push at least, so that the quantile 0 is the lowest bin in use, not the lowest of all.
        wanted = (quantile * filled[-1]).clamp(min=1.0)
        found = torch.searchsorted(filled, wanted).clamp(max=_BINS - 1)
        return torch.where(filled[-1] > 0, (found + 0.5) * MAX_FRICTION / _BINS, 0.0).float()
