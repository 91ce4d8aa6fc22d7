"""The server's clock for learning-rate schedules."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call


class ServerClock:
    """Advances step-wise schedules with the server's count of updates.

    Lightning steps a rank's schedules once for each of the rank's own steps, so ranks of unequal speed would send
    different learning rates. This clock adds the steps that the other ranks have made meanwhile.

    Args:
        trainer: the trainer whose schedules advance.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._steps = 0

    def count_own_step(self) -> None:
        """The rank is making a step, after which Lightning advances the schedules once."""
        self._steps += 1

    def advance_to(self, version: int) -> None:
        """Advance the schedules to the server's version; they never go back."""
        missing = version - self._steps
        if missing <= 0 or not self._trainer.lightning_module.automatic_optimization:
            return
        for config in self._trainer.lr_scheduler_configs:
            if config.interval != "step" or config.reduce_on_plateau:
                continue
            due = version // config.frequency - self._steps // config.frequency
            if due > 0:
                # The server has stepped, even where this rank has not yet: the scheduler need not warn about the order.
                config.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
            for _ in range(due):
                call._call_lightning_module_hook(self._trainer, "lr_scheduler_step", config.scheduler, None)
        self._steps = version
