"""Goodput of a job."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_g2.metrics.push_metric import PushMetric, Records, as_records, mean_or


class Goodput(PushMetric):
    """How many training samples reached the weights, per second and as a share of those that were computed on.

        rate  = samples of applied pushes / (last time - first time)
        share = samples of applied pushes / samples of all pushes

    A push that was damped counts as applied. Times are those of the server's clock: the last is that of the latest
    push, applied or not; the first is ``since_s`` where an update gave it, else that of the earliest push. The work
    behind the earliest push lies before it, so over n pushes and without ``since_s`` the rate comes out n/(n-1) times
    too high. States of replicas merge by first and last time: the rate is that of all of them together.

    Args:
        **kwargs: options of :class:`torchmetrics.Metric`.

    Returns:
        Of ``compute``: a dict of ``samples_per_s``, shape (), float32, samples per second, 0 where no time has passed;
        and ``applied_share``, shape (), float32, 0 to 1, dimensionless, 1 without a sample.
    """

    higher_is_better = True

    goodput_applied: Tensor
    goodput_samples: Tensor
    goodput_first_s: Tensor
    goodput_last_s: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_total("goodput_applied")
        self.add_total("goodput_samples")
        self.add_total("goodput_first_s", math.inf, reduce="min")
        self.add_total("goodput_last_s", -math.inf, reduce="max")

    def update(self, records: Records, since_s: float | None = None) -> None:
        """Take in one push or several.

        Args:
            records: the pushes.
            since_s: server time at which the work on them began, seconds; None: at the earliest push.
        """
        pushes = as_records(records)
        self.goodput_applied += sum(r.samples for r in pushes if r.applied)
        self.goodput_samples += sum(r.samples for r in pushes)
        times = [r.time_s for r in pushes]
        begun = times if since_s is None else [since_s, *times]
        self.goodput_first_s = torch.cat([self.column(begun), self.goodput_first_s.view(1)]).min()
        self.goodput_last_s = torch.cat([self.column(times), self.goodput_last_s.view(1)]).max()

    def compute(self) -> dict[str, Tensor]:
        """Rate and share over all pushes since the last reset."""
        span_s = self.goodput_last_s - self.goodput_first_s
        rate = torch.where(span_s > 0, self.goodput_applied / span_s.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        return {
            "samples_per_s": rate.float(),
            "applied_share": mean_or(self.goodput_applied, self.goodput_samples, 1.0),
        }
