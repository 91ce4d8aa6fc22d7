"""Decoupled forward and backward threads against workers that do both in one, asynchronous and in step."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_g2.cli.bench import pd_plot
from lightning_g2.cli.bench.pd_jobs import build_job
from lightning_g2.cli.bench.pd_workers import Outcome, asynchronous, averaged, synchronous
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
from lightning_g2.decoupled import DecoupledOptions, free_threaded
from lightning_g2.decoupled.scheduler import Cost
from lightning_g2.decoupled.versions import mean

SUMMARY = "decoupled forward and backward threads: ratios, delays, update units; one process, real or slept compute"
_BETA = 2.0
_COLUMNS = {
    "mode": "{}", "forward_threads": "{}", "backward_threads": "{}", "workers": "{}", "delay": "{:g}",
    "modelled": "{}", "batch_s": "{:.4f}", "samples_per_s": "{:.0f}", "of_ideal": "{:.2f}", "ratio_to_plain": "{:.2f}",
    "ratio_to_ddp": "{:.2f}", "ratio_to_lpp": "{:.2f}", "accuracy": "{:.3f}", "time_to_accuracy_s": "{:.2f}",
    "lag_mean": "{:.2f}", "age_mean": "{:.2f}", "mixed_reads": "{:.2f}", "peak_graphs": "{}",
}  # fmt: skip


@dataclass(frozen=True)
class Rival:
    """One line of the comparison.

    Attributes:
        mode: as the record calls it.
        options: of each worker's threads.
        workers: how many, the last of them slower.
        delay: how many times slower.
        in_step: gradients are averaged step by step instead.
        replicas: copies of the weights that workers are spread over, averaged while they go on.
    """

    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    delay: float = 1.0
    in_step: bool = False
    replicas: int = 1

    @property
    def threads(self) -> tuple[int, int]:
        """Forward and backward threads of a worker; no backward threads where one thread does both."""
        return self.options.get("forward_threads", 1), self.options.get("backward_threads", 0)


_ONE = {"backward_threads": 0, "update": "block"}


def rivals(args: argparse.Namespace) -> list[Rival]:
    """The lines of the comparison, plain training first."""
    lines = [Rival("plain", _ONE)]
    for forward, backward in args.ratios:
        threads = {
            "forward_threads": forward, "backward_threads": backward, "max_graphs": args.max_graphs,
            "weights": args.weights,
        }  # fmt: skip
        lines += [Rival("pd" if unit == "layer" else "block", {**threads, "update": unit}) for unit in args.units]
    for delay in args.delays:
        several: dict[str, Any] = {"workers": args.workers, "delay": delay}
        lines += [
            Rival("ddp", in_step=True, **several),
            Rival("hogwild", _ONE, **several),
            Rival("lap", {**_ONE, "private_state": True}, **several),
            Rival("lap2", {**_ONE, "private_state": True}, replicas=2, **several),
            Rival("lpp", {**_ONE, "private_state": True, "own_block_after": args.batches // 10}, **several),
            Rival("pd", {"backward_threads": 2}, **several),
        ]
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options.

    Args:
        parser: of the subcommand.
    """
    add_output_arguments(parser, repeats=3)
    parser.add_argument(
        "--compute", default="sleep", choices=("sleep", "conv", "digits", "gpt"), help="slept, or a real network"
    )
    parser.add_argument("--ratios", type=_ratio, nargs="*", default=[(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)],
                        metavar="F:B", help="forward : backward threads of one worker")  # fmt: skip
    parser.add_argument("--max-graphs", type=int, default=None, help="most batches under way of those lines")
    parser.add_argument("--weights", default="current", choices=("current", "stashed"), help="of those lines")
    parser.add_argument("--units", nargs="+", default=["layer", "block"], choices=("layer", "block"))
    parser.add_argument("--workers", type=int, default=3, help="of the lines with delays; the last is slow")
    parser.add_argument("--delays", type=float, nargs="*", default=[1, 2, 4, 8], help="times slower; sleep only")
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="a forward pass; a backward pass is twice that")
    parser.add_argument("--jitter", type=float, default=0.3, help="spread of each layer's sleep, 0 to 1")
    parser.add_argument("--layers", type=int, default=4, help="of the network that sleeps")
    parser.add_argument("--batches", type=int, default=300, help="batches of a run, all workers' together")
    parser.add_argument("--batch", type=int, default=32, help="samples a batch")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate of SGD with momentum .9")
    parser.add_argument("--target", type=float, default=0.7, help="accuracy to reach")


