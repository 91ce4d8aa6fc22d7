"""Lightning's epoch loop over batches that threads train on.

Batches begin ahead of those that the loop follows. ``on_train_batch_start`` of a batch runs when it begins, with the
counts that plain training would have by then; everything from its logged values to ``on_train_batch_end``, schedules,
validation and checkpoints when it is through, in the order of the batches. Nothing has begun beyond a batch after which
the trainer validates, saves by its number of steps, or ends: there, weights and counts are those of plain training.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call

from lightning_g2.strategy.loop import ConductedEpochLoop, mixed
from lightning_g2.strategy.sync_points import batch_size
from lightning_g2.strategy.threads.batch import BatchUnderWay, WindowUnderWay, logs_kept
from lightning_g2.strategy.threads.training import ThreadedTraining
from lightning_g2.values import Ticket


class ThreadedEpochLoop(_TrainingEpochLoop):
    """Begins batches ahead and follows them in order."""

    threads: ThreadedTraining
    _begun: deque[BatchUnderWay]
    """Batches that have begun and that the loop has not followed yet."""
    _ended: bool = False
    """The data have ended."""
    _skipped: bool = False
    """``on_train_batch_start`` has returned -1."""
    _validation_due: bool = False

    def reset(self) -> None:
        """Start an epoch, or go on in one."""
        super().reset()
        self._begun = deque()
        self._ended = self._skipped = self._validation_due = False

    @property
    def done(self) -> bool:
        """Whether the epoch is over; batches that have begun are followed first."""
        return not self._begun and super().done

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        # A validation that nobody could foresee, by the clock or at an early stop, comes when all have been followed.
        self._validation_due |= super()._should_check_val_fx(data_fetcher)
        if self._begun or not self._validation_due:
            return False
        self._validation_due = False
        return True

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Follow one batch, while others train."""
        if self.trainer.fit_loop._skip_backward:  # a pass in which SWA collects statistics
            super().advance(data_fetcher)
            return
        if self._resumes_at_validation(data_fetcher):
            return
        self._begin_more(data_fetcher)
        if self._begun:
            self._follow(data_fetcher)
        elif self._skipped:
            self._leave_epoch()
        else:
            raise StopIteration

    def _resumes_at_validation(self, fetcher: _DataFetcher) -> bool:
        """What Lightning does first in a resumed run; whether there is nothing to train on before the validation."""
        if self.restarting and self._should_check_val_fx(fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        return False

    # --- beginning ----------------------------------------------------------------------------------------------------

    def _begin_more(self, fetcher: _DataFetcher) -> None:
        """Begin as many batches as there is room for."""
        while self._may_begin() and self.threads.room:
            count = self.batch_progress.current.ready + len(self._begun)
            window = self._begun[-1].window if self._begun else self._window
            if window is None or count % self.trainer.accumulate_grad_batches == 0:
                left = self.trainer.num_training_batches - count
                window = self.threads.open_window(int(min(self.trainer.accumulate_grad_batches, left)))
            self._window = window
            try:
                self._begin(fetcher, window)
            except StopIteration:
                self._ended = True

    _window: WindowUnderWay | None = None

    def _may_begin(self) -> bool:
        if self._ended or self._skipped or len(self._begun) >= 2 * self.threads.options.graphs:
            return False
        if not self._begun:
            return True
        return not (self._begun[-1].ends_stretch or self.trainer.should_stop or self.trainer.received_sigterm)

    def _begin(self, fetcher: _DataFetcher, window: WindowUnderWay, left: int = 0) -> None:
        """Load a batch, run the hooks that come before its training step, and hand it to the threads."""
        trainer = self.trainer
        data, _, _ = next(fetcher)
        index = self.batch_progress.current.ready + len(self._begun)
        data = trainer.precision_plugin.convert_input(data)
        data = trainer.lightning_module._on_before_batch_transfer(data, dataloader_idx=0)
        data = call._call_strategy_hook(trainer, "batch_to_device", data, dataloader_idx=0)
        arguments = tuple(self._build_kwargs(OrderedDict(), data, index).values())
        batch = BatchUnderWay(
            data, index, arguments, is_last=fetcher.done, window=window, first=window.batches == 0, left=left
        )
        if data is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            batch.through = True
        else:
            with self._counts_ahead(), logs_kept(trainer.lightning_module, batch.logs):
                call._call_callback_hooks(trainer, "on_train_batch_start", data, index)
                response = call._call_lightning_module_hook(trainer, "on_train_batch_start", data, index)
                call._call_strategy_hook(trainer, "on_train_batch_start", data, index)
            if response == -1:
                self._skipped = True
                return
            self.threads.begin(batch, batch_size(data))
        self._begun.append(batch)
        batch.ends_stretch = self._ends_stretch(batch)

    def _ends_stretch(self, batch: BatchUnderWay) -> bool:
        """Whether it is known that the trainer validates, saves or ends after a batch."""
        trainer, count = self.trainer, batch.index + 1
        if batch.is_last or count == trainer.num_training_batches:
            return True
        if self._should_check_val_epoch():
            interval = trainer.val_check_batch
            if interval == float("inf"):
                interval = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else None
            if trainer.check_val_every_n_epoch is None:
                count = self.batch_progress.total.ready + len(self._begun)
            if interval and count % interval == 0:
                return True
        if not self._closes_window(batch):
            return False
        step = self.global_step + sum(self._closes_window(begun) for begun in self._begun)
        return step == self.max_steps or any(step % every == 0 for every in self._save_intervals())

    def _closes_window(self, batch: BatchUnderWay) -> bool:
        return batch.is_last or (batch.index + 1) % self.trainer.accumulate_grad_batches == 0

    def _save_intervals(self) -> list[int]:
        callbacks: list[Callback] = self.trainer.callbacks
        return [c._every_n_train_steps for c in callbacks if isinstance(c, ModelCheckpoint) and c._every_n_train_steps]

    @contextmanager
    def _counts_ahead(self) -> Iterator[None]:
        """Let counts be what they are in plain training when the next batch begins."""
        batches, steps = len(self._begun), sum(self._closes_window(batch) for batch in self._begun)
        progress, step = self.batch_progress, self.automatic_optimization.optim_progress.optimizer.step
        moved = [(p, batches) for p in (progress.total, progress.current)] + [
            (p, steps) for p in (step.total, step.current)
        ]
        for counts, by in moved:
            for name in ("ready", "started", "processed", "completed"):
                if hasattr(counts, name):
                    setattr(counts, name, getattr(counts, name) + by)
        self._batches_that_stepped += steps
        try:
            yield
        finally:
            self._batches_that_stepped -= steps
            for counts, by in moved:
                for name in ("ready", "started", "processed", "completed"):
                    if hasattr(counts, name):
                        setattr(counts, name, getattr(counts, name) - by)

    # --- following ----------------------------------------------------------------------------------------------------

    def _follow(self, fetcher: _DataFetcher) -> None:
        """Wait until the oldest batch is through, then do what follows a training step."""
        trainer, batch = self.trainer, self._begun[0]
        while not batch.through:
            self.threads.wait_for(lambda: batch.through or (self.threads.room and self._may_begin()))
            if not batch.through:
                self._begin_more(fetcher)
        self._begun.popleft()
        connector = trainer._logger_connector
        self.batch_progress.is_last_batch = batch.is_last
        self.batch_progress.increment_ready()
        connector.on_batch_start(batch.batch)
        self.batch_progress.increment_started()
        with trainer.profiler.profile("run_training_batch"):
            self._account(batch)
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call._call_callback_hooks(trainer, "on_train_batch_end", batch.output, batch.batch, batch.index)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", batch.output, batch.batch, batch.index)
        connector.on_batch_end()
        self.batch_progress.increment_completed()
        connector.update_train_step_metrics()

    def _account(self, batch: BatchUnderWay) -> None:
        """Count a batch, and its window's step; let the trainer know what it has logged."""
        progress = self.automatic_optimization.optim_progress.optimizer
        closes = not self.trainer.fit_loop._should_accumulate()
        if closes and batch.window.batches < batch.window.size:
            self.threads.drain()
        for logged in batch.logs:
            logged.replay(self.trainer.lightning_module)
        if batch.first:
            self.automatic_optimization._on_before_zero_grad(self.trainer.optimizers[0])
            progress.zero_grad.increment_completed()
        if closes:
            progress.step.increment_ready()
            self.threads.pushes += batch.window.pushed
            progress.step.increment_completed()

    def _leave_epoch(self) -> None:
        """``on_train_batch_start`` has returned -1: the batch counts as one that was not trained on."""
        self.batch_progress.increment_ready()
        self.batch_progress.increment_by(0, is_last_batch=True)
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        raise StopIteration


class ThreadedConductedLoop(ThreadedEpochLoop, ConductedEpochLoop):
    """Likewise, with windows from the server, which are asked for ahead."""

    _to_begin = 0
    """Batches of the latest window that have not begun."""
    _announced: Ticket | None = None
    """A sync point that is reached once all batches that have begun are followed."""

    def reset(self) -> None:
        """Start an epoch, or go on in one."""
        super().reset()
        self._to_begin, self._announced = 0, None

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Follow one batch, while others train; without any, a sync point is due."""
        if self.trainer.fit_loop._skip_backward:
            super().advance(data_fetcher)
            return
        self._begin_more(data_fetcher)
        if self._begun:
            self._left = self._begun[0].left
            self._follow(data_fetcher)
        elif self._announced is not None:
            ticket, self._announced = self._announced, None
            self._accept(ticket)

    def _begin_more(self, fetcher: _DataFetcher) -> None:
        while self._may_begin() and self.threads.room:
            if self._to_begin == 0:
                ticket = self._request(fetcher, tuple(sorted({b.window.number for b in self._begun})))
                if ticket.point is not None:
                    self._announced = ticket
                    return
                left = self._left
                self._accept(ticket)
                self._to_begin, self._left = ticket.batches, left
                self._window = self.threads.open_window(ticket.batches)
            assert self._window is not None
            try:
                self._begin(fetcher, self._window, self._to_begin)
                self._to_begin -= 1
            except StopIteration:
                self._runs_dry, self._to_begin = True, 0
            if self._skipped:
                self._skips, self._skipped, self._to_begin = True, False, 0

    def _may_begin(self) -> bool:
        return self._announced is None and len(self._begun) < 2 * self.threads.options.graphs

    def _closes_window(self, batch: BatchUnderWay) -> bool:
        return batch.is_last or batch.left <= 1


class Threaded:
    """Puts the loop over threads in place of the trainer's, and gives that back.

    Args:
        trainer: a trainer that is about to fit; with several ranks, its loops are those of :class:`Conducted`.
        threads: train.
    """

    def __init__(self, trainer: Trainer, threads: ThreadedTraining) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._class = type(self._loop)
        self._threads = threads

    def install(self) -> None:
        """Put the loop in place."""
        kind = ThreadedConductedLoop if isinstance(self._loop, ConductedEpochLoop) else ThreadedEpochLoop
        self._loop.__class__ = mixed(kind, self._class)
        setattr(self._loop, "threads", self._threads)  # noqa: B010 - an attribute of the new class

    def remove(self) -> None:
        """End the threads, and put the loop back."""
        self._threads.stop()
        ours = {*vars(ThreadedEpochLoop), *vars(ThreadedConductedLoop), *ThreadedEpochLoop.__annotations__}
        for name in [name for name in vars(self._loop) if name in ours]:
            delattr(self._loop, name)
        self._loop.__class__ = self._class
