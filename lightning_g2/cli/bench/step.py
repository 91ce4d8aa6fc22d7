"""Where the time of a step goes without any straggler: DDP against g2async, a GPT that really computes."""

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
    spread,
)

SUMMARY = "a step's time in parts, DDP against g2async, no straggler; a GPT of ten million parameters"
_WARMUP = 2
_CONTEXT = 256
_RIVALS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ddp", "", {}),
    ("g2async", "none", {"gate": "none"}),
    ("g2async", "default", {}),
)
"""Strategy, gate as the record calls it, options of the strategy."""

_COLUMNS = {
    "strategy": "{}", "gate": "{}", "samples_per_s": "{:.2f}", "ratio_to_ddp": "{:.3f}", "step_s": "{:.4f}",
    "compute_s": "{:.4f}", "gate_s": "{:.4f}", "copy_s": "{:.4f}", "wait_s": "{:.4f}", "apply_s": "{:.4f}",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    add_output_arguments(parser, repeats=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="model width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a rank's step, a multiple of 256")
    parser.add_argument("--steps", type=int, default=6, help=f"steps of a rank and repeat; {_WARMUP} warm it up")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    if args.quick:
        args.width, args.layers, args.tokens, args.repeats, args.steps = 64, 1, 256, 1, 4
    announce(
        f"step: GPT, width {args.width}, {args.layers} layers, {args.tokens} tokens a step, {args.ranks} ranks",
        repeats=args.repeats,
        notes=["wait is for the server or for other ranks; apply is the optimizer's step, on the server for g2async"],
    )
    records = measure(args)
    present(records, _COLUMNS, args, plot.step)
    return 0


def measure(args: argparse.Namespace) -> list[Record]:
    """One record a strategy and gate: medians over interleaved repeats.

    Args:
        args: what :func:`add_arguments` declares.
    """
    batch = max(1, args.tokens // _CONTEXT)
    workload = {
        "kind": "gpt", "width": args.width, "layers": args.layers, "heads": max(1, args.width // 64),
        "block_size": _CONTEXT, "schedule": "constant", "lr": 1e-3, "batch": batch,
        "samples": batch * args.ranks * (args.steps + 1),
    }  # fmt: skip
    fits = [_fit(args, strategy, options) for _ in range(args.repeats) for strategy, _, options in _RIVALS]
    done = run_fits(workload, fits, ranks=args.ranks)
    rows = [[_row(fit, args.ranks) for fit in done[i :: len(_RIVALS)]] for i in range(len(_RIVALS))]
    pace = medians(rows[0])["samples_per_s"]
    return [
        {
            "strategy": strategy, "gate": gate, "ranks": args.ranks, **medians(of_one),
            "ratio_to_ddp": medians(of_one)["samples_per_s"] / pace,
            "samples_per_s_range": spread(of_one, "samples_per_s"), "repeats": args.repeats,
            "config": config_hash(done[i].config), "machine": machine(),
        }
        for i, ((strategy, gate, _), of_one) in enumerate(zip(_RIVALS, rows, strict=True))
    ]  # fmt: skip


def _fit(args: argparse.Namespace, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    steps = args.steps * (args.ranks if strategy == "g2async" else 1)  # there the limit is the job's, not a rank's
    return {"strategy": strategy, "options": options, "max_steps": steps}


def _row(fit: Fit, ranks: int) -> Record:
    return {"samples_per_s": fit.samples_per_s(skip=_WARMUP * ranks), **fit.split_s(skip=_WARMUP)}
