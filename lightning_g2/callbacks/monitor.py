"""What the gate and the server do, in the trainer's loggers and progress bar."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.callbacks.thread_report import ThreadReport
from lightning_g2.errors import ConfigurationError
from lightning_g2.routing.mge import effective_sample_size, mge_weights, normalised_entropy
from lightning_g2.values import PushRecord, RankTotals, RoundsChoice, ServerView

_log = logging.getLogger(f"{Callback.__module__.removesuffix('.callbacks.callback')}.g2async")

RESCUE_DELAY = 2
"""A push counts as rescued when it is older than 2(N-1) versions, twice the delay that N ranks of equal speed have,
where a bounded-delay rule would drop it, and yet passed with a weight above one half."""


@runtime_checkable
class PushSource(Protocol):
    """What the monitor reads: the strategy."""

    @property
    def job_step(self) -> int:
        """Optimizer steps of all ranks."""

    def drain(self) -> list[PushRecord]:
        """Push records of all ranks since the last call."""

    def view(self) -> ServerView:
        """The server's version, window and scales."""

    def totals(self) -> dict[int, RankTotals]:
        """Totals by rank since the start of the fit."""


class G2MonitorCallback(Callback):
    """Logs the pushes of all ranks to rank 0's loggers every ``log_every_n_steps`` optimizer steps of the job.

    Histograms ``g2/friction``, ``g2/weight``, ``g2/staleness`` go to loggers that have them, scalars to every logger:
    ``g2/openness`` (mean weight), ``g2/openness_stale`` (of pushes with τ>0), ``g2/entropy``, ``g2/ess``,
    ``g2/rescued``, ``g2/rejected``, ``g2/late``, ``g2/staleness_mean``, ``g2/staleness_max``, ``g2/pushes_per_s``,
    ``g2/server_version``, ``g2/bytes_sent``, ``g2/bytes_saved``, the last two for each rank, too, as
    ``g2/rank{r}/bytes_sent``, ``g2/rank{r}/staleness_mean`` and ``g2/rank{r}/samples_per_s``. TensorBoard also gets
    ``g2/friction/{block}``, the mean friction of each filtered block in rank 0's own pushes. Under ``rounds="auto"``
    there is ``g2/rounds``, the size of rounds in force, 0 without any, and a text of that name for each decision, which
    is logged, too. The progress bar shows ``openness`` and ``tau``. Where rank 0 has forward and backward threads, what
    :class:`~lightning_g2.callbacks.thread_report.ThreadReport` says is logged, too.

    Args:
        log_every_n_steps: steps between two entries; None takes the trainer's.

    Raises:
        ConfigurationError: ``log_every_n_steps`` is below 1.
    """

    def __init__(self, log_every_n_steps: int | None = None) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ConfigurationError(f"log_every_n_steps={log_every_n_steps}: must be ≥ 1, or None for the trainer's")
        self.log_every_n_steps = log_every_n_steps
        self.summary: dict[int, RankTotals] = {}
        self._last_time_s: float | None = None
        self._logged_at = 0
        self._source: PushSource | None = None
        self._choice: RoundsChoice | None = None
        self._threads = ThreadReport()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Read what the server has taken in and log it."""
        if (shown := self._log(trainer)) is not None:
            pl_module.log_dict(shown, prog_bar=True, logger=False)

    def _log(self, trainer: Trainer) -> dict[str, float] | None:
        source = self._source
        if source is None or not self._due(trainer, source):
            return None
        records = source.drain()
        if not records:
            return None
        view, step = source.view(), self._logged_at - 1
        scalars = summarise(records, view, ranks=trainer.world_size, beta=_beta(trainer), since_s=self._last_time_s)
        self._last_time_s = records[-1].time_s
        self._tell(view.choice, trainer, step)
        drawn = histograms(records)
        if (report := getattr(source, "report", None)) is not None:
            scalars |= self._threads.scalars(report)
            drawn |= self._threads.histograms(report)
        routing = _routing(trainer)
        friction = {} if routing is None else routing.drain_friction()
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=step)
            writer: Any = getattr(logger, "experiment", None)
            for block, energy in friction.items() if hasattr(writer, "add_scalar") else ():
                writer.add_scalar(f"g2/friction/{block}", energy, global_step=step)
            if (write := getattr(writer, "add_histogram", None)) is not None:
                for tag, values in drawn.items():
                    _write_histogram(write, tag, values, step)
        return {"openness": scalars["g2/openness"], "tau": scalars["g2/staleness_mean"]}

    def _tell(self, choice: RoundsChoice | None, trainer: Trainer, step: int) -> None:
        """Say how pushes are gathered from now on, where that has been decided anew and differently."""
        told, self._choice = self._choice, choice
        if choice is None or (told is not None and told.rounds == choice.rounds):
            return
        _log.info(f"g2async rounds='auto': {choice}")
        for logger in trainer.loggers:
            if (write := getattr(getattr(logger, "experiment", None), "add_text", None)) is not None:
                write("g2/rounds", str(choice), global_step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what other ranks' last steps have made due, and keep the totals: the server is gone after training."""
        self._log(trainer)
        if self._source is not None:
            self.summary = self._source.totals()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new fit has a new server."""
        self._last_time_s = self._choice = None
        self.summary = {}
        self._threads = ThreadReport()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed fit goes on where it stood; rank 0 reads."""
        self._logged_at = trainer.global_step
        # Looked at once: a check against a protocol takes longer than all else that is done after most batches.
        strategy = trainer.strategy
        self._source = strategy if trainer.is_global_zero and isinstance(strategy, PushSource) else None

    def _due(self, trainer: Trainer, source: PushSource) -> bool:
        every: int = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = source.job_step
        if every < 1 or step // every == self._logged_at // every:
            return False
        self._logged_at = step
        return True


