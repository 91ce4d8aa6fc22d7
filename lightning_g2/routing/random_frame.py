"""The source's frame: a seeded linear sketch into g2, and the friction of its coordinates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_g2.algebra import fano_fisher_metric
from lightning_g2.routing.sketch import G2Sketch


class RandomFrame:
    """Energies of one push under c = S d and Ψ(θ, e_A), θ a sketch of the current weights, e_A = e_2.

    Works push by push: :meth:`begin`, then :meth:`energy` for each block, then :meth:`energy_of_push`. With several
    frames the energies are averaged. Nothing is stored between pushes.

    Args:
        seed: chooses the sketch.
        frames: number of independent sketches.

    Raises:
        ConfigurationError: ``frames`` is below 1.

    Source:
        doi:10.5281/zenodo.20077198.
    """

    def __init__(self, *, seed: int = 0, frames: int = 1) -> None:
        self._sketch = G2Sketch(seed=seed, frames=frames)
        self._metric = torch.zeros(frames, 14, 14)
        self._total = torch.zeros(frames, 14)

    def begin(self, weights: Mapping[str, Tensor] | None, like: Tensor) -> None:
        """Start a push: form the metric from the weights.

        Args:
            weights: current weights; None or empty gives the fallback direction of :meth:`G2Sketch.direction`.
            like: a tensor on the gradients' device.
        """
        vacuum = torch.zeros(7, device=like.device)
        vacuum[1] = 1.0
        theta = self._sketch.direction(weights or {}, vacuum)
        self._metric = fano_fisher_metric(theta, vacuum)
        self._total = torch.zeros(self._sketch.frames, 14, device=like.device)

    def energy(self, name: str, drift: Tensor) -> Tensor:
        """Friction of one block, and its share of the push's sum.

        Args:
            name: the block.
            drift: d, any shape, float32 or float64.

        Returns:
            E, shape (), 0 for a zero sketch; dimensionless.
        """
        coordinates = self._sketch.sketch(name, drift)
        self._total = self._total + coordinates.to(self._total)
        return self.frictions(coordinates).mean()

    def energy_of_push(self) -> Tensor:
        """Friction of the sum of all blocks' sketches, shape (); dimensionless."""
        return self.frictions(self._total).mean()

    def frictions(self, coordinates: Tensor) -> Tensor:
        """Friction of a sketch in each frame by itself, under the metric of the push.

        Args:
            coordinates: c = S d, shape (frames, 14), in any units.

        Returns:
            E, shape (frames,), 0 for a zero sketch; dimensionless.
        """
        unit = torch.nn.functional.normalize(coordinates, dim=-1)
        return torch.einsum("mi,mij,mj->m", unit, self._metric.to(unit), unit)
