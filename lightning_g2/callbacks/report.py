"""What each rank did in a training: one table at the end, the same for every strategy."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_g2.values import RankTotals

REPORT_FILE = "report.json"


@runtime_checkable
class PushSummarySource(Protocol):
    """A callback that knows, on rank 0, what became of every rank's pushes."""

    @property
    def summary(self) -> Mapping[int, RankTotals]:
        """Summary by rank."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One line of the table.

    Attributes:
        rank: global rank.
        summary: its pushes; under synchronous training an optimizer step counts as one fresh push.
        train_s: time in the training loop without validation, seconds.
        idle_s: time of it spent waiting for other ranks or for a server, seconds; NaN where it cannot be measured.
    """

    rank: int
    summary: RankTotals
    train_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Facts of one training.

    Attributes:
        strategy: name of the strategy.
        rows: one row a rank.
        val_loss: last validation loss, nats; None if there was no validation.
        wall_s: longest time a rank spent between start and end of training, validation included, seconds.
        output_dir: the job's folder.
        log_dir: folder of the event file; None without TensorBoard.
    """

    strategy: str
    rows: tuple[RankRow, ...]
    val_loss: float | None
    wall_s: float
    output_dir: str
    log_dir: str | None

    @property
    def samples(self) -> int:
        """Samples behind all applied pushes."""
        return sum(row.summary.samples for row in self.rows)

    @property
    def late_samples(self) -> int:
        """Samples behind pushes that were dropped because their round had ended."""
        return sum(row.summary.late_samples for row in self.rows)

    @property
    def idle_fraction(self) -> float:
        """Idle time of all ranks over their training time; NaN where it cannot be measured."""
        return _ratio(sum(row.idle_s for row in self.rows), sum(row.train_s for row in self.rows))


_HEADINGS = (
    "rank", "samples", "pushes", "mean τ", "max τ", "mean weight", "rejected", "late", "samples/s", "idle %",
)  # fmt: skip


def format_table(rows: Sequence[RankRow]) -> str:
    """Table of the ranks, right-aligned, with a heading; the column of late pushes only where there are any.

    Args:
        rows: one row a rank.

    Returns:
        Lines joined by newlines, without a trailing one.
    """
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    if not any(row.summary.late for row in rows):
        late = _HEADINGS.index("late")
        cells = [line[:late] + line[late + 1 :] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def _cells(row: RankRow) -> tuple[str, ...]:
    summary = row.summary
    return (
        str(row.rank), str(summary.samples), str(summary.pushes), f"{summary.staleness_mean:.2f}",
        str(summary.staleness_max), f"{summary.weight_mean:.3f}", str(summary.rejected), str(summary.late),
        _number(_ratio(summary.samples, row.train_s)), _number(100 * _ratio(row.idle_s, row.train_s)),
    )  # fmt: skip


def format_report(report: Report) -> str:
    """The table, the job's totals, and where to look next.

    Args:
        report: facts of the training.

    Returns:
        Text for the terminal.
    """
    val_loss = "no validation" if report.val_loss is None else f"{report.val_loss:.4f} nats/byte"
    lines = [
        format_table(report.rows),
        "",
        f"strategy         {report.strategy}",
        f"validation loss  {val_loss}",
        f"wall time        {report.wall_s:.1f} s",
        f"idle             {_number(100 * report.idle_fraction)} % of all ranks' training time",
        f"applied samples  {report.samples}",
        *([f"late samples     {report.late_samples}, not trained on"] if report.late_samples else []),
        f"output           {report.output_dir}",
    ]
    if report.log_dir is not None:
        lines.append(f"look             tensorboard --logdir {shlex.quote(report.log_dir)}")
    return "\n".join(lines)


def report_facts(report: Report) -> dict[str, Any]:
    """The report as a flat mapping for scripts: totals, then ``rank<r>_<fact>`` of each rank; NaN becomes None."""
    facts: dict[str, Any] = {
        "strategy": report.strategy, "ranks": len(report.rows), "val_loss": report.val_loss, "wall_s": report.wall_s,
        "idle_fraction": report.idle_fraction, "samples": report.samples, "output_dir": report.output_dir,
        "log_dir": report.log_dir,
    }  # fmt: skip
    for row in report.rows:
        values = {**asdict(row.summary), "train_s": row.train_s, "idle_s": row.idle_s}
        facts |= {f"rank{row.rank}_{name}": value for name, value in values.items()}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in facts.items()}


class ReportCallback(pl.Callback):
    """Count samples, steps, time and idle time on each rank; rank 0 makes the report and writes ``report.json``.

    Idle time is ``strategy.wait_s`` where the strategy measures it, and 0 for one rank. Pushes come from the callback
    that has a ``summary`` by rank, if there is one; else from the rank's own steps.

    Args:
        output_dir: folder of the job, where ``report.json`` goes.
        strategy: name to show for the strategy.

    Attributes:
        report: on rank 0 after training; None before, and on other ranks.
    """

    def __init__(self, output_dir: str, strategy: str = "") -> None:
        super().__init__()
        self.output_dir, self.strategy = output_dir, strategy
        self.report: Report | None = None
        self._reset()

    def _reset(self) -> None:
        self._samples = 0
        self._first_step = 0
        self._start_s = self._validation_start_s = self._validation_s = 0.0
        self._gathered: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._reset()
        self._first_step = trainer.global_step
        self._start_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's samples."""
        self._samples += extract_batch_size(batch)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the training clock."""
        self._validation_start_s = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the training clock again."""
        self._validation_s += time.perf_counter() - self._validation_start_s

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the ranks' numbers together; training is over, so a collective disturbs nobody."""
        wall_s = time.perf_counter() - self._start_s
        own = {
            "rank": trainer.global_rank,
            "samples": self._samples,
            "steps": trainer.global_step - self._first_step,
            "wall_s": wall_s,
            "train_s": wall_s - self._validation_s,
            "idle_s": self._idle_s(trainer),
        }
        self._gathered = _gather(own, trainer)

    def _idle_s(self, trainer: pl.Trainer) -> float:
        wait_s = getattr(trainer.strategy, "wait_s", None)
        if wait_s is not None:
            return float(wait_s)
        return 0.0 if trainer.world_size == 1 else math.nan

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the report once every callback has finished its own accounts."""
        if not trainer.is_global_zero or not self._gathered:
            return
        source = next((c for c in trainer.callbacks if isinstance(c, PushSummarySource)), None)  # type: ignore[attr-defined]
        self.report = Report(
            strategy=self.strategy or type(trainer.strategy).__name__,
            rows=tuple(_row(facts, None if source is None else source.summary) for facts in self._gathered),
            val_loss=_metric(trainer, "val_loss"),
            wall_s=max(facts["wall_s"] for facts in self._gathered),
            output_dir=self.output_dir,
            log_dir=_event_dir(trainer),
        )
        path = Path(self.output_dir) / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report_facts(self.report), indent=2) + "\n", encoding="utf-8")


def _gather(own: dict[str, float], trainer: pl.Trainer) -> list[dict[str, float]]:
    """The numbers of every rank that takes part in collectives, in rank order."""
    if trainer.world_size == 1:
        return [own]
    present = "present"  # ranks that do not take part leave a row of zeros
    table = torch.zeros(trainer.world_size, len(own) + 1, dtype=torch.float64, device=trainer.strategy.root_device)
    table[trainer.global_rank] = torch.tensor([*own.values(), 1.0])
    rows = trainer.strategy.reduce(table, reduce_op="sum").tolist()
    return [facts for row in rows if (facts := dict(zip([*own, present], row, strict=True)))[present]]


def _row(facts: Mapping[str, float], summaries: Mapping[int, RankTotals] | None) -> RankRow:
    rank = int(facts["rank"])
    if summaries is None:
        summary = RankTotals(samples=int(facts["samples"]), pushes=int(facts["steps"]))
    else:
        summary = summaries.get(rank, RankTotals())
    return RankRow(rank=rank, summary=summary, train_s=facts["train_s"], idle_s=facts["idle_s"])


def _metric(trainer: pl.Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)


def _event_dir(trainer: pl.Trainer) -> str | None:
    # Not trainer.log_dir: reading it is a collective, and only rank 0 is here.
    return next(
        (logger.log_dir.rstrip("/") for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _number(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.1f}"
