"""A progress bar for training that ends by time or steps on data without an end."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

_SHOWN = {"train_loss": "loss", "openness": "openness", "tau": "τ", "val_loss": "val_loss"}


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
        self.train_progress_bar.n = round(100 * (limit_fraction(trainer, trainer.global_step) or 0.0), 1)
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The step and the known metrics, in a fixed order."""
        logged = super().get_metrics(trainer, pl_module)
        shown = {label: logged[name] for name, label in _SHOWN.items() if name in logged}
        return {"step": str(trainer.global_step), **shown}


def limit_fraction(trainer: pl.Trainer, steps: int) -> float | None:
    """Share of ``max_steps`` or ``max_time`` that is used up, whichever is further.

    Args:
        trainer: a Trainer that is fitting, or about to.
        steps: optimizer steps taken so far.

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
