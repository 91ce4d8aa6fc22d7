"""Muon for matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class MuonWithAdamW(Optimizer):
    """Steps matrices by Muon and all other parameters by AdamW, which torch's Muon leaves to another optimizer.

    Args:
        parameters: all of them.
        lr: Muon's learning rate.
        adamw_share: AdamW's learning rate over Muon's.
        **muon: further options of ``torch.optim.Muon``.

    Source:
        K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], lr: float = 0.02, *, adamw_share: float = 0.15, **muon: Any
    ) -> None:
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        super().__init__([{"params": list(parameters), "lr": lr}], {})
        self.matrices: Optimizer | None = torch.optim.Muon(matrices, lr=lr, **muon) if matrices else None
        self.others: Optimizer | None = torch.optim.AdamW(others, lr=lr * adamw_share) if others else None
        # The parts' own groups, so that a rate set here is theirs.
        self.param_groups = [group for part in self._parts() for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step both.

        Args:
            closure: not called.
        """
        for part in self._parts():
            part.step()

    def _parts(self) -> list[Optimizer]:
        return [part for part in (self.matrices, self.others) if part is not None]
