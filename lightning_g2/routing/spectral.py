"""Spectral frame of one matrix block: leading directions of its gradient drift on both sides, and their energies.

Source:
    This package. The iteration is Oja's rule in block form, see :mod:`lightning_g2.routing.ridge`; weighing both sides
    of a matrix by its second moments is V. Gupta, T. Koren, Y. Singer, "Shampoo: Preconditioned Stochastic Tensor
    Optimization" (2018) and J. Martens, R. Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature" (2015), there for every gradient, here for stale ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_g2.algebra.fano_fisher import MAXIMUM_ENERGY
from lightning_g2.errors import ShapeError
from lightning_g2.routing.basis import orthonormalise

_WARMUP_PUSHES = 4
_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Tracked directions of one side of a block.

    Attributes:
        basis: U, shape (rows, r), orthonormal; r = min(rank, rows - 1).
        memory: running mean S of D(DᵀU)/|D|², shape (rows, r); None before the first drift.
        energies: E_i = (8/3)|u_iᵀD|²/|D|² of the newest drift, shape (r,), each in [0, 8/3], as is their sum.
        mean: running mean of the energies, shape (r,).
    """

    basis: Tensor
    memory: Tensor | None
    energies: Tensor
    mean: Tensor

    def rest(self, energies: Tensor) -> Tensor:
        """Energy of each direction that is not tracked, at its mean, shape ().

        Args:
            energies: of the tracked ones, shape (r,).
        """
        rows, rank = self.basis.shape
        return (MAXIMUM_ENERGY - energies.sum()).clamp_min(0.0) / (rows - rank)


@dataclass(frozen=True, slots=True, eq=False)
class SpectralObservation:
    """What one drift makes of a frame; nothing is kept until it is committed.

    Attributes:
        left: directions among the rows of D, the block as out × rest.
        right: directions among its columns.
        norm: |D|, shape (), in the gradient's units.
        energy: E = (8/3)·(|UᵀD|² + |DV|²)/(2|D|²), shape (), 0 for D = 0.
    """

    left: Side
    right: Side
    norm: Tensor
    energy: Tensor