def summarise(
    records: Sequence[PushRecord], view: ServerView, *, ranks: int, beta: float, since_s: float | None = None
) -> dict[str, float]:
    """The scalars that describe a stretch of pushes.

    Args:
        records: pushes in order of arrival, at least one.
        view: the server at the end of the stretch; its window gives entropy and effective sample size.
        ranks: number of ranks N.
        beta: the gate's inverse temperature; 0 where the gate has none.
        since_s: server time of the push before the first one; None counts from the first.

    Returns:
        Value by tag; a tag whose value is undefined (no push with τ>0, no time between pushes) is left out. Means run
        over all pushes; a rejected one has weight 0.
    """
    applied = [r for r in records if r.applied]
    stale = [r for r in records if r.staleness > 0]
    start = records[0].time_s if since_s is None else since_s
    span = records[-1].time_s - start
    scalars = {
        "g2/rejected": float(sum(r.rejected for r in records)),
        "g2/late": float(sum(r.late for r in records)),
        "g2/rescued": float(
            sum(r.staleness * view.pushes_per_version > RESCUE_DELAY * (ranks - 1) and r.weight > 0.5 for r in applied)
        ),
        "g2/server_version": float(view.version),
        "g2/openness": _mean([r.weight for r in records]),
        "g2/staleness_mean": _mean([r.staleness for r in records]),
        "g2/staleness_max": float(max(r.staleness for r in records)),
    }
    if view.choice is not None:
        scalars["g2/rounds"] = float(view.choice.rounds or 0)
    scalars |= _traffic("g2", records)
    for rank in sorted({r.rank for r in records}):
        own = [r for r in records if r.rank == rank]
        scalars |= _traffic(f"g2/rank{rank}", own)
        scalars[f"g2/rank{rank}/staleness_mean"] = _mean([r.staleness for r in own])
    if stale:
        scalars["g2/openness_stale"] = _mean([r.weight for r in stale])
    if view.window:
        weights = mge_weights(torch.tensor(list(view.window.values()), dtype=torch.float64), beta)
        scalars["g2/entropy"] = float(normalised_entropy(weights))
        scalars["g2/ess"] = float(effective_sample_size(weights))
    if span > 0:
        scalars["g2/pushes_per_s"] = len(applied) / span
        for rank in sorted({r.rank for r in applied}):
            scalars[f"g2/rank{rank}/samples_per_s"] = sum(r.samples for r in applied if r.rank == rank) / span
    return scalars


def histograms(records: Sequence[PushRecord]) -> dict[str, Tensor]:
    """Values of the three histograms, each of shape (pushes,), float32; friction without pushes that had none (NaN)."""
    judged = [r for r in records if r.energy > 0.0 or not r.rejected]
    return {
        "g2/friction": torch.tensor([r.energy for r in judged], dtype=torch.float32),
        "g2/weight": torch.tensor([r.weight for r in records], dtype=torch.float32),
        "g2/staleness": torch.tensor([float(r.staleness) for r in records], dtype=torch.float32),
    }


def _traffic(prefix: str, records: Sequence[PushRecord]) -> dict[str, float]:
    """Bytes of gradients that pushes have brought, and those that rejection and compression have saved."""
    return {
        f"{prefix}/bytes_sent": float(sum(r.bytes_sent for r in records)),
        f"{prefix}/bytes_saved": float(sum(r.bytes_saved for r in records)),
    }


def _write_histogram(write: Any, tag: str, values: Tensor, step: int) -> None:
    """Write a histogram of the finite values; writers raise on empty or non-finite input, and training must go on."""
    finite = values[values.isfinite()].float()
    if finite.numel() < values.numel():
        warnings.warn(f"histogram {tag}: non-finite values are left out", stacklevel=2)
    if finite.numel():
        write(tag, finite, global_step=step)


def _routing(trainer: Trainer) -> G2RoutingCallback | None:
    return next((c for c in trainer.callbacks if isinstance(c, G2RoutingCallback)), None)  # type: ignore[attr-defined]


def _beta(trainer: Trainer) -> float:
    routing = _routing(trainer)
    return float(getattr(routing.gate, "beta", 0.0) or 0.0) if routing is not None else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
