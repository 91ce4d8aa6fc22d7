"""What every experiment leaves: a Markdown table, CSV, a picture, and records as JSON."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Names and plain values."""

Columns = Mapping[str, Callable[[Row], str]]
"""By heading, what makes a cell of a row."""


def add_output_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Options that all experiments share.

    Args:
        parser: of the experiment.
        name: of the experiment.
    """
    parser.add_argument("--out", type=Path, default=Path("sources", name), help="folder for table, CSV and picture")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="also write all records here, a list")


def present(
    args: argparse.Namespace,
    *,
    title: str,
    records: Sequence[Row],
    rows: Sequence[Row],
    columns: Columns,
    draw: Callable[[Any], None],
    notes: Sequence[str] = (),
) -> None:
    """Print the table, and write table, CSV, picture and records.

    Args:
        args: what :func:`add_output_arguments` declares.
        title: what was done, in a line.
        records: one for each training or measurement.
        rows: of the table.
        columns: of the table.
        draw: draws into a ``matplotlib.figure.Figure``.
        notes: sentences below the table.
    """
    text = "\n\n".join([title, markdown(rows, columns), *notes]) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    write_csv(rows, args.out / "table.csv")
    if not picture(draw, args.out / "table.png", title=title):
        print("no picture: matplotlib is not installed (pip install 'lightning_g2[plot]')", file=sys.stderr)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(list(records), indent=2) + "\n", encoding="utf-8")
    print(text, end="")


def markdown(rows: Sequence[Row], columns: Columns) -> str:
    """A table of rows."""
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write rows with all digits; lists become text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def picture(draw: Callable[[Any], None], path: Path, *, title: str) -> bool:
    """Draw into a PNG.

    Returns:
        Whether there is a picture: not without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    draw(figure)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=100)
    return True


def mean(values: Sequence[float]) -> float:
    """Mean; NaN of nothing."""
    return statistics.fmean(values) if values else float("nan")


def spread(values: Sequence[float]) -> float:
    """Standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def plus_minus(values: Sequence[float], digits: int = 3, *, sign: str = "") -> str:
    """Mean ± standard deviation as text; the mean alone for a single value.

    Args:
        values: at least one.
        digits: behind the point.
        sign: ``"+"`` writes the sign of positive means, too.
    """
    tail = f" ± {spread(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.{digits}f}{tail}"


def grouped(records: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Records by the values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups
