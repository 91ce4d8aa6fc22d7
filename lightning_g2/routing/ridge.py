"""Ridge of one matrix block: the leading subspace of its gradient drift, followed push by push.

Source:
    This package. The subspace iteration is Oja's rule in block form: E. Oja, "Simplified neuron model as
    a principal component analyzer" (1982).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_g2.algebra.fano_fisher import MAXIMUM_ENERGY
from lightning_g2.errors import ShapeError
from lightning_g2.routing.basis import orthonormalise, ridge_axes
from lightning_g2.routing.option import require, require_choice
from lightning_g2.routing.sketch import G2Sketch

Form = Literal["auto", "covariance", "power"]

COVARIANCE_LIMIT = 128
"""``form="auto"`` takes the covariance form up to this many rows and the power step above: there they cost the same."""

_WARMUP_PUSHES = 4
_STEPS = 3


@dataclass(frozen=True, slots=True, eq=False)
class RidgeObservation:
    """What one drift makes of a frame; nothing is kept until it is committed.

    Attributes:
        basis: U after the drift, shape (rows, rank), orthonormal.
        memory: C, shape (rows, rows), or S, shape (rows, rank), after the drift; dimensionless.
        norm: |D|, shape (), in the gradient's units.
        energy: E = (8/3)|UᵀD|²/|D|², shape (), 0 for D = 0; dimensionless.
    """

    basis: Tensor
    memory: Tensor
    norm: Tensor
    energy: Tensor


class RidgeFrame:
    """Orthonormal U (rows × rank) that tracks the leading left singular subspace of a block's drift D.

    D is the block as a matrix, out × rest, transposed when out > rest, so rows = min(out, rest). Two forms:
    ``covariance``: C ← (1-η)C + η DDᵀ/|D|², U ← orth(CU), with 4·rows² bytes for C; ``power``:
    S ← (1-η)S + η D(DᵀU)/|D|², U ← orth(S), three times per push, with 4·rows·rank bytes. Both start with
    η_t = max(η, 1/t), and the covariance form with three steps per push, since a slow rank has few pushes to learn
    from. Memory follows the gradient's device.

    Args:
        shape: the block's shape.
        rank: columns of U.
        eta: η, share of the newest drift.
        form: ``"auto"`` takes ``covariance`` up to ``COVARIANCE_LIMIT`` rows and ``power`` above.
        seed: chooses the start basis and the valley sketch.

    Raises:
        ConfigurationError: an option is out of range.
        ShapeError: the block has no more than ``rank`` rows or columns; see :meth:`fits`.

    Source:
        This package.
    """

    def __init__(
        self, shape: tuple[int, ...], *, rank: int = 4, eta: float = 0.2, form: Form = "auto", seed: int = 0
    ) -> None:
        require(rank >= 1, "rank", rank, "be ≥ 1", "4 is the rank of the Fano-Fisher metric")
        require(0.0 < eta <= 1.0, "eta", eta, "lie in (0, 1]", "0.2 is the default")
        require_choice("form", form, ("auto", "covariance", "power"))
        if not self.fits(tuple(shape), rank):
            raise ShapeError(
                f"shape={tuple(shape)}: must be a matrix with more than rank={rank} rows and columns; "
                f"let this block pass unfiltered or lower the rank"
            )
        self.shape = tuple(shape)
        self.rank = rank
        self.eta = eta
        out, rest = self.shape[0], math.prod(self.shape[1:])
        self.transposed = out > rest
        self.rows = min(out, rest)
        auto = "covariance" if self.rows <= COVARIANCE_LIMIT else "power"
        self.form: str = auto if form == "auto" else form
        self.seed = seed
        self.pushes = 0
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(self.rows, rank, generator=generator, dtype=torch.float64)
        self.basis = orthonormalise(start, start).float()
        self._memory: Tensor | None = None

    @staticmethod
    def fits(shape: tuple[int, ...], rank: int = 4) -> bool:
        """Whether a block of this shape can be filtered.

        Args:
            shape: the block's shape.
            rank: columns of U.

        Returns:
            True for a matrix or kernel with more than ``rank`` rows and columns.
        """
        return len(shape) >= 2 and min(shape[0], math.prod(shape[1:])) > rank

    def observe(self, drift: Tensor) -> RidgeObservation:
        """Follow one drift, without keeping the result.

        Args:
            drift: D, the block's shape, float32 or float64, finite.

        Returns:
            The new basis, its memory, |D| and the energy under the new basis; see :meth:`commit`. All on the drift's
            device, nothing is read by the host.

        Raises:
            ShapeError: the shape is not the block's.
        """
        matrix = self._matrix(drift)
        basis, memory = self._aligned(matrix)
        squared = torch.linalg.vector_norm(matrix).square()
        norm = squared.sqrt()  # Not the norm itself: a square that overflows has to show in it.
        squared = squared.clamp_min(torch.finfo(matrix.dtype).tiny)
        step = self._covariance_step if self.form == "covariance" else self._power_step
        basis, memory, captured = step(matrix, squared, basis, memory)
        return RidgeObservation(basis, memory, norm, (captured * MAXIMUM_ENERGY).clamp(0.0, MAXIMUM_ENERGY))

    def commit(self, observation: RidgeObservation) -> None:
        """Keep what :meth:`observe` returned.

        Args:
            observation: the newest one; others are to be dropped.
        """
        self.basis = observation.basis
        self._memory = observation.memory
        self.pushes += 1

    def update(self, drift: Tensor) -> Tensor:
        """Follow one drift and keep the result.

        Args:
            drift: D, the block's shape, float32 or float64, finite.

        Returns:
            Energy of D under the new basis, shape (); dimensionless.

        Raises:
            ShapeError: the shape is not the block's.
        """
        observation = self.observe(drift)
        self.commit(observation)
        return observation.energy

    def filter(self, gradient: Tensor, weight: float) -> Tensor:
        """Damp the gradient's part on the ridge: g' = g - (1-w) U Uᵀ g.

        Args:
            gradient: g, the block's shape, real floating.
            weight: w in [0, 1]; 1 returns ``gradient`` itself.

        Returns:
            g', dtype, device and strides of ``gradient``; computed in float32 or float64.

        Raises:
            ShapeError: the shape is not the block's.
        """
        if weight == 1.0:
            return gradient
        matrix = self._matrix(gradient)
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        basis, _ = self._aligned(matrix)
        on_ridge = self._coordinates(matrix, basis)
        factors = (on_ridge, basis.t()) if self.transposed else (basis, on_ridge)
        damped = torch.addmm(matrix, *factors, alpha=weight - 1.0).reshape(self.shape)
        if damped.dtype == gradient.dtype and damped.stride() == gradient.stride():
            return damped
        return torch.empty_like(gradient).copy_(damped)

    def summary(self, drift: Tensor) -> Tensor:
        """Fourteen numbers c with cᵀΨc/|c|² = E and |c| = |D|, Ψ = Ψ(e_1, e_2).

        The norms |u_iᵀD| lie on Ψ's four active axes (ridge i on axis i mod 4), the residual is sketched onto the ten
        valley axes and rescaled to √(|D|² - |UᵀD|²). It is an energy-preserving summary and not linear in D. Routing
        needs only E; this is for looking at pushes.

        Args:
            drift: D, the block's shape, float32 or float64.

        Returns:
            c, shape (14,), in the gradient's units.

        Raises:
            ShapeError: the shape is not the block's.
        """
        matrix = self._matrix(drift)
        basis, _ = self._aligned(matrix)
        on_ridge = self._coordinates(matrix, basis)
        squares = on_ridge.square().sum(dim=0 if self.transposed else 1)
        active = matrix.new_zeros(4).index_add_(0, torch.arange(self.rank, device=matrix.device) % 4, squares).sqrt()
        residual = matrix - (on_ridge @ basis.t() if self.transposed else basis @ on_ridge)
        valley = G2Sketch(seed=self.seed).sketch("residual", residual)[0, :10].to(matrix.dtype)
        valley = torch.nn.functional.normalize(valley, dim=0) * torch.linalg.vector_norm(residual)
        axes = ridge_axes().to(matrix)
        coordinates: Tensor = axes[:, :4] @ active + axes[:, 4:] @ valley
        return coordinates

    def state_dict(self) -> dict[str, Any]:
        """Basis, memory and count of pushes."""
        return {"pushes": self.pushes, "basis": self.basis, "memory": self._memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a frame of the same shape, rank and form.

        Raises:
            ShapeError: the basis has another shape.
        """
        if state["basis"].shape != self.basis.shape:
            raise ShapeError(
                f"basis has shape {tuple(state['basis'].shape)}: must be {tuple(self.basis.shape)}; "
                f"load a state of the same block and rank"
            )
        self.pushes, self.basis, self._memory = int(state["pushes"]), state["basis"], state["memory"]

    def _matrix(self, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self.shape:
            raise ShapeError(f"tensor has shape {tuple(tensor.shape)}: must be {self.shape}; use one frame per block")
        return tensor.detach().reshape(self.shape[0], -1)

    def _aligned(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        memory = self._memory
        return self.basis.to(matrix), None if memory is None else memory.to(matrix)

    @property
    def _share(self) -> float:
        """η_t of the next push."""
        return max(self.eta, 1.0 / (self.pushes + 1))

    @property
    def _steps(self) -> int:
        """Steps of subspace iteration on the next push."""
        # C already holds the past, so one step of it is enough once it is warm; S is only as good as its U.
        return _STEPS if self.form == "power" or self.pushes < _WARMUP_PUSHES else 1

    def _covariance_step(
        self, matrix: Tensor, squared: Tensor, basis: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New U and C, and |UᵀD|²/|D|², which DDᵀ gives without another pass over D."""
        gram = (matrix.t() @ matrix if self.transposed else matrix @ matrix.t()).div_(squared)
        mean = gram if memory is None else torch.lerp(memory, gram, self._share)
        for _ in range(self._steps):
            basis = orthonormalise(mean @ basis, basis)
        return basis, mean, (basis * (gram @ basis)).sum()

    def _power_step(
        self, matrix: Tensor, squared: Tensor, basis: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New U and S, and |UᵀD|²/|D|²."""
        mean = basis
        for _ in range(self._steps):
            lifted = self._lift(matrix, self._coordinates(matrix, basis)).div_(squared)
            mean = lifted if memory is None else torch.lerp(memory, lifted, self._share)
            basis = orthonormalise(mean, basis)
        return basis, mean, self._coordinates(matrix, basis).square().sum() / squared

    def _coordinates(self, matrix: Tensor, basis: Tensor) -> Tensor:
        """UᵀD, shape (rank, rest); for a transposed block its transpose DᵀU, shape (out, rank)."""
        return matrix @ basis if self.transposed else basis.t() @ matrix

    def _lift(self, matrix: Tensor, coordinates: Tensor) -> Tensor:
        """D(DᵀU), shape (rows, rank)."""
        # BLAS is several times slower on the same product written with the tall operand transposed.
        return (coordinates.t() @ matrix).t() if self.transposed else matrix @ coordinates.t()
