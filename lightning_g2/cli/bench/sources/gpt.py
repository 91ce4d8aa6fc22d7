"""A GPT under the sources' gate and under none, each at its own best learning rate."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from lightning_g2.cli.bench.sources.output import add_output_arguments, plus_minus, present
from lightning_g2.cli.bench.sources.training import (
    SMALL_GPT,
    SOURCE_RULE,
    Training,
    add_training_arguments,
    paired,
    standard_error,
)
from lightning_g2.cli.bench.table import rows_of
from lightning_g2.cli.bench.trial import FLOOR
from lightning_g2.routing.option import require

SUMMARY = "GPT: terminal loss of the sources' gate against Hogwild, each at its own best learning rate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the experiment's options.

    Args:
        parser: of the experiment.
    """
    add_training_arguments(parser, task=SMALL_GPT, pushes=240, clip=1.0)
    parser.add_argument("--beta", type=float, default=4.0, help="inverse temperature of the sources' gate")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3, 8e-3], help="screened on the first seed"
    )
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the run; then half a cosine to zero")
    parser.add_argument("--rules", nargs="*", default=[], help="further rules to train, as in 'g2(beta=8)', floor")
    add_output_arguments(parser, "gpt")


def run(args: argparse.Namespace) -> None:
    """Train, print, write, draw.

    Args:
        args: what :func:`add_arguments` declares.
    """
    require(args.beta >= 0.0, "beta", args.beta, "be ≥ 0", "0 turns the gate off")
    training = Training.of(args)
    source = SOURCE_RULE.format(beta=args.beta)
    names = {"none": "none (Hogwild)", source: "sources' gate", FLOOR: "no staleness (one rank)"}
    rules = list(dict.fromkeys(["none", source, *args.rules]))
    records, finals = training.best_of(rules, args.rates)
    losses = {rule: paired(own, finals["none"]) for rule, own in finals.items()}
    rows = [
        {**asdict(row), "name": names.get(row.rule, row.rule), "against_none": losses[row.rule]}
        for row in rows_of(finals, records)
    ]
    difference = losses[source]
    error = standard_error(difference)
    told = "no difference" if abs(sum(difference) / len(difference)) < 2 * error else "a difference"
    present(
        args,
        title=training.title,
        records=[asdict(record) for record in records],
        rows=rows,
        columns={
            "rule": lambda r: r["name"],
            "best rate": lambda r: f"{r['lr']:g}{' (edge of the grid)' if r['at_edge'] else ''}",
            "loss": lambda r: f"{r['loss']:.4f} ± {r['spread']:.4f}",
            "less Hogwild's, seed by seed": lambda r: plus_minus(r["against_none"], 4, sign="+"),
            "openness, first / last fifth": lambda r: f"{r['openness_first']:.2f} / {r['openness_last']:.2f}",
        },
        draw=lambda figure: _draw(figure, rows, records),
        notes=[
            f"Sources' gate less Hogwild, each at its best rate: {plus_minus(difference, 4, sign='+')} over "
            f"{len(difference)} seeds with the same arrivals; {told} of two standard errors or more."
        ],
    )


def _draw(figure: Any, rows: list[dict[str, Any]], records: list[Any]) -> None:
    curves, points = figure.subplots(1, 2)
    screening = records[0].seed
    for number, row in enumerate(rows):
        own_records = [r for r in records if r.rule == row["rule"]]
        screened = sorted({(r.lr, r.validation_loss) for r in own_records if r.seed == screening})
        curves.plot([lr for lr, _ in screened], [loss for _, loss in screened], "o-", label=row["name"])
        own = [r.terminal_loss for r in own_records if r.lr == row["lr"]]
        points.plot([number] * len(own), own, "o", color=f"C{number}", alpha=0.7)
        points.plot([number - 0.2, number + 0.2], [row["loss"]] * 2, color=f"C{number}", linewidth=2)
    curves.set(xscale="log", xlabel="learning rate", ylabel="validation loss, first seed", title="screening the rates")
    curves.set_xticks(sorted({r.lr for r in records}), [f"{lr:g}" for lr in sorted({r.lr for r in records})])
    curves.minorticks_off()
    curves.legend(fontsize=8)
    points.set_xticks(range(len(rows)), [row["name"] for row in rows])
    points.set(ylabel="terminal loss, nats a byte", title="at its own best rate (one dot a seed, line: mean)")
