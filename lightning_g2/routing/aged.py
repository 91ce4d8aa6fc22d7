"""Rules that make an update smaller the older its gradient is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from lightning_g2.routing.gate import Gate, GateContext, rejection, unsound
from lightning_g2.routing.option import require_choice
from lightning_g2.values import GateDecision

Target = Literal["gradient", "lr"]


class AgedGate(Gate):
    """Multiplies every push by a factor of its age.

    The rules are published for plain SGD, where it is all one whether the gradient or the learning rate is multiplied.
    Under momentum it is not, and Adam undoes most of what is done to a gradient: there ``scales="lr"`` makes the step
    itself smaller.

    Args:
        scales: what is multiplied, the gradient or the learning rate of this one update.
    """

    def __init__(self, *, scales: Target = "gradient") -> None:
        require_choice("scales", scales, ("gradient", "lr"))
        self.scales = scales

    @abstractmethod
    def factor(self, context: GateContext) -> float:
        """The factor, in [0, 1].

        Args:
            context: gives staleness, concurrency and pushes per version.
        """

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Scale the push, unless it holds NaN or Inf.

        Args:
            gradients: gradient of each block by name.
            context: staleness and concurrency.

        Returns:
            The decision; energy 0, weight is the factor.
        """
        if reason := unsound(gradients):
            return rejection(gradients, reason)
        factor = self.factor(context)
        if factor == 1.0:
            return GateDecision(gradients)
        if self.scales == "lr":
            return GateDecision(gradients, weight=factor, lr_factor=factor)
        scaled = {n: g * factor if g.dtype.is_floating_point or g.is_complex() else g for n, g in gradients.items()}
        return GateDecision(scaled, weight=factor)
