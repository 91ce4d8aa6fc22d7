"""The threads of one fit: how a batch's passes are made, and when they start, wait and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_g2.callbacks.straggler import StragglerCallback
from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, RunReport
from lightning_g2.strategy.nonfinite import RunningStatistics
from lightning_g2.strategy.threads.batch import BatchUnderWay, WindowUnderWay, logs_kept
from lightning_g2.strategy.threads.updates import Updates


class ThreadedTraining:
    """Runs a module's training steps and backward passes in threads of their own.

    Args:
        trainer: the trainer that trains.
        module: its module, with all parameters in their final shape.
        options: of the threads.
        updates: takes the gradients.
        stopping: what errors of threads are raised through.

    Raises:
        ConfigurationError: the module cannot be copied.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: DecoupledOptions,
        updates: Updates,
        *,
        stopping: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.options = options
        self._trainer, self._module, self._updates, self._stopping = trainer, module, updates, stopping
        self._statistics = RunningStatistics()
        self._stragglers: list[StragglerCallback] = []
        self._runner = DecoupledRunner(
            module,
            self._forward,
            updates.apply,
            options,
            backward=self._backward,
            after_batch=self._note_through,
            stamp=updates.begin,
            window_end=updates.end,
            shared=(Metric, MetricCollection),
        )
        self._window: WindowUnderWay | None = None
        self._windows = 0
        self._under_way: dict[int, BatchUnderWay] = {}
        self._begun = self._released = 0
        self._forward_s = 0.0  # compute of the latest forward pass
        self.pushes = 0

    @property
    def report(self) -> RunReport:
        """Counts, times and staleness since the start of the fit."""
        return self._runner.report

    @property
    def running(self) -> bool:
        """Whether the threads run."""
        return self._runner.running

    # --- the main thread's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        self._stragglers = [c for c in callbacks if isinstance(c, StragglerCallback)]
        for callback in self._stragglers:
            callback.in_threads = True
        self._statistics.find(self._module)
        self._windows = self.pushes = 0
        self._window = None
        self._under_way.clear()
        self._runner.__enter__()

    def stop(self) -> None:
        """Have the threads end after what they are at, and wait for them; any number of calls."""
        if self._runner.running:
            self._runner.stop()
        for callback in self._stragglers:
            callback.in_threads = False

    @property
    def room(self) -> bool:
        """Whether another batch may begin."""
        return self._runner.room

    def open_window(self, size: int) -> WindowUnderWay:
        """The batches that begin now make an update together, so many.

        Args:
            size: how many.
        """
        if self._runner.idle:
            with self._stopping():
                self._updates.renew()
        self._runner.next_window(size)
        self._window = WindowUnderWay(size, self._windows)
        self._windows += 1
        return self._window

    def begin(self, batch: BatchUnderWay, samples: int) -> None:
        """Hand a batch to the threads; returns at once.

        Args:
            batch: the batch; its window is the one opened last.
            samples: training samples in it.
        """
        batch.window.batches += 1
        batch.window.samples += samples
        self._under_way[self._begun] = batch
        self._begun += 1
        self._runner.begin(batch)

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that the threads bring about; their errors are raised here."""
        with self._stopping():
            self._runner.wait_for(predicate)

    def settle(self) -> None:
        """Wait until all batches that have begun are through."""
        self.wait_for(lambda: self._runner.idle)

    def drain(self) -> None:
        """Likewise; a window that has fewer batches than it should makes its update now."""
        with self._stopping():
            self._runner.drain()

    # --- the threads' side --------------------------------------------------------------------------------------------

    def _forward(self, module: LightningModule, batch: BatchUnderWay) -> Tensor | None:
        """One training step, on a thread's copy of the module."""
        start = time.thread_time()
        before = self._statistics.remember()
        hook, module._current_fx_name = module._current_fx_name, "training_step"
        with logs_kept(module, batch.logs), self._trainer.precision_plugin.train_step_context():
            output = module.training_step(*batch.arguments)
        module._current_fx_name = hook
        self._statistics.restore(before)
        result = ClosureResult.from_training_step_output(output, self.options.accumulate)
        batch.output = {} if result.loss is None else result.asdict()
        if result.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return None
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output  # type: ignore[assignment]
        self._forward_s = time.thread_time() - start
        return loss

    def _backward(self, loss: Tensor) -> None:
        start = time.thread_time()
        for callback in self._stragglers:
            callback.on_before_backward(self._trainer, self._module, loss)
        self._module.backward(loss)
        for callback in self._stragglers:
            callback.note_compute(self._trainer, self._forward_s + time.thread_time() - start)

    def _note_through(self, sequence: int, loss: Any, stepped: bool) -> None:
        batch = self._under_way.pop(sequence, None)
        if batch is not None:
            batch.through = True
