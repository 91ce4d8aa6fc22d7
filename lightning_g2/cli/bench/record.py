"""Flat records of a benchmark: a table for people, JSON for programs."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
"""One row: names and plain values."""


def add_output_arguments(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """Options that all benchmarks of whole jobs share.

    Args:
        parser: of the subcommand.
        repeats: default number of repeats.
    """
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved repeats; medians are reported")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; numbers mean nothing")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the records, a list, here")
    parser.add_argument("--plot", type=Path, default=None, metavar="PATH", help="draw them into this PNG")


def machine() -> str:
    """This machine in a line: processor, cores that may be used, torch, threads a process, load when asked."""
    with open("/proc/cpuinfo", encoding="utf-8") as table:
        model = next((line.split(":")[1].strip() for line in table if line.startswith("model name")), "")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    return (
        f"{model or platform.machine()}, {cores} cores, {platform.system()} {platform.release()}, "
        f"torch {torch.__version__}, OMP_NUM_THREADS={threads}, load {load:.1f}"
    )


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of SHA-256 over a resolved configuration; alike for like ones."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def medians(rows: Sequence[Mapping[str, Any]]) -> Record:
    """Median of each numeric field over repeats; fields that are missing or None in all of them are None."""
    result: Record = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        result[name] = statistics.median(values) if values else None
    return result


def spread(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Least and greatest value of a field over repeats; empty where there is none."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return [min(values), max(values)] if values else []


def present(
    records: Sequence[Record],
    columns: Mapping[str, str],
    args: argparse.Namespace,
    draw: Callable[[Sequence[Record], Path], None],
) -> None:
    """Print the table, and write and draw the records where the options ask for it.

    Args:
        records: the rows.
        columns: see :func:`format_table`.
        args: what :func:`add_output_arguments` declares.
        draw: draws the records into a file.
    """
    print(format_table(records, columns))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(list(records), indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(records, args.plot)


def format_table(records: Sequence[Record], columns: Mapping[str, str]) -> str:
    """A right-aligned table.

    Args:
        records: the rows.
        columns: format of each field to show, by its name: a format specification, ``{}`` for text.

    Returns:
        Lines joined by newlines.
    """
    cells = [list(columns), *([_cell(r.get(name), form) for name, form in columns.items()] for r in records)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def announce(title: str, *, repeats: int, notes: Iterable[str] = ()) -> None:
    """What is measured, and where: printed before the table."""
    print(f"{title}\nmachine: {machine()}\nmedians of {repeats} interleaved repeats", flush=True)
    for note in notes:
        print(note, flush=True)
    print(flush=True)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
