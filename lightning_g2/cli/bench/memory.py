"""Memory of a rank beyond plain Lightning's, and of the server; gate none, weights pulled fresh."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_g2.cli.bench import plot
from lightning_g2.cli.bench.fits import Fit, run_fits
from lightning_g2.cli.bench.record import (
    Record,
    add_output_arguments,
    announce,
    config_hash,
    machine,
    medians,
    present,
)

SUMMARY = "memory of ranks and server against plain Lightning's, each shared page counted once"
_INPUTS, _BATCH = 256, 1
_BATCHES = 8
_ROUNDING = 2**20
"""Bytes by which allocators and pages may round a limit up."""

_SMALL = 1_000  # weights of the model that shows what an interpreter takes by itself
_COLUMNS = {
    "process": "{}", "bytes": "{:,}", "beyond_bytes": "{:,}", "of_parameters": "{:.2f}", "limit_bytes": "{:,}",
    "within": "{}",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    add_output_arguments(parser, repeats=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the model")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    if args.quick:
        args.megabytes, args.repeats = 20.0, 1
    announce(
        f"memory: model of {args.megabytes:g} MB, SGD, {args.ranks} ranks, gate none, pull fresh, after {_BATCHES} "
        "batches",
        repeats=args.repeats,
        notes=["proportional set size of anonymous memory and memory files: a page mapped n times counts one n-th"],
    )
    records = measure(args)
    present(records, _COLUMNS, args, plot.memory)
    return 0


def measure(args: argparse.Namespace) -> list[Record]:
    """Records of a plain rank, of the job's ranks (their mean) and of the server.

    ``beyond_bytes`` is, of a rank, what it holds beyond a plain one with the same model; of the server, beyond one
    with next to no model. A segment that rank and server map counts half for each.

    Args:
        args: what :func:`add_arguments` declares.
    """
    outputs = max(1, round(args.megabytes * 1e6 / 4 / _INPUTS))
    size = 4 * _INPUTS * outputs
    plain = _run(args, "plain", outputs, 1)
    job = _run(args, "g2async", outputs, args.ranks)
    small = _run(args, "g2async", max(1, _SMALL // _INPUTS), args.ranks)
    held_plain = medians([{"bytes": _held(fit.ranks[0]["memory"])} for fit in plain])["bytes"]
    held = medians([{"bytes": sum(_held(r["memory"]) for r in fit.ranks) / args.ranks} for fit in job])["bytes"]
    server = medians([{"bytes": _held(fit.ranks[0]["server_memory"])} for fit in job])["bytes"]
    bare = medians([{"bytes": _held(fit.ranks[0]["server_memory"])} for fit in small])["bytes"]
    rows = (
        ("plain rank", held_plain, 0, None),
        ("g2async rank", held, held - held_plain, 1.1 * 2 * size),
        ("server", server, server - bare, (1 + args.ranks) * size),
    )
    return [
        {
            "process": process, "bytes": round(held), "beyond_bytes": round(beyond), "of_parameters": beyond / size,
            "limit_bytes": None if limit is None else round(limit),
            "within": limit is None or beyond <= limit + _ROUNDING,
            "ranks": args.ranks, "parameter_bytes": size, "gate": "none", "pull": "fresh", "repeats": args.repeats,
            "config": config_hash(job[0].config), "machine": machine(),
        }
        for process, held, beyond, limit in rows
    ]  # fmt: skip


def _run(args: argparse.Namespace, strategy: str, outputs: int, ranks: int) -> list[Fit]:
    options: dict[str, Any] = {"gate": "none", "pull": "fresh"} if strategy == "g2async" else {}
    workload = {
        "kind": "regression", "inputs": _INPUTS, "outputs": outputs, "sleep_s": 0.02, "batch": _BATCH,
        "samples": _BATCH * ranks * 4 * _BATCHES,
    }  # fmt: skip
    fit = {
        "strategy": strategy, "options": options, "max_steps": 2 * _BATCHES * ranks, "memory_at": _BATCHES,
        "module": {"update_batch": _BATCH},
    }  # fmt: skip
    # A process of its own for each repeat: one that has trained before has memory left over.
    return [run_fits(workload, [fit], ranks=ranks, frees_memory=True)[0] for _ in range(args.repeats)]


def _held(memory: dict[str, int]) -> int:
    return memory["anonymous"] + memory["shared"]
