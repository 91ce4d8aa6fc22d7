"""Learning rates that follow the share of training already done, not a count of epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_g2.callbacks.progress import job_step, limit_fraction
from lightning_g2.errors import ConfigurationError

WARMUP_FLOOR = 0.01
"""Multiplier at the very start: not zero, so that the first step moves the weights."""


def warmup_cosine(fraction: float, *, warmup: float) -> float:
    """Multiplier of the learning rate: a linear rise, then half a cosine down to zero.

    Args:
        fraction: share of training done; values outside 0 to 1 are clamped; dimensionless.
        warmup: share of training spent rising, 0 ≤ warmup < 1; dimensionless.

    Returns:
        Multiplier, 0 to 1.
    """
    fraction = min(max(fraction, 0.0), 1.0)
    if fraction < warmup:
        return warmup_constant(fraction, warmup=warmup)
    return 0.5 * (1.0 + math.cos(math.pi * (fraction - warmup) / (1.0 - warmup)))


def warmup_constant(fraction: float, *, warmup: float) -> float:
    """Multiplier of the learning rate: a linear rise, then 1.

    Args:
        fraction: share of training done; dimensionless.
        warmup: share of training spent rising, 0 ≤ warmup < 1; dimensionless.

    Returns:
        Multiplier, 0 to 1.
    """
    return WARMUP_FLOOR + (1.0 - WARMUP_FLOOR) * max(fraction, 0.0) / warmup if fraction < warmup else 1.0


def share_done(trainer: pl.Trainer) -> float | None:
    """Share of training that is done, by whatever ends it: ``max_time``, ``max_steps`` or ``max_epochs``.

    Args:
        trainer: a Trainer that is fitting, or about to.

    Returns:
        Share, 0 to 1; None if training has no end.
    """
    done = job_step(trainer)
    by_limit = limit_fraction(trainer, done)
    if by_limit is not None:
        return by_limit
    steps = trainer.estimated_stepping_batches
    return done / steps if 0 < steps < math.inf else None


class ElapsedFractionLR(LRScheduler):
    """Warm-up and cosine over the elapsed fraction of training.

    Ranks of unequal speed take unequal numbers of steps in the same time, so a schedule over steps would leave the
    slow rank with a high learning rate when the fast one has finished. The elapsed fraction is the same for all:
    each rank reads its own clock. Stepping more often than once a batch does no harm.

    Args:
        optimizer: the optimizer to drive.
        elapsed_fraction: called with the number of scheduler steps; returns the share of training done, 0 to 1.
        warmup: share of training spent warming up, 0 ≤ warmup < 1.

    Raises:
        ConfigurationError: ``warmup`` is out of range.
    """

    def __init__(self, optimizer: Optimizer, elapsed_fraction: Callable[[int], float], *, warmup: float = 0.05) -> None:
        if not 0.0 <= warmup < 1.0:
            raise ConfigurationError(f"warmup={warmup}: must be ≥ 0 and < 1; 0 starts at the full learning rate")
        self.elapsed_fraction = elapsed_fraction
        self.warmup = warmup
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Learning rate of each parameter group at this moment."""
        factor = warmup_cosine(self.elapsed_fraction(self.last_epoch), warmup=self.warmup)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """State without the clock, which belongs to the running job and does not pickle."""
        return {key: value for key, value in super().state_dict().items() if key != "elapsed_fraction"}
