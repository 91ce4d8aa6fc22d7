"""Gradients that travel in a smaller dtype, with error feedback: what rounding takes from one push the next one brings.

Source:
    F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of
    speech DNNs" (2014); S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes"
    (2019).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_g2.routing.gate import magnitude, to_host
from lightning_g2.server import power_of_two, travel_dtype, widened


class ErrorFeedback:
    """Rounds gradients to a wire dtype and keeps, per parameter, what the server has not received.

        c_t = g_t + e_{t-1};   sent_t = round(c_t);   e_t = c_t - sent_t

    so that the sum of what was sent is the sum of all g_t less the residual e_T, up to the rounding of the addition
    itself in the gradient's own dtype. g_t is what the gate lets through: what it damps is not made up for, and a
    rejected push neither sends the residual nor changes it. Dense real floating gradients of a dtype larger than the
    wire's are rounded; complex, integer and sparse ones travel as they are, and so do smaller ones.

    Residuals lie on the gradient's device in its dtype: as much memory as the gradients that are rounded. They are
    less than one step of the wire dtype, belong to one fit, and are in no checkpoint.

    Args:
        wire: the dtype; None rounds nothing and keeps nothing.
    """

    def __init__(self, wire: torch.dtype | None) -> None:
        self.wire = wire
        self._residuals: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Forget all residuals."""
        self._residuals = {}

    def narrow(self, gradients: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Round the gradients of a push that is sent.

        Args:
            gradients: finite gradients by parameter; not written to.

        Returns:
            What travels, by parameter in the same order; and, where a gradient travels multiplied by a power of two,
            its exponent, see :func:`~lightning_g2.server.power_of_two`.
        """
        sent = dict(gradients)
        if self.wire is None:
            return sent, {}
        corrected = {i: self._corrected(i, g) for i, g in gradients.items() if self._shrinks(g)}
        sizes = to_host([_largest(c) for c in corrected.values()])
        exponents: dict[int, int] = {}
        for (i, c), size in zip(corrected.items(), sizes, strict=True):
            exponent = power_of_two(size, c.dtype, self.wire)
            sent[i] = (c * 2.0**exponent if exponent else c).to(self.wire)
            self._residuals[i] = c - widened(sent[i], c.dtype, exponent)
            if exponent:
                exponents[i] = exponent
        return sent, exponents

    def _shrinks(self, gradient: Tensor) -> bool:
        dense = gradient.layout == torch.strided and gradient.numel() > 0
        return dense and travel_dtype(gradient.dtype, self.wire) != gradient.dtype

    def _corrected(self, index: int, gradient: Tensor) -> Tensor:
        residual = self._residuals.get(index)
        if residual is None or residual.shape != gradient.shape:
            return gradient.detach()
        return gradient.detach() + residual.to(gradient)


def _largest(tensor: Tensor) -> Tensor:
    largest = magnitude(tensor)
    assert largest is not None  # it is floating and not empty
    return largest
