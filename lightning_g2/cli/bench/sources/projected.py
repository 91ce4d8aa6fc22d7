"""Gates that see a drift through m random frames, or as it is: what the projection itself costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_g2.algebra.fano_fisher import MAXIMUM_ENERGY
from lightning_g2.routing.option import require, require_choice
from lightning_g2.routing.random_frame import RandomFrame
from lightning_g2.routing.registry import available_gates, register_gate
from lightning_g2.routing.rules.g2 import G2Gate
from lightning_g2.routing.sketch import G2Sketch

Energy = Literal["friction", "norm"]
FRICTION_LIMIT = 4 * MAXIMUM_ENERGY / 14
"""16/21: the friction of any drift averaged over all frames, Ψ's trace over its 14 directions."""

NAME = "projected"
_DECAY = 0.9995


class ProjectedGate(G2Gate):
    """The sources' scalar gate on an energy that is estimated in 14·frames dimensions, or exact.

    - ``energy="friction"``: the friction of the push's sketch, averaged over the frames. Over all frames it is 16/21
      for every drift: a random frame is as likely to turn any direction into any other.
    - ``energy="norm"``: drift energy, (8/3)·|d|²/max|d|², |d|² estimated by the mean of |S d|² over the frames, the
      maximum over the rank's own pushes (decay 0.9995 a push).

    Runs on the rank; ``friction`` needs current weights. Memory: one float32 a parameter.

    Args:
        energy: see above.
        frames: m ≥ 1, or 0 for the exact energy.
        beta: inverse temperature ≥ 0.
        seed: of the sketches.

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        doi:10.5281/zenodo.20077198 for the gate with one frame.
    """

    def __init__(self, *, energy: Energy = "friction", frames: int = 1, beta: float = 4.0, seed: int = 0) -> None:
        require_choice("energy", energy, ("friction", "norm"))
        require(frames >= 0, "frames", frames, "be ≥ 0", "0 takes the exact energy")
        options: dict[str, Any] = {"weight_rule": "relative", "action": "scalar", "scale": "unit", "frame": "random"}
        super().__init__(beta=beta, seed=seed, frames=max(1, frames), **options)
        if energy == "norm":
            self._random = _NormFrame(seed=seed, frames=frames)
        elif frames == 0:
            self._random = _AllFrames()


class _AllFrames(RandomFrame):
    """The mean over all frames, which is the same for every drift but zero."""

    def begin(self, weights: Mapping[str, Tensor] | None, like: Tensor) -> None:
        """See :meth:`RandomFrame.begin`."""
        self._square = torch.zeros((), dtype=torch.float64, device=like.device)

    def energy(self, name: str, drift: Tensor) -> Tensor:
        """See :meth:`RandomFrame.energy`."""
        square = drift.double().square().sum()
        self._square = self._square + square
        return self._limit(square)

    def energy_of_push(self) -> Tensor:
        """See :meth:`RandomFrame.energy_of_push`."""
        return self._limit(self._square)

    @staticmethod
    def _limit(square: Tensor) -> Tensor:
        return torch.where(square > 0.0, FRICTION_LIMIT, 0.0)


class _NormFrame(RandomFrame):
    """|d|² relative to the largest so far, from a sketch or exact."""

    def __init__(self, *, seed: int, frames: int) -> None:
        super().__init__(seed=seed, frames=max(1, frames))
        self._exact = frames == 0
        self._largest = torch.zeros((), dtype=torch.float64)

    def begin(self, weights: Mapping[str, Tensor] | None, like: Tensor) -> None:
        """See :meth:`RandomFrame.begin`."""
        self._total = torch.zeros(self._sketch.frames, 14, device=like.device, dtype=torch.float64)
        self._square = torch.zeros((), device=like.device, dtype=torch.float64)

    def energy(self, name: str, drift: Tensor) -> Tensor:
        """See :meth:`RandomFrame.energy`; blocks are not judged one by one."""
        if self._exact:
            self._square = self._square + drift.double().square().sum()
        else:
            self._total = self._total + self._sketch.sketch(name, drift).double()
        return self._square.new_zeros(())

    def energy_of_push(self) -> Tensor:
        """See :meth:`RandomFrame.energy_of_push`."""
        square = self._square if self._exact else drift_energies(self._total).mean()
        self._largest = torch.maximum(_DECAY * self._largest.to(square), square)
        return MAXIMUM_ENERGY * square / self._largest.clamp_min(torch.finfo(square.dtype).tiny)


def drift_energies(coordinates: Tensor) -> Tensor:
    """|S d|² of each frame: unbiased for |d|².

    Args:
        coordinates: S d, shape (frames, 14).

    Returns:
        Shape (frames,).
    """
    return coordinates.square().sum(dim=-1)


def readings(
    drift: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, frames: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """What many frames make of one drift.

    Args:
        drift: by block, on one device.
        weights: by block, which turn the metric.
        frames: number of independent frames.
        seed: of the frames.

    Returns:
        Friction of each, shape (frames,), and |S d|²/|d|² of each, shape (frames,).
    """
    frame, coordinates = RandomFrame(seed=seed, frames=frames), G2Sketch(seed=seed, frames=frames).sketch_all(drift)
    frame.begin(weights, coordinates)
    exact = sum(float(block.double().square().sum()) for block in drift.values())
    squares = drift_energies(coordinates) / max(exact, torch.finfo(torch.float64).tiny)
    return frame.frictions(coordinates).double(), squares.double()


def register() -> None:
    """Make the gate known by name, for rules on a command line."""
    if NAME not in available_gates():
        register_gate(NAME, ProjectedGate)
