"""Learning rate capped by concurrency over staleness."""

from __future__ import annotations

from lightning_g2.routing.aged import AgedGate
from lightning_g2.routing.gate import GateContext


class ConcurrencyGate(AgedGate):
    """Makes updates smaller that are older than a round of all ranks: w = N/max(N, τ).

    With K pushes a version a round is N/K versions, and w = 1/max(1, x) with the age x = τK/N. Runs on the rank; needs
    no weights and keeps nothing: no memory.

    Source:
        K. Mishchenko, F. Bach, M. Even, B. Woodworth, "Asynchronous SGD beats minibatch SGD under arbitrary delays",
        NeurIPS 2022, arXiv:2206.07638; A. Koloskova, S. Stich, M. Jaggi, "Sharper convergence guarantees for
        asynchronous SGD for distributed and federated learning", NeurIPS 2022, arXiv:2206.08307.
    """

    def factor(self, context: GateContext) -> float:
        """See :meth:`AgedGate.factor`."""
        return 1.0 / max(1.0, context.age)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"concurrency ({self.scales})"
