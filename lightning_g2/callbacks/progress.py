"""Progress bars: of what all ranks have done together, and of training that ends by time or steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

_SHOWN = {"train_loss": "loss", "openness": "openness", "tau": "τ", "val_loss": "val_loss"}


@dataclass(frozen=True)
class JobProgress:
    """How far the whole job has come in its epoch.

    Attributes:
        done: samples begun by all ranks; batches where the number of samples is not known.
        total: samples (batches) of the epoch; infinite where it is not known.
        unit: ``"samples"`` or ``"batches"``.
    """

    done: int
    total: float
    unit: str


class JobProgressBar(ProgressBar):
    """What a progress bar becomes while several ranks train: it counts the samples of all ranks, not its own batches.

    Mixed into the class of the trainer's own bar, Lightning's or the user's, whichever library draws it.
    """

    _moved_at = 0

    @property
    def total_train_batches(self) -> int | float:
        """Where the bar ends."""
        return self.trainer.strategy.progress.total  # type: ignore[attr-defined, no-any-return]

    def init_train_tqdm(self) -> Any:
        """Lightning's bar, with the right unit."""
        bar = super().init_train_tqdm()  # type: ignore[misc]
        bar.unit = f" {self.trainer.strategy.progress.unit}"  # type: ignore[attr-defined]
        return bar

    def _get_train_description(self, current_epoch: int) -> str:
        text: str = super()._get_train_description(current_epoch)  # type: ignore[misc]
        return f"{text.rstrip()} ({self.trainer.strategy.progress.unit})"  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move to where the job is."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.strategy.progress.done - 1)  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All ranks have finished what they had begun."""
        super().on_validation_start(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.on_train_batch_end(trainer, pl_module, None, None, 0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Likewise, where the last batches were other ranks'."""
        self.on_train_batch_end(trainer, pl_module, None, None, 0)
        super().on_train_epoch_end(trainer, pl_module)

    def _should_update(self, current: int, total: int | float) -> bool:
        # Lightning asks whether `current` is a multiple of the rate; here it grows by more than one.
        rate = max(int(self.refresh_rate), 1)  # type: ignore[attr-defined]
        passed, self._moved_at = current // rate != self._moved_at // rate, current
        return bool(self.is_enabled) and (passed or current == total)  # type: ignore[attr-defined]


class LimitProgressBar(TQDMProgressBar):
    """Fill the bar by the share of ``max_time`` or ``max_steps`` and show step, loss, openness and τ.

    Lightning's own bar counts batches of an epoch, which on endless data has no total. Metrics are those that were
    logged for the progress bar under the names ``train_loss``, ``openness``, ``tau`` and ``val_loss``.

    Args:
        refresh_rate: batches between two updates; 0 turns the bar off.
    """

    BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar:20}| {elapsed}{postfix}"

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @property
    def train_description(self) -> str:
        """What stands before the bar."""
        return "train: "

    def init_train_tqdm(self) -> Tqdm:
        """A bar from 0 to 100."""
        bar = super().init_train_tqdm()
        bar.total = 100
        return bar

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep one bar for the whole training."""

    def init_validation_tqdm(self) -> Tqdm:
        """No second bar: a validation is short and its loss shows in the first."""
        return Tqdm(disable=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar and refresh the metrics every ``refresh_rate`` batches."""
        if self.is_enabled and (batch_idx + 1) % self.refresh_rate == 0:
            self._refresh(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the last state."""
        if self.is_enabled:
            self._refresh(trainer, pl_module)

    def _refresh(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.train_progress_bar.n = round(100 * (limit_fraction(trainer, job_step(trainer)) or 0.0), 1)
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The step and the known metrics, in a fixed order."""
        logged = super().get_metrics(trainer, pl_module)
        shown = {label: logged[name] for name, label in _SHOWN.items() if name in logged}
        return {"step": str(job_step(trainer)), **shown}


def job_step(trainer: pl.Trainer) -> int:
    """Optimizer steps of all ranks; ``global_step`` where ranks run in step."""
    return int(getattr(trainer.strategy, "job_step", trainer.global_step))


def limit_fraction(trainer: pl.Trainer, steps: int) -> float | None:
    """Share of ``max_steps`` or ``max_time`` that is used up, whichever is further.

    Args:
        trainer: a Trainer that is fitting, or about to.
        steps: optimizer steps taken so far, by all ranks.

    Returns:
        Share, 0 to 1; None if the Trainer has neither limit.
    """
    shares = [steps / trainer.max_steps] if trainer.max_steps > 0 else []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # max_time lives in a Timer callback, whose clock also survives a resume.
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None:
            elapsed = callback.time_elapsed()
            shares.append(elapsed / max(elapsed + remaining, 1e-9))
    return min(max(shares), 1.0) if shares else None
