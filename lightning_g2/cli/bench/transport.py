"""A push and pull through each transport against gloo's all-reduce of two ranks and two plain copies."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from lightning_g2.cli.bench import plot
from lightning_g2.cli.bench.record import (
    Record,
    add_output_arguments,
    announce,
    config_hash,
    machine,
    medians,
    present,
    spread,
)
from lightning_g2.errors import G2Error

SUMMARY = "push and pull of each transport against gloo all_reduce of two ranks"
_LIMIT_S = 600.0
_COLUMNS = {
    "transport": "{}", "bytes": "{:,}", "push_pull_s": "{:.5f}", "apply_s": "{:.5f}", "load_s": "{:.5f}",
    "gloo_all_reduce_s": "{:.5f}", "ratio": "{:.3f}", "ratio_with_load": "{:.3f}", "ratio_to_two_memcpy": "{:.2f}",
    "mb_per_s": "{:.0f}",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    add_output_arguments(parser, repeats=21)
    parser.add_argument("--transports", nargs="+", default=["shm", "rpc"], choices=("shm", "rpc"))
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 10.0, 100.0])


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    if args.quick:
        args.megabytes, args.repeats = [0.1, 1.0], 3
    announce(
        "transport: one rank and one server process, float32 gradients in, weights out; the server steps SGD",
        repeats=args.repeats,
        notes=[
            "push_pull_s: from gradients in their tensors to new weights in the rank's memory, with SGD on the server "
            "(apply_s); load_s: from there into the module",
            "ratio: push_pull_s over gloo; ratio_to_two_memcpy: without apply_s, over two copies of the same bytes",
        ],
    )
    records = [record for name in args.transports for record in measure(args, name)]
    present(records, _COLUMNS, args, plot.transport)
    return 0


def measure(args: argparse.Namespace, transport: str) -> list[Record]:
    """One record a size: medians over interleaved repeats.

    Args:
        args: what :func:`add_arguments` declares.
        transport: its name.
    """
    config = {
        "transport": transport, "sizes": [round(m * 1e6) for m in args.megabytes], "repeats": args.repeats,
    }  # fmt: skip
    records = []
    for size, rows in zip(config["sizes"], _exchanged(config), strict=True):
        middle = medians(rows)
        transfer_s = middle["push_pull_s"] - middle["apply_s"]
        records.append({
            "transport": transport, "bytes": size, **middle, "transfer_s": transfer_s,
            "ratio": middle["push_pull_s"] / middle["gloo_all_reduce_s"],
            "ratio_with_load": (middle["push_pull_s"] + middle["load_s"]) / middle["gloo_all_reduce_s"],
            "ratio_to_two_memcpy": transfer_s / middle["memcpy_s"],
            "mb_per_s": 2 * size / 1e6 / middle["push_pull_s"],
            "push_pull_s_range": spread(rows, "push_pull_s"), "repeats": args.repeats,
            "config": config_hash(config), "machine": machine(),
        })  # fmt: skip
    return records


def _exchanged(config: dict[str, Any]) -> list[list[Record]]:
    """Rows of each size, from two processes of :mod:`lightning_g2.cli.bench.exchange`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", "-m", "lightning_g2.cli.bench.exchange", json.dumps(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise G2Error(f"the benchmark's process ended with exit code {done.returncode}; it wrote:\n{done.stderr}")
    rows: list[list[Record]] = json.loads(done.stdout.splitlines()[-1])
    return rows
