"""One slow rank among many: DDP, DDP without it, synchronous rounds of the first pushes, g2async."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
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

SUMMARY = "one slow rank: samples a second and time to a loss; sleep-modelled compute"
_INPUTS, _BATCH = 256, 1
_WARMUP = 3  # steps of a rank
_TARGET = 0.25
"""Loss to reach, relative to the expected one at the start."""

_COLUMNS = {
    "strategy": "{}", "gate": "{}", "factor": "{:g}", "samples_per_s": "{:.1f}", "ratio_to_ddp": "{:.2f}",
    "time_to_loss_s": "{:.2f}", "time_ratio_to_ddp": "{:.3f}", "idle_fraction": "{:.2f}", "staleness_mean": "{:.1f}",
}  # fmt: skip


@dataclass(frozen=True)
class Rival:
    """One line of the comparison.

    Attributes:
        name: as the record calls it.
        strategy: of the fit.
        options: of g2async.
        straggles: whether the slow rank is slow.
        averaged: ranks behind one update of the weights.
    """

    name: str
    strategy: str
    averaged: int
    options: dict[str, Any] = field(default_factory=dict)
    straggles: bool = True


def rivals(ranks: int, rounds: int) -> list[Rival]:
    """The lines of the comparison, DDP first.

    Args:
        ranks: number of ranks.
        rounds: pushes that end a synchronous round.
    """
    return [
        Rival("ddp", "ddp", ranks),
        Rival("ddp without straggler", "ddp", ranks, straggles=False),
        Rival(f"rounds m={rounds}", "g2async", rounds, {"gate": "none", "rounds": rounds}),
        Rival("g2async", "g2async", 1, {"gate": "none"}),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    add_output_arguments(parser, repeats=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--factor", type=float, default=8.0, help="how many times slower the last rank is")
    parser.add_argument("--rounds", type=int, default=None, help="pushes that end a synchronous round; ranks - 1")
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="a batch's compute on a fast rank, slept")
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the model")
    parser.add_argument("--steps", type=int, default=60, help="steps of a rank and repeat, on average")
    parser.add_argument("--target", type=float, default=_TARGET, help="loss to reach; it is about 1 at the start")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    if args.quick:
        args.ranks, args.factor, args.sleep_ms, args.megabytes = 3, 4.0, 5.0, 0.1
        args.repeats, args.steps, args.target = 1, 30, 0.9
    args.rounds = args.rounds or args.ranks - 1
    announce(
        f"stragglers: {args.ranks} ranks, the last {args.factor:g} times slower; regression of {args.megabytes:g} MB, "
        f"batch {_BATCH}, compute sleep-modelled, {args.sleep_ms:g} ms",
        repeats=args.repeats,
        notes=[
            f"only applied pushes count; time to a loss of {args.target:g}, mean of the job's latest {2 * args.ranks} "
            "batches, each on data never seen before",
            "idle: share of their time that ranks wait for others or for the server",
        ],
    )
    records = measure(args)
    present(records, _COLUMNS, args, plot.stragglers)
    print(f"ddp_idle_fraction {records[0]['ddp_idle_fraction']:.3f}")
    return 0


def measure(args: argparse.Namespace) -> list[Record]:
    """One record a rival: medians over interleaved repeats.

    Args:
        args: what :func:`add_arguments` declares.
    """
    lines = rivals(args.ranks, args.rounds)
    workload = {
        "kind": "regression", "inputs": _INPUTS, "outputs": max(1, round(args.megabytes * 1e6 / 4 / _INPUTS)),
        "sleep_s": args.sleep_ms / 1e3, "batch": _BATCH, "samples": _BATCH * args.ranks * (args.steps + 1),
    }  # fmt: skip
    fits = [_fit(args, rival) for _ in range(args.repeats) for rival in lines]
    done = run_fits(workload, fits, ranks=args.ranks)
    rows = [[_row(fit, args) for fit in done[i :: len(lines)]] for i in range(len(lines))]
    middles = [medians(of_one) for of_one in rows]
    ddp = middles[0]
    return [
        {
            "strategy": rival.name, "gate": rival.options.get("gate", ""), "factor": _slowness(args, rival),
            "ranks": args.ranks, **middle, "ratio_to_ddp": middle["samples_per_s"] / ddp["samples_per_s"],
            "time_ratio_to_ddp": _ratio(middle["time_to_loss_s"], ddp["time_to_loss_s"]),
            "ddp_idle_fraction": ddp["idle_fraction"], "compute": "sleep-modelled", "target_loss": args.target,
            "samples_per_s_range": spread(of_one, "samples_per_s"),
            "time_to_loss_s_range": spread(of_one, "time_to_loss_s"),
            "repeats": args.repeats, "config": config_hash(done[i].config), "machine": machine(),
        }
        for i, (rival, middle, of_one) in enumerate(zip(lines, middles, rows, strict=True))
    ]  # fmt: skip


def _fit(args: argparse.Namespace, rival: Rival) -> dict[str, Any]:
    steps = args.steps * (args.ranks if rival.strategy == "g2async" else 1)  # there the limit is the job's
    return {
        "strategy": rival.strategy, "options": rival.options, "max_steps": steps,
        "module": {
            "update_batch": _BATCH * rival.averaged, "slow_rank": args.ranks - 1, "factor": _slowness(args, rival),
        },
    }  # fmt: skip


def _slowness(args: argparse.Namespace, rival: Rival) -> float:
    return float(args.factor) if rival.straggles else 1.0


def _row(fit: Fit, args: argparse.Namespace) -> Record:
    totals = fit.ranks[0].get("totals")
    return {
        "samples_per_s": fit.samples_per_s(skip=_WARMUP * args.ranks, slow_rank=args.ranks - 1),
        "time_to_loss_s": fit.time_to_loss_s(args.target, window=2 * args.ranks),
        "idle_fraction": fit.idle_fraction,
        "staleness_mean": _mean_staleness(totals) if totals else 0.0,
    }


def _mean_staleness(totals: dict[str, Any]) -> float:
    pushes = [one["pushes"] + one["rejected"] for one in totals.values()]
    return float(sum(one["staleness_mean"] * n for one, n in zip(totals.values(), pushes, strict=True)) / sum(pushes))


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other
