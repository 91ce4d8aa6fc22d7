"""Bytes on the wire of a gradient, and of 14-vectors in its place."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

from lightning_g2.cli.bench.kept import KeptRows
from lightning_g2.cli.bench.sources.output import Row, add_output_arguments, present
from lightning_g2.cli.bench.sources.wire import WHATS
from lightning_g2.errors import G2Error
from lightning_g2.routing.option import require

SUMMARY = "bytes on the wire of a gradient against one 14-vector per model and per block, in a real run"

DIMENSIONS = 14
_SIZES = ((96, 4), (256, 6))  # width, layers: half a million and five million parameters
_LIMIT_S = 600.0
_CLAIMED = 5_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    parser.add_argument(
        "--sizes", nargs="+", default=[f"{w}x{n}" for w, n in _SIZES], metavar="WIDTHxLAYERS", help="of the GPT"
    )
    parser.add_argument("--pushes", type=int, default=6, help="that are counted")
    add_output_arguments(parser, "compression")


def run(args: argparse.Namespace) -> None:
    """Run the jobs, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    require(args.pushes >= 1, "pushes", args.pushes, "be ≥ 1", "6 will do")
    configs = [config_of(size, args.pushes) for size in args.sizes]
    kept = KeptRows(args.out / "runs.jsonl")
    runs: list[list[Row]] = [kept.get(config, partial(measured, config))["rows"] for config in configs]
    rows = [row for own in runs for row in ratios(own)]
    present(
        args,
        title=f"A GPT's pushes to a server process over sockets, {args.pushes} pushes each",
        records=[record for own in runs for record in own],
        rows=rows,
        columns={
            "parameters": lambda r: f"{r['parameters']:,}",
            "what is sent": lambda r: r["what"],
            "bytes of it a push, server's count": lambda r: f"{r['gradient_bytes']:,.0f}",
            "ratio": lambda r: f"{r['ratio']:,.0f}",
            "bytes a push to the server, kernel's count": lambda r: f"{r['wire_bytes_out']:,.0f}",
            "ratio on the wire": lambda r: f"{r['wire_ratio']:,.0f}",
            "bytes a push back": lambda r: f"{r['wire_bytes_in']:,.0f}",
            "of the drift's squared length": lambda r: f"{r['kept']:.2g}",
        },
        draw=lambda figure: _draw(figure, rows),
        notes=[arithmetic()],
    )


def ratios(rows: list[Row]) -> list[Row]:
    """Rows with what each saves against the first of them."""
    whole = rows[0]
    return [
        {
            **row,
            "ratio": whole["gradient_bytes"] / row["gradient_bytes"],
            "wire_ratio": whole["wire_bytes_out"] / row["wire_bytes_out"],
        }
        for row in rows
    ]


def arithmetic() -> str:
    """What 14 numbers in place of P are, for the figures that are in circulation."""
    ratio = _CLAIMED / DIMENSIONS
    return (
        f'"5M parameters, 35,000×" does not add up: {_CLAIMED:,} numbers over {DIMENSIONS} are {ratio:,.0f}×, and '
        f"35,000 × {DIMENSIONS} = {35_000 * DIMENSIONS:,}, so it is 0.5M parameters or 357,143×."
    )


def config_of(size: str, pushes: int) -> dict[str, Any]:
    """A job by the text of its size.

    Args:
        size: width and layers of the GPT, as in ``"96x4"``.
        pushes: that are counted.

    Raises:
        ConfigurationError: it is not of that form.
    """
    width, _, layers = size.partition("x")
    sound = width.isdigit() and layers.isdigit() and int(width) >= 8 and int(width) % 4 == 0 and int(layers) >= 1
    require(sound, "sizes", size, "be WIDTHxLAYERS with a width that is a multiple of 4", "try 96x4")
    return {
        "width": int(width), "layers": int(layers), "heads": 4, "block": 64, "batch": 2, "pushes": pushes,
        "whats": list(WHATS),
    }  # fmt: skip


def measured(config: dict[str, Any]) -> Row:
    """Rows of one size, from a process of :mod:`lightning_g2.cli.bench.sources.wire`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", "-m", "lightning_g2.cli.bench.sources.wire", json.dumps(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise G2Error(f"the benchmark's process ended with exit code {done.returncode}; it wrote:\n{done.stderr}")
    return {"rows": json.loads(done.stdout.splitlines()[-1])}


def _draw(figure: Any, rows: list[Row]) -> None:
    (axes,) = figure.subplots(1, 1, squeeze=False)[0]
    names = [f"{row['what']}\n{row['parameters'] / 1e6:.1f}M" for row in rows]
    places = range(len(rows))
    for shift, field, label, colour in (
        (-0.27, "gradient_bytes", "of what is sent, server's count", "#4477aa"),
        (0.0, "wire_bytes_out", "to the server, kernel's count", "#cc6633"),
        (0.27, "wire_bytes_in", "back from the server", "#999999"),
    ):
        bars = axes.bar(
            [place + shift for place in places], [row[field] for row in rows], 0.26, color=colour, label=label
        )
        axes.bar_label(bars, [f"{row[field]:,.0f}" for row in rows], fontsize=7, rotation=30)
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set(yscale="log", ylabel="bytes a push")
    axes.set_ylim(top=30.0 * max(row["gradient_bytes"] for row in rows))  # room for numbers and legend
    axes.legend(fontsize=8, loc="upper right")