def _ratio(text: str) -> tuple[int, int]:
    forward, backward = text.split(":")
    return int(forward), int(backward)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.

    Returns:
        Exit code 0.
    """
    if args.quick:
        args.ratios, args.delays, args.batches, args.sleep_ms = [(1, 1), (1, 2)], [4.0], 24, 2.0
        args.batch, args.repeats = min(args.batch, 8), 1
    if args.compute != "sleep":
        args.delays = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    compute = f"slept, {args.sleep_ms:g} ms forward" if args.compute == "sleep" else f"a real {args.compute} network"
    announce(
        f"pd: {args.batches} batches of {args.batch}, compute {compute}, backward {_BETA:g} times forward if slept",
        repeats=args.repeats,
        notes=[
            "threads of one process; "
            + ("no global lock" if free_threaded() else "Python's global lock is held between torch's operations"),
            "ddp: workers in step, each with a copy; others share the weights; ratios are of samples a second",
            "lap2: workers on two sets of weights, which an averager pulls together while they go on (LAP-SGD)",
            "of_ideal: over plain, over (1+β)/max(1/f, β/b); lag: versions within the backward pass, age: in all",
        ],
    )
    try:
        records = measure(args)
    finally:
        torch.set_num_threads(threads)
    present(records, _COLUMNS, args, pd_plot.draw)
    return 0


def measure(args: argparse.Namespace) -> list[Record]:
    """One record a rival: medians over interleaved repeats.

    Args:
        args: what :func:`add_arguments` declares.
    """
    lines = rivals(args)
    repeats: list[list[Record]] = []
    wide_rows: list[Record] = []
    for repeat in range(args.repeats):
        repeats.append([_row(args, _outcome(args, rival, repeat)) for rival in lines])
        if args.compute != "sleep":
            wide_rows.append(_plain_with_two_threads(args, repeat))
    rows = [[of_all[i] for of_all in repeats] for i in range(len(lines))]
    wide = medians([{"pace": row["samples_per_s"]} for row in wide_rows]).get("pace")
    records = []
    for rival, of_one in zip(lines, rows, strict=True):
        record = _record(args, rival, of_one)
        record["layer_lags"] = of_one[-1]["layer_lags"]
        records.append(record)
    plain = records[0]["samples_per_s"]
    for record in records:
        alike = {r["mode"]: r["samples_per_s"] for r in records if r["workers"] == record["workers"] > 1
                 and r["delay"] == record["delay"]}  # fmt: skip
        forward, backward = record["forward_threads"], record["backward_threads"]
        pace = record["samples_per_s"]
        record["ratio_to_plain"] = pace / plain
        record["ratio_to_plain_wide"] = pace / wide if wide else None
        record["ratio_to_ddp"] = pace / alike["ddp"] if alike else None
        record["ratio_to_lpp"] = pace / alike["lpp"] if alike else None
        if record["modelled"] and backward and record["workers"] == 1:
            record["of_ideal"] = pace / plain / ((1 + _BETA) / max(1 / forward, _BETA / backward))
    return records


def _record(args: argparse.Namespace, rival: Rival, rows: list[Record]) -> Record:
    forward, backward = rival.threads
    plain_rows = [{k: v for k, v in row.items() if k != "layer_lags"} for row in rows]
    config = {**vars(args), "json": None, "plot": None, "run": None, "rival": vars(rival)}
    return {
        "mode": rival.mode, "forward_threads": forward, "backward_threads": backward, "workers": rival.workers,
        "delay": rival.delay, "modelled": args.compute == "sleep", "compute": _NAMES[args.compute],
        "update": rival.options.get("update", "layer"), "of_ideal": None, **medians(plain_rows),
        "samples_per_s_range": spread(rows, "samples_per_s"), "target": args.target, "repeats": args.repeats,
        "free_threaded": free_threaded(), "config": config_hash(config), "machine": machine(),
    }  # fmt: skip


_NAMES = {"sleep": "sleep-modelled", "conv": "conv", "digits": "digits", "gpt": "gpt"}


def _outcome(args: argparse.Namespace, rival: Rival, seed: int) -> Outcome:
    job = build_job(args, seed)
    modelled = args.compute == "sleep"
    slow = rival.workers - 1
    costs = [
        _cost(args, seed + worker, rival.delay if worker == slow else 1.0) if modelled else None
        for worker in range(rival.workers)
    ]
    if rival.in_step:
        return synchronous(job, costs)
    lpp = "own_block_after" in rival.options
    options = [
        DecoupledOptions(**{**rival.options, **({"own_block": (worker, rival.workers)} if lpp else {})})
        for worker in range(rival.workers)
    ]
    if rival.replicas > 1:
        return averaged(job, options, costs, rival.replicas)
    return asynchronous(job, options, costs)


def _cost(args: argparse.Namespace, seed: int, slowness: float) -> Cost:
    """Sleeps of one worker's layers; their mean does not depend on the spread."""
    draw = random.Random(seed)
    each = args.sleep_ms / 1e3 / args.layers * slowness
    return lambda which, layer: (
        draw.uniform(1 - args.jitter, 1 + args.jitter) * each * (1.0 if which == "forward" else _BETA)
    )


def _row(args: argparse.Namespace, outcome: Outcome) -> Record:
    reached = outcome.reached(args.target)
    reports = outcome.reports
    lags: Counter[int] = sum((lag for r in reports for lag in r.lags().values()), Counter())
    ages: Counter[int] = sum((age for r in reports for age in r.ages().values()), Counter())
    return {
        "batch_s": outcome.seconds / args.batches,
        "samples_per_s": args.batches * args.batch / outcome.seconds,
        "accuracy": outcome.scores[-1][2] if outcome.scores else None,
        "time_to_accuracy_s": None if reached is None else reached[0],
        "samples_to_accuracy": None if reached is None else reached[1] * args.batch,
        "lag_mean": mean(lags) if reports else None,
        "age_mean": mean(ages) if reports else None,
        "layer_lags": [mean(lag) for lag in reports[0].lags().values()] if reports else [],
        "mixed_reads": sum(r.mixed_reads for r in reports) / len(reports) if reports else None,
        "forward_utilisation": sum(r.utilisation("forward") for r in reports) / len(reports) if reports else None,
        "backward_utilisation": sum(r.utilisation("backward") for r in reports) / len(reports) if reports else None,
        "peak_graphs": sum(r.peak_graphs for r in reports) if reports else None,
        "peak_memory_bytes": outcome.memory_bytes,
    }


def _plain_with_two_threads(args: argparse.Namespace, seed: int) -> Record:
    """Plain training with two intra-op threads."""
    torch.set_num_threads(2)
    try:
        return _row(args, _outcome(args, Rival("plain", _ONE), seed))
    finally:
        torch.set_num_threads(1)
