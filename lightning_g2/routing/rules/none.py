"""No gate: every finite push passes whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lightning_g2.routing.gate import Gate, GateContext, rejection, unsound
from lightning_g2.values import GateDecision


class NoneGate(Gate):
    """Passes every push with weight 1 and energy 0; rejects NaN and Inf.

    Source:
        B. Recht et al., "Hogwild!" (2011): asynchronous updates applied as they come.
    """

    needs_view: ClassVar[bool] = False

    @property
    def blockwise(self) -> bool:
        """See :attr:`Gate.blockwise`."""
        return True

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return "none"

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Pass the push, unless it holds NaN or Inf.

        Args:
            gradients: gradient of each block by name.
            context: not used.

        Returns:
            The decision, with the same tensors.
        """
        reason = unsound(gradients)
        return rejection(gradients, reason) if reason else GateDecision(gradients)
