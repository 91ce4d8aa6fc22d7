"""One clock for the learning-rate schedules of all ranks."""

from __future__ import annotations

import warnings

from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.tuner.lr_finder import _ExponentialLR, _LinearLR
from lightning.pytorch.utilities.types import LRSchedulerConfig

_UPDATE = "_update_learning_rates"


class ServerClock:
    """Lets step-wise schedules advance with the optimizer steps of all ranks, and with nothing else.

    Lightning steps a rank's schedules once for each of the rank's own steps, so ranks of unequal speed would send
    different learning rates. While the clock is installed it does not; the clock makes one step for each optimizer step
    of the job, by whichever rank, as one process would. Steps are counted when they are made, whether the gate lets the
    push pass or not. Schedules by epoch, on a plateau, and those of manual optimization are left to Lightning.

    Args:
        trainer: the trainer whose schedules advance.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._steps = 0

    def install(self) -> None:
        """Take the step-wise schedules over."""
        original = getattr(self._loop, _UPDATE)

        def update(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step" or update_plateau_schedulers:
                original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)

        setattr(self._loop, _UPDATE, update)

    def remove(self) -> None:
        """Give them back."""
        if _UPDATE in self._loop.__dict__:
            delattr(self._loop, _UPDATE)

    def restart(self) -> None:
        """A training begins, and the count of steps with it; a fit with a finder in it has several."""
        self._steps = 0

    def advance_to(self, steps: int) -> None:
        """Advance the schedules to the job's optimizer steps since the start of the fit; they never go back."""
        before, self._steps = self._steps, max(self._steps, steps)
        if before == self._steps or not self._trainer.lightning_module.automatic_optimization:
            return
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                for _ in range(self._steps // config.frequency - before // config.frequency):
                    if _range_is_tested(config.scheduler):
                        self._trainer.should_stop = True
                        break
                    self._step(config)

    def _step(self, config: LRSchedulerConfig) -> None:
        # Some rank has stepped, even where this one has not yet: the scheduler need not warn about the order.
        config.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        try:
            call._call_lightning_module_hook(self._trainer, "lr_scheduler_step", config.scheduler, None)
        except ValueError as error:
            # OneCycleLR raises past its end; the rate that it ended with stays.
            warnings.warn(
                f"schedule ended before training: {error}. A schedule counts the steps of all ranks, as one process "
                "would: N ranks make N times as many as under DDP; trainer.estimated_stepping_batches knows how many",
                stacklevel=2,
            )


def _range_is_tested(scheduler: object) -> bool:
    """Whether a learning-rate finder's schedule has come to the end of its range; it would go on beyond."""
    return isinstance(scheduler, (_LinearLR, _ExponentialLR)) and scheduler.last_epoch >= scheduler.num_iter - 1
