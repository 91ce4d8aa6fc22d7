"""Learning rate over staleness."""

from __future__ import annotations

from lightning_g2.routing.aged import AgedGate
from lightning_g2.routing.gate import GateContext


class InverseGate(AgedGate):
    """Divides an update by its staleness: w = 1/max(1, τ).

    Runs on the rank; needs no weights and keeps nothing: no memory.

    Source:
        W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016,
        arXiv:1511.05950.
    """

    def factor(self, context: GateContext) -> float:
        """See :meth:`AgedGate.factor`."""
        return 1.0 / max(1, context.staleness)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"inverse ({self.scales})"
