"""Control of the g2 gate: as much is taken out of a push, in directions that mean nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_g2.routing.ridge import RidgeFrame
from lightning_g2.routing.rules.g2 import G2Gate
from lightning_g2.routing.sketch import block_seed


class RandomSubspaceGate(G2Gate):
    """The g2 gate with (1-w) of a random subspace taken out, which holds as much of |g|² as the ridge does.

        g' = g - (1-w) Σ a_i q_i q_iᵀ g,   Σ a_i² |q_iᵀg|² = |Uᵀg|²,   a = 1, …, 1, a_k, 0, …

    The q_i are a fixed random basis of each block's rows, taken in a new random order each push. Weights and energies
    are those of the g2 gate. Its memory, and 4·rows² bytes a block more; the arithmetic is that of a full rotation.

    Source:
        This package.
    """

    def _ridge(self, name: str, shape: tuple[int, ...]) -> RidgeFrame:
        if name not in self._ridges:
            seed = block_seed(self.seed, name)
            self._ridges[name] = _EqualEnergyFrame(shape, rank=self.rank, eta=self.eta, form=self.form, seed=seed)
        return self._ridges[name]

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"{super().describe()} in random subspaces of equal energy"


class _EqualEnergyFrame(RidgeFrame):
    """Follows the drift as ever, and filters along random directions."""

    _generator: torch.Generator | None = None
    _directions: Tensor | None = None

    def filter(self, gradient: Tensor, weight: float) -> Tensor:
        """See :meth:`RidgeFrame.filter`."""
        if weight == 1.0:
            return gradient
        matrix = self._matrix(gradient)
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        basis, _ = self._aligned(matrix)
        target = self._coordinates(matrix, basis).square().sum()
        directions = self._drawn(matrix)
        along = self._coordinates(matrix, directions)
        energies = along.square().sum(dim=0 if self.transposed else 1)
        before = energies.cumsum(0) - energies
        tiny = torch.finfo(matrix.dtype).tiny
        shares = ((target - before) / energies.clamp_min(tiny)).clamp(0.0, 1.0).sqrt()
        removed = (along * shares) @ directions.t() if self.transposed else directions @ (along * shares.unsqueeze(1))
        damped = torch.sub(matrix, removed, alpha=1.0 - weight).reshape(self.shape)
        return torch.empty_like(gradient).copy_(damped)

    def _drawn(self, like: Tensor) -> Tensor:
        """The block's directions in a new order, shape (rows, rows)."""
        rows = self.basis.shape[0]
        if self._generator is None or self._directions is None:
            self._generator = torch.Generator().manual_seed(self.seed)
            noise = torch.randn(rows, rows, generator=self._generator, dtype=torch.float64)
            self._directions = torch.linalg.qr(noise)[0].to(like)
        order = torch.randperm(rows, generator=self._generator).to(like.device)
        return self._directions.to(like).index_select(1, order)
