"""Reads, on every rank and after every batch, what a benchmark needs to know of a fit."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.callbacks import G2MonitorCallback
from lightning_g2.cli.bench.memory_use import own_memory, server_memory
from lightning_g2.strategy import G2AsyncStrategy
from lightning_g2.strategy.ddp import MeteredDDPStrategy


class Meter(G2MonitorCallback):
    """Stands in for the monitor, so that nothing else reads the server's records; it logs nothing.

    Args:
        memory_at: number of the batch of this rank after which memory is read; None reads none.

    Attributes:
        batches: after each batch, the seconds (monotonic clock) and the seconds spent so far in ``wait``, ``gate``,
            ``copy`` and (where ranks step the optimizer themselves) ``apply``.
        start_s: start of the first batch, monotonic clock.
        facts: what was read at the end of training or for memory.
    """

    def __init__(self, memory_at: int | None = None) -> None:
        super().__init__()
        self.batches: list[tuple[float, float, float, float, float]] = []
        self.start_s = 0.0
        self.facts: dict[str, Any] = {}
        self._memory_at = memory_at
        self._apply_s = 0.0
        self._stepping_s = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Time the optimizer where it steps on the rank."""
        if isinstance(trainer.strategy, G2AsyncStrategy):
            return
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The backward is over, and the step itself begins."""
        self._stepping_s = time.monotonic()

    def _stepped(self, *_: Any) -> None:
        self._apply_s += time.monotonic() - self._stepping_s

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        """Note when the first batch starts."""
        self.start_s = self.start_s or time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Read the clocks."""
        strategy = trainer.strategy
        wait_s = gate_s = copy_s = 0.0
        if isinstance(strategy, G2AsyncStrategy):
            wait_s, gate_s, copy_s = strategy.spent.wait_s, strategy.spent.gate_s, strategy.spent.copy_s
        elif isinstance(strategy, MeteredDDPStrategy):
            wait_s = strategy.wait_s
        self.batches.append((time.monotonic(), wait_s, gate_s, copy_s, self._apply_s))
        if len(self.batches) == self._memory_at:
            self.facts["memory"] = own_memory()
            if trainer.is_global_zero and isinstance(strategy, G2AsyncStrategy):
                self.facts["server_memory"] = server_memory()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take what the server has counted; it is gone after training."""
        if trainer.is_global_zero and isinstance(trainer.strategy, G2AsyncStrategy):
            totals = trainer.strategy.totals()
            self.facts["totals"] = {rank: asdict(one) for rank, one in totals.items()}
            self.facts["pushes"] = [(r.rank, r.time_s, r.samples) for r in trainer.strategy.drain() if r.applied]
