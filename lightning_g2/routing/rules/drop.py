"""Old pushes are not sent."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_g2.routing.gate import Gate, GateContext, rejection, unsound
from lightning_g2.routing.option import require
from lightning_g2.values import GateDecision


class DropGate(Gate):
    """Rejects a push with τ > R; passes others whole.

    Runs on the rank; needs no weights and keeps nothing: no memory.

    Args:
        limit: R in versions, ≥ 0; None takes 2N/K: two rounds of all ranks.

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        A. Maranjyan, A. Tyurin, P. Richtárik, "Ringmaster ASGD: the first asynchronous SGD with optimal time
        complexity", ICML 2025, arXiv:2501.16168.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        require(limit is None or limit >= 0, "limit", limit, "be ≥ 0", "None takes two rounds of all ranks")
        self.limit = limit

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Reject an old push, or one with NaN or Inf.

        Args:
            gradients: gradient of each block by name.
            context: staleness and concurrency.

        Returns:
            The decision, with the same tensors.
        """
        if reason := unsound(gradients):
            return rejection(gradients, reason)
        limit = 2 * context.concurrency / context.pushes_per_version if self.limit is None else self.limit
        if context.staleness > limit:
            return rejection(gradients, f"staleness {context.staleness} is above limit={limit:g}")
        return GateDecision(gradients)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"drop (τ > {'2N' if self.limit is None else self.limit})"
