"""Samples a second with more and more ranks; compute is modelled by sleeping, so that ranks may outnumber cores."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_g2.cli.bench import plot
from lightning_g2.cli.bench.fits import run_fits
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

SUMMARY = "samples a second of 1, 2 and 4 ranks, DDP against g2async; sleep-modelled compute"
_WARMUP = 10
_INPUTS, _BATCH = 256, 1
_RIVALS: tuple[tuple[str, str, dict[str, Any]], ...] = (("ddp", "", {}), ("g2async", "none", {"gate": "none"}))
_COLUMNS = {
    "strategy": "{}", "gate": "{}", "ranks": "{}", "samples_per_s": "{:.1f}", "ratio_to_ddp": "{:.3f}",
    "efficiency": "{:.3f}",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    add_output_arguments(parser, repeats=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="a batch's compute, slept")
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the model")
    parser.add_argument("--steps", type=int, default=70, help=f"steps of a rank and repeat; {_WARMUP} warm it up")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    if args.quick:
        args.ranks, args.sleep_ms, args.megabytes, args.repeats, args.steps = [1, 2], 2.0, 0.1, 1, 30
    announce(
        f"scaling: regression of {args.megabytes:g} MB, batch {_BATCH}, compute sleep-modelled, {args.sleep_ms:g} ms",
        repeats=args.repeats,
        notes=["efficiency: samples a second over ranks times batch over the slept time"],
    )
    records = [record for ranks in args.ranks for record in measure(args, ranks)]
    present(records, _COLUMNS, args, plot.scaling)
    return 0


def measure(args: argparse.Namespace, ranks: int) -> list[Record]:
    """One record a strategy at a number of ranks: medians over interleaved repeats.

    Args:
        args: what :func:`add_arguments` declares.
        ranks: number of ranks.
    """
    workload = {
        "kind": "regression", "inputs": _INPUTS, "outputs": max(1, round(args.megabytes * 1e6 / 4 / _INPUTS)),
        "sleep_s": args.sleep_ms / 1e3, "batch": _BATCH, "samples": _BATCH * ranks * (args.steps + 1),
    }  # fmt: skip
    fits = [
        {
            "strategy": strategy, "options": options,
            "max_steps": args.steps * (ranks if strategy == "g2async" else 1),
            "module": {"update_batch": _BATCH * (ranks if strategy == "ddp" else 1)},
        }
        for _ in range(args.repeats)
        for strategy, _, options in _RIVALS
    ]  # fmt: skip
    done = run_fits(workload, fits, ranks=ranks)
    rows = [
        [{"samples_per_s": fit.samples_per_s(skip=_WARMUP * ranks)} for fit in done[i :: len(_RIVALS)]]
        for i in range(len(_RIVALS))
    ]
    paces = [medians(of_one)["samples_per_s"] for of_one in rows]
    return [
        {
            "strategy": strategy, "gate": gate, "ranks": ranks, "samples_per_s": pace, "ratio_to_ddp": pace / paces[0],
            "efficiency": pace * args.sleep_ms / 1e3 / (ranks * _BATCH), "compute": "sleep-modelled",
            "samples_per_s_range": spread(of_one, "samples_per_s"), "repeats": args.repeats,
            "config": config_hash(done[i].config), "machine": machine(),
        }
        for i, ((strategy, gate, _), of_one, pace) in enumerate(zip(_RIVALS, rows, paces, strict=True))
    ]  # fmt: skip
