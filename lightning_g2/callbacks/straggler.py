"""One rank made slow on purpose, to study stragglers on equal machines."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_g2.errors import ConfigurationError

_REMEMBERED_BATCHES = 16
_BACKWARD_OVER_FORWARD = 2


class StragglerCallback(pl.Callback):
    """Slow one rank down by sleeping between its forward and its backward.

    The sleep lies after the weights were read and before the gradient exists, so under asynchronous training that
    gradient really gets old; a sleep between two batches would only make its pushes rare.

    With ``factor=k`` a batch takes k times the rank's own compute time: forward and backward, median of the latest 16
    batches, so the very first batch is not slowed. Waiting for other ranks or for a server is not counted: on the CPU
    the clock is the training thread's CPU time, which stands still in a wait; on CUDA it is the forward's time between
    two events, times 3, as a backward costs about two forwards. Data loading and the optimizer's step are not counted
    either, so a whole step is slowed a little less than k times.

    Where a rank's passes run in threads of their own, the sleep lies in the backward thread, and both passes' CPU time
    counts, with the layers' updates in it; on CUDA that is not the device's time, so use ``seconds`` there.

    On other ranks, and in a job of one rank where ``rank`` ≥ 1 does not exist, it does nothing.

    Args:
        rank: global rank to slow down.
        factor: how many times its own compute time a batch shall take, ≥ 1; exclusive with ``seconds``.
        seconds: fixed sleep before each backward, in seconds, ≥ 0; exclusive with ``factor``.
        from_step: first optimizer step of this rank that is slowed.
        to_step: first optimizer step that is no longer slowed; None slows to the end.

    Raises:
        ConfigurationError: an option is out of range, or not exactly one of ``factor`` and ``seconds`` is given; at
            setup, ``rank`` does not exist in a job of several ranks.
    """

    def __init__(
        self,
        rank: int = 1,
        factor: float | None = None,
        seconds: float | None = None,
        from_step: int = 0,
        to_step: int | None = None,
    ) -> None:
        super().__init__()
        _check(rank, factor, seconds, from_step, to_step)
        self.rank, self.factor, self.seconds = rank, factor, seconds
        self.from_step, self.to_step = from_step, to_step
        self.slept_s = 0.0
        self.in_threads = False  # then this callback has no clock, and is told
        self._compute_s: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._start: float | torch.cuda.Event | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a rank that the job does not have."""
        if trainer.world_size > 1 and self.rank >= trainer.world_size:
            raise ConfigurationError(
                f"rank={self.rank}: must be < {trainer.world_size}, the number of ranks; name an existing rank"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock of this batch."""
        if trainer.global_rank != self.rank or self.factor is None or self.in_threads:
            return
        self._start = _event() if pl_module.device.type == "cuda" else time.thread_time()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Sleep, so that the gradient is late for the weights it was computed from."""
        if trainer.global_rank != self.rank:
            return
        if isinstance(self._start, torch.cuda.Event):
            forward_end = _event()
            # The device must have finished the forward, or the sleep would overlap with it and slow nothing.
            forward_end.synchronize()
            forward_s = self._start.elapsed_time(forward_end) / 1e3
            self._compute_s.append((1 + _BACKWARD_OVER_FORWARD) * forward_s)
        if self.from_step <= trainer.global_step and (self.to_step is None or trainer.global_step < self.to_step):
            duration_s = self.delay_s()
            time.sleep(duration_s)
            self.slept_s += duration_s

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock of this batch."""
        if isinstance(self._start, float):
            self._compute_s.append(time.thread_time() - self._start)
        self._start = None

    def note_compute(self, trainer: pl.Trainer, seconds: float) -> None:
        """Take in what a batch's compute was, where its passes run in threads that this callback has no clock in.

        Args:
            trainer: the trainer.
            seconds: forward and backward, the sleep left out.
        """
        if trainer.global_rank == self.rank and self.factor is not None:
            self._compute_s.append(seconds)

    def delay_s(self) -> float:
        """Length of the next sleep, in seconds."""
        if self.factor is None:
            return self.seconds or 0.0
        return (self.factor - 1.0) * statistics.median(self._compute_s) if self._compute_s else 0.0


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _check(rank: int, factor: float | None, seconds: float | None, from_step: int, to_step: int | None) -> None:
    if rank < 0:
        raise ConfigurationError(f"rank={rank}: must be ≥ 0; name the global rank to slow down")
    if (factor is None) == (seconds is None):
        raise ConfigurationError(
            f"factor={factor}, seconds={seconds}: exactly one must be given; leave the other empty (None)"
        )
    if factor is not None and not 1.0 <= factor < math.inf:
        raise ConfigurationError(f"factor={factor}: must be ≥ 1 and finite; 1 does not slow the rank")
    if seconds is not None and not 0.0 <= seconds < math.inf:
        raise ConfigurationError(f"seconds={seconds}: must be ≥ 0 and finite; 0 does not slow the rank")
    if from_step < 0:
        raise ConfigurationError(f"from_step={from_step}: must be ≥ 0; 0 slows from the start")
    if to_step is not None and to_step <= from_step:
        raise ConfigurationError(
            f"to_step={to_step}: must be > from_step={from_step}; leave it empty to slow to the end"
        )
