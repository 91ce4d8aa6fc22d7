"""Rows of the routing study, and the files that show them."""

from __future__ import annotations

import csv
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lightning_g2.cli.bench.trial import FLOOR, Record


@dataclass(frozen=True)
class Row:
    """One rule at its own best rate.

    Attributes:
        rule: the rule.
        lr: its best rate on the validation batches.
        at_edge: that is an end of the grid, so a better one may lie outside.
        seeds: trainings at that rate.
        loss: mean terminal loss on the test batches.
        spread: its standard deviation between seeds; 0 for one seed.
        gap_closed: part of the way from ``none`` to the floor, where both were run.
        staleness: mean, versions.
        openness_first: mean weight over the first fifth of the pushes.
        openness_last: the same over the last fifth.
        unused: share of pushes that were rejected, or late for their round.
    """

    rule: str
    lr: float
    at_edge: bool
    seeds: int
    loss: float
    spread: float
    gap_closed: float | None
    staleness: float
    openness_first: float
    openness_last: float
    unused: float


def rows_of(finals: dict[str, list[Record]], records: Sequence[Record]) -> list[Row]:
    """Rows, best rule first.

    Args:
        finals: by rule, the trainings at its best rate.
        records: all trainings, with each rule's grid.
    """
    means = {rule: statistics.fmean(r.terminal_loss for r in records) for rule, records in finals.items()}
    gap = means["none"] - means[FLOOR] if {"none", FLOOR} <= means.keys() else 0.0
    rows = []
    for rule, final in finals.items():
        losses = [record.terminal_loss for record in final]
        rates = {record.lr for record in records if record.rule == rule}
        rows.append(
            Row(
                rule=rule,
                lr=final[0].lr,
                at_edge=len(rates) > 1 and final[0].lr in (min(rates), max(rates)),
                seeds=len(final),
                loss=means[rule],
                spread=statistics.stdev(losses) if len(losses) > 1 else 0.0,
                gap_closed=(means["none"] - means[rule]) / gap if gap > 0.0 else None,
                staleness=statistics.fmean(r.staleness_mean for r in final),
                openness_first=statistics.fmean(r.openness_first for r in final),
                openness_last=statistics.fmean(r.openness_last for r in final),
                unused=statistics.fmean(r.unused for r in final),
            )
        )
    return sorted(rows, key=lambda row: row.loss if math.isfinite(row.loss) else math.inf)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| rule | best rate | loss | seeds | gap closed | staleness | openness, first / last fifth | unused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = f"{row.lr:g}{' (edge of the grid)' if row.at_edge else ''}"
        spread = f" ± {row.spread:.3f}" if row.seeds > 1 else ""
        closed = "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"
        lines.append(
            f"| {row.rule} | {rate} | {row.loss:.4f}{spread} | {row.seeds} | {closed} | {row.staleness:.1f} | "
            f"{row.openness_first:.2f} / {row.openness_last:.2f} | {row.unused:.1%} |"
        )
    return "\n".join(lines) + "\n"


def openness_table(finals: dict[str, list[Record]]) -> str:
    """Openness by fifths of the pushes, over all of them and over stale ones; rules that pass all are left out."""
    lines = ["| rule | openness by fifths, all pushes | pushes with τ > 0 |", "|---|---|---|"]
    for rule, records in finals.items():
        everything = [_mean_of([r.openness[k] for r in records]) for k in range(5)]
        stale = [_mean_of([r.openness_stale[k] for r in records]) for k in range(5)]
        if any(value is not None and value < 1.0 for value in everything):
            lines.append(f"| {rule} | {_listed(everything)} | {_listed(stale)} |")
    return "\n".join(lines) + "\n"


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _listed(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.2f}" for value in values)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write the rows with all digits."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def draw(rows: Sequence[Row], records: Sequence[Record], path: Path, *, title: str) -> bool:
    """Draw terminal losses, and how each rule's loss depends on the rate.

    Returns:
        Whether there is a picture: not without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    from matplotlib import colormaps

    finite = [row for row in rows if math.isfinite(row.loss)]
    colours = {row.rule: colormaps["tab20"](i % 20) for i, row in enumerate(finite)}
    figure = Figure(figsize=(12, 1.5 + 0.34 * max(8, len(rows))), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    names = ["\n".join(textwrap.wrap(row.rule, 44)) for row in finite]
    losses, spreads = [row.loss for row in finite], [row.spread for row in finite]
    bars.barh(names, losses, xerr=spreads, color=list(colours.values()))
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=7)
    bars.set(title="terminal loss at each rule's best rate", xlabel="loss on test batches")
    screening = records[0].seed if records else 0
    for row in finite:
        points = sorted({(r.lr, r.validation_loss) for r in records if r.rule == row.rule and r.seed == screening})
        points = [(lr, loss) for lr, loss in points if math.isfinite(loss)]
        curves.plot([lr for lr, _ in points], [loss for _, loss in points], "o-", ms=3, color=colours[row.rule])
    curves.set(title="loss by learning rate, colours as on the left", xlabel="learning rate", xscale="log")
    curves.set_ylabel("loss on validation batches")
    if finite:  # rates that all but diverged would hide the others
        curves.set_ylim(0.95 * min(losses), 1.5 * max(losses))
    for axes in (bars, curves):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=100)
    return True
