"""Polynomial damping by staleness."""

from __future__ import annotations

import math

from lightning_g2.routing.aged import AgedGate, Target
from lightning_g2.routing.gate import GateContext
from lightning_g2.routing.option import require_within


class PolynomialGate(AgedGate):
    """Multiplies an update by w = (1 + τ)^-a.

    Runs on the rank; needs no weights and keeps nothing: no memory. (The source mixes models by this factor; of
    gradients it makes the same rule.)

    Args:
        exponent: a ≥ 0; 0 turns the rule off.
        scales: see :class:`AgedGate`.

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        C. Xie, S. Koyejo, I. Gupta, "Asynchronous federated optimization" (FedAsync), 2019, arXiv:1903.03934.
    """

    def __init__(self, *, exponent: float = 0.5, scales: Target = "gradient") -> None:
        super().__init__(scales=scales)
        require_within("exponent", exponent, 0.0, math.inf, "0 turns the rule off")
        self.exponent = exponent

    def factor(self, context: GateContext) -> float:
        """See :meth:`AgedGate.factor`."""
        return float((1 + max(0, context.staleness)) ** -self.exponent)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"polynomial (a={self.exponent:g}, {self.scales})"
