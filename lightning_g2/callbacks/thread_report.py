"""What forward and backward threads do, as tags of a logger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_g2.decoupled import RunReport


class ThreadReport:
    """Scalars and histograms of one rank's threads.

    ``g2/threads/peak_graphs``: most batches at once between the start of their forward and the end of their backward
    pass; ``mixed_reads``: share of forward passes that read two or more versions; ``forward_utilisation`` and
    ``backward_utilisation``: share of their time that threads were at work; ``age_mean`` and ``lag_mean``; all since
    the start of the fit. Histograms ``age/<layer>`` and ``lag/<layer>`` over the layer's updates since the last entry:
    versions of the layer between reading and updating it, and what of that lies in the backward pass.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Counter[int]] = {}

    def scalars(self, report: RunReport) -> dict[str, float]:
        """Value by tag.

        Args:
            report: of the threads.
        """
        values = {
            "peak_graphs": report.peak_graphs, "mixed_reads": report.mixed_reads, "age_mean": report.age_mean,
            "lag_mean": report.lag_mean, "forward_utilisation": report.utilisation("forward"),
            "backward_utilisation": report.utilisation("backward"),
        }  # fmt: skip
        return {f"g2/threads/{name}": float(value) for name, value in values.items()}

    def histograms(self, report: RunReport) -> dict[str, Tensor]:
        """Versions of each update since the last call, float32, by tag; layers without any are left out."""
        return self._new("age", report.ages()) | self._new("lag", report.lags())

    def _new(self, kind: str, counts: Mapping[str, Counter[int]]) -> dict[str, Tensor]:
        new: dict[str, Tensor] = {}
        for layer, counter in counts.items():
            tag, now = f"g2/threads/{kind}/{layer or 'module'}", Counter(dict(counter))
            fresh = now - self._seen.get(tag, Counter())
            self._seen[tag] = now
            if fresh:
                new[tag] = torch.tensor(list(fresh.elements()), dtype=torch.float32)
        return new
