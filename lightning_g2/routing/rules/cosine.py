"""Gibbs weights on the cosine distance to the rank's own mean gradient: the control for what friction claims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_g2.algebra.fano_fisher import MAXIMUM_ENERGY
from lightning_g2.routing.gate import Gate, GateContext, is_filterable, read_push, rejection
from lightning_g2.routing.mge import vacuum_weight
from lightning_g2.routing.option import require, require_within
from lightning_g2.values import GateDecision


class CosineGate(Gate):
    """Weighs the whole push by the direction it has beside the rank's own gradient EMA r.

        E = (4/3)·(1 - <g, r>/(|g||r|)),   0 ≤ E ≤ 8/3,   w by :func:`vacuum_weight` of Ê = E·x over the window

    The same weight rule, range and reference as the g2 gate, with a cosine where that has friction; E = 0 on a rank's
    first push. Runs on the rank; needs no weights. Memory: one float32 a parameter for r. Blocks that are not dense,
    real and floating count for nothing in E and pass whole.

    Args:
        beta: inverse temperature ≥ 0; 0 turns the gate off.
        reference_decay: decay of r per push, in [0, 1).

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        N. Su, B. Li, "How asynchronous can federated learning be?", IWQoS 2022, weighs stale updates by their cosine;
        doi:10.5281/zenodo.20077198 for Gibbs weights.
    """

    def __init__(self, *, beta: float = 2.0, reference_decay: float = 0.9) -> None:
        require_within("beta", beta, 0.0, math.inf, "0 turns the gate off")
        require(0.0 <= reference_decay < 1.0, "reference_decay", reference_decay, "lie in [0, 1)", "0.9 is the default")
        self.beta, self.reference_decay = beta, reference_decay
        self._references: dict[str, Tensor] = {}

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Weigh the whole push.

        Args:
            gradients: gradient of each block by name.
            context: staleness and window.

        Returns:
            The decision.
        """
        with torch.no_grad():
            wide = {n: g if g.dtype == torch.float64 else g.float() for n, g in gradients.items() if is_filterable(g)}
            products = self._products(wide)
            reason, read = read_push(gradients, products)
            if reason:
                return rejection(gradients, reason)
            energy = _energy(read[0::3], read[1::3], read[2::3])
            self._follow(wide)
            weight = self._weight(energy, context)
            if weight == 1.0:
                return GateDecision(gradients, energy=energy)
            scaled = {n: g * weight if n in wide else g for n, g in gradients.items()}
            return GateDecision(scaled, energy=energy, weight=weight)

    def _products(self, wide: Mapping[str, Tensor]) -> list[Tensor]:
        """<g, r>, |g|² and |r|² of each block, in float64."""
        products: list[Tensor] = []
        for name, gradient in wide.items():
            reference = self._references.get(name)
            flat = gradient.flatten().double()
            other = torch.zeros_like(flat) if reference is None else reference.to(flat).flatten()
            products += [flat @ other, flat @ flat, other @ other]
        return products

    def _weight(self, energy: float, context: GateContext) -> float:
        if context.age == 0.0:
            return 1.0
        others = [value for rank, value in context.window.items() if rank != context.rank]
        return vacuum_weight(energy * context.age, others, self.beta)

    def _follow(self, wide: Mapping[str, Tensor]) -> None:
        share = 1.0 - self.reference_decay
        for name, gradient in wide.items():
            before = self._references.get(name)
            self._references[name] = (
                gradient * share if before is None else torch.lerp(before.to(gradient), gradient, share)
            )

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"cosine (β={self.beta:g})"

    def state_dict(self) -> dict[str, Any]:
        """References of this rank."""
        return {"references": dict(self._references)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """
        self._references = {name: reference.clone() for name, reference in state["references"].items()}


def _energy(dots: list[float], gradients: list[float], references: list[float]) -> float:
    norms = math.sqrt(sum(gradients)) * math.sqrt(sum(references))
    if norms == 0.0:
        return 0.0
    cosine = max(-1.0, min(1.0, sum(dots) / norms))
    return MAXIMUM_ENERGY * (1.0 - cosine) / 2.0