class SpectralFrame:
    """Orthonormal U (out × r) and V (rest × r) that follow the leading singular directions of a block's drift D.

    D is the block as a matrix, out × rest. On each side one step of subspace iteration a push (three on the first
    four): S ← (1-η_t)S + η_t D(DᵀU)/|D|², U ← orth(S), η_t = max(η, 1/t). Memory: 2·(out + rest)·r float32.

    Args:
        shape: the block's shape.
        rank: directions followed on each side; one less than a side has where it has no more.
        eta: η, share of the newest drift.
        seed: chooses the start bases.
        follows: False keeps the start bases, random ones: a control.

    Raises:
        ShapeError: the block is no matrix with at least two rows and columns; see :meth:`fits`.
    """

    def __init__(
        self, shape: tuple[int, ...], *, rank: int = 16, eta: float = 0.2, seed: int = 0, follows: bool = True
    ) -> None:
        if not self.fits(tuple(shape)):
            raise ShapeError(
                f"shape={tuple(shape)}: must be a matrix with at least two rows and columns; let this block pass"
            )
        self.shape = tuple(shape)
        self.rank, self.eta, self.follows, self.pushes = rank, eta, follows, 0
        generator = torch.Generator().manual_seed(seed)
        self.left, self.right = (self._start(rows, generator) for rows in (shape[0], math.prod(shape[1:])))

    @staticmethod
    def fits(shape: tuple[int, ...]) -> bool:
        """Whether a block of this shape can be weighed: a matrix or kernel with at least two rows and columns.

        Args:
            shape: the block's shape.
        """
        return len(shape) >= 2 and min(shape[0], math.prod(shape[1:])) > 1

    def observe(self, drift: Tensor) -> SpectralObservation:
        """Follow one drift, without keeping the result.

        Args:
            drift: D, the block's shape, float32 or float64.

        Returns:
            New directions, their energies and |D|, on the drift's device; nothing is read by the host.

        Raises:
            ShapeError: the shape is not the block's.
        """
        matrix = self._matrix(drift)
        squared = torch.linalg.vector_norm(matrix).square()
        norm = squared.sqrt()  # Not the norm itself: a square that overflows has to show in it.
        squared = squared.clamp_min(torch.finfo(matrix.dtype).tiny)
        left = self._follow(matrix, squared, self.left)
        right = self._follow(matrix.t(), squared, self.right)
        energy = (left.energies.sum() + right.energies.sum()).div(2.0).clamp(0.0, MAXIMUM_ENERGY)
        return SpectralObservation(left, right, norm, energy)

    def commit(self, observation: SpectralObservation) -> None:
        """Keep what :meth:`observe` returned.

        Args:
            observation: the newest one; others are to be dropped.
        """
        self.left, self.right = observation.left, observation.right
        self.pushes += 1

    def state_dict(self) -> dict[str, Any]:
        """Directions, memories, energies and count of pushes."""
        sides = {"left": self.left, "right": self.right}
        fields = ("basis", "memory", "energies", "mean")
        return {"pushes": self.pushes, **{n: {f: getattr(s, f) for f in fields} for n, s in sides.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a frame of the same shape and rank.

        Raises:
            ShapeError: a basis has another shape.
        """
        for name, side in (("left", self.left), ("right", self.right)):
            shape = tuple(state[name]["basis"].shape)
            if shape != tuple(side.basis.shape):
                raise ShapeError(
                    f"{name} basis has shape {shape}: must be {tuple(side.basis.shape)}; load a state of the same "
                    f"block and rank"
                )
        self.pushes = int(state["pushes"])
        self.left, self.right = Side(**state["left"]), Side(**state["right"])

    def _start(self, rows: int, generator: torch.Generator) -> Side:
        start = torch.randn(rows, min(self.rank, rows - 1), generator=generator, dtype=torch.float64)
        zeros = torch.zeros(start.shape[1])
        return Side(orthonormalise(start, start).float(), None, zeros, zeros)

    def _matrix(self, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self.shape:
            raise ShapeError(f"tensor has shape {tuple(tensor.shape)}: must be {self.shape}; use one frame per block")
        return tensor.detach().reshape(self.shape[0], -1)

    @property
    def _steps(self) -> int:
        """Steps of subspace iteration on the next push."""
        if not self.follows:
            return 0
        return _WARMUP_STEPS if self.pushes < _WARMUP_PUSHES else 1

    def _follow(self, matrix: Tensor, squared: Tensor, side: Side) -> Side:
        share = max(self.eta, 1.0 / (self.pushes + 1))
        basis, memory = side.basis.to(matrix), None if side.memory is None else side.memory.to(matrix)
        mean = basis
        for _ in range(self._steps):
            lifted = (matrix @ (matrix.t() @ basis)).div_(squared)
            mean = lifted if memory is None else torch.lerp(memory, lifted, share)
            basis = orthonormalise(mean, basis)
        shares = (matrix.t() @ basis).square().sum(dim=0) / squared
        energies = (shares * MAXIMUM_ENERGY).clamp(0.0, MAXIMUM_ENERGY)
        return Side(basis, mean, energies, torch.lerp(side.mean.to(energies), energies, share))


def weigh(matrix: Tensor, left: tuple[Side, Tensor, Tensor], right: tuple[Side, Tensor, Tensor]) -> Tensor:
    """Weigh a matrix along the directions of both its sides: W_L G W_R, W = w_0·I + U diag(w - w_0) Uᵀ.

    Args:
        matrix: G, shape (out, rest).
        left: directions of the rows, weights w of the tracked ones, shape (r,), and w_0 of all others, shape ().
        right: likewise of the columns.

    Returns:
        Shape of ``matrix``.
    """
    side, weights, rest = left
    basis = side.basis.to(matrix)
    result = torch.addmm(rest * matrix, basis, (weights - rest).unsqueeze(1) * (basis.t() @ matrix))
    side, weights, rest = right
    basis = side.basis.to(matrix)
    return torch.addmm(rest * result, (result @ basis) * (weights - rest), basis.t())
