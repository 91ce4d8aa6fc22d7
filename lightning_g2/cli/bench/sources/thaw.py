"""Does the gate open by itself while β stays: mean weight by fifths of a run, with and without a falling rate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from lightning_g2.cli.bench.sources.output import Row, add_output_arguments, grouped, mean, plus_minus, present
from lightning_g2.cli.bench.sources.training import (
    SMALL_MLP,
    SOURCE_RULE,
    Training,
    add_training_arguments,
    standard_error,
)
from lightning_g2.cli.bench.task import terminal_loss
from lightning_g2.cli.bench.trial import check_rule
from lightning_g2.tasks.schedule import warmup_cosine

SUMMARY = "openness by fifths of the run, β constant, under cosine decay and at a constant learning rate"

SCHEDULES = {"cosine": partial(warmup_cosine, warmup=0.0), "constant": None}
_FIFTHS = 5
_LEAST_RISE = 0.05
"""What is smaller is not called a thaw, however sure it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    add_training_arguments(parser, task=SMALL_MLP, pushes=600)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate, at its peak")
    parser.add_argument(
        "--rules", nargs="+", default=["g2", 'g2(scale="unit", beta=4)', SOURCE_RULE.format(beta=4.0)], help="gates"
    )
    add_output_arguments(parser, "thaw")


def run(args: argparse.Namespace) -> None:
    """Train, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    for rule in args.rules:
        check_rule(rule, args.ranks)
    training = Training.of(args)
    records = [
        training.row(
            partial(_trained, training, rule, schedule, seed), rule=rule, schedule=schedule, seed=seed, lr=args.lr
        )
        for rule in args.rules
        for schedule in SCHEDULES
        for seed in args.seeds
    ]  # fmt: skip
    rows = []
    for (rule, schedule), group in grouped(records, "rule", "schedule").items():
        rises = [rise(r["stale"]) for r in group]
        rows.append({
            "rule": rule, "schedule": schedule, "rise": plus_minus(rises, 2, sign="+"),
            "loss": plus_minus([r["terminal_loss"] for r in group]),
            **{what: [mean([r[what][fifth] for r in group]) for fifth in range(_FIFTHS)] for what in ("all", "stale")},
        })  # fmt: skip
    names = {rule: verdict(*(_rises(records, rule, s) for s in ("constant", "cosine"))) for rule in args.rules}
    present(
        args,
        title=f"{training.title}, rate {args.lr:g}",
        records=records,
        rows=rows,
        columns={
            "rule": lambda r: r["rule"],
            "rate": lambda r: r["schedule"],
            "openness by fifths, all pushes": lambda r: " ".join(f"{value:.2f}" for value in r["all"]),
            "τ > 0": lambda r: " ".join(f"{value:.2f}" for value in r["stale"]),
            "last less first fifth, τ > 0": lambda r: r["rise"],
            "loss": lambda r: r["loss"],
        },
        draw=lambda figure: _draw(figure, rows),
        notes=[f"`{rule}`: {name}." for rule, name in names.items()],
    )


def fifths(weights: Sequence[float], staleness: Sequence[int], *, stale_only: bool) -> list[float]:
    """Mean weight over each fifth of the pushes; NaN for a fifth without such pushes.

    Args:
        weights: of each push; 0 for a rejected one.
        staleness: of each push.
        stale_only: leave out those with τ = 0.
    """
    edges = [len(weights) * fifth // _FIFTHS for fifth in range(_FIFTHS + 1)]
    return [
        mean([w for w, s in zip(weights[a:b], staleness[a:b], strict=True) if s > 0 or not stale_only])
        for a, b in pairwise(edges)
    ]


def rise(openness: Sequence[float]) -> float:
    """Openness of the last fifth less that of the first."""
    return openness[-1] - openness[0]


def verdict(constant: Sequence[float], decay: Sequence[float]) -> str:
    """What a thaw is called.

    Args:
        constant: rises at a constant learning rate, one a seed.
        decay: rises under decay.
    """
    by_itself, with_rate = _rises_surely(constant), _rises_surely(decay)
    if not by_itself:
        return "opens with the learning rate" if with_rate else "does not thaw"
    share = min(1.0, mean(constant) / mean(decay)) if with_rate else 1.0
    if share < 0.5:
        return f"opens with the learning rate; {share:.0%} of the rise is spontaneous, it comes at a constant rate, too"
    return f"spontaneous; {share:.0%} of the rise under decay comes at a constant rate, too"


def _rises_surely(rises: Sequence[float]) -> bool:
    error = standard_error(rises) if len(rises) > 1 else 0.0
    return mean(rises) > max(_LEAST_RISE, 2.0 * error)


def _rises(records: Sequence[Row], rule: str, schedule: str) -> list[float]:
    return [rise(r["stale"]) for r in records if r["rule"] == rule and r["schedule"] == schedule]


def _trained(training: Training, rule: str, schedule: str, seed: int) -> Row:
    result = training.run(seed, rule, lr=training.args.lr, schedule=SCHEDULES[schedule])
    return {
        "rule": rule, "schedule": schedule, "seed": seed, "lr": training.args.lr,
        "terminal_loss": terminal_loss(result.model, training.task(seed).test),
        "all": fifths(result.weight, result.staleness, stale_only=False),
        "stale": fifths(result.weight, result.staleness, stale_only=True),
    }  # fmt: skip


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    panels = figure.subplots(1, len(SCHEDULES), sharey=True)
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    for axes, schedule in zip(panels, SCHEDULES, strict=True):
        for number, rule in enumerate(rules):
            own = next(row for row in rows if row["rule"] == rule and row["schedule"] == schedule)
            axes.plot(range(1, _FIFTHS + 1), own["all"], "o-", color=f"C{number}", label=rule)
            axes.plot(range(1, _FIFTHS + 1), own["stale"], "x:", color=f"C{number}")
        axes.set(title=f"{schedule} learning rate", xlabel="fifth of the run", ylim=(-0.03, 1.03))
        axes.set_xticks(range(1, _FIFTHS + 1))
    panels[0].set_ylabel("mean weight: all pushes (o), τ > 0 (x)")
    panels[0].legend(fontsize=7)
