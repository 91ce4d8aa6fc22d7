"""Which learning rates a rule is tried at: a grid that grows until the best rate lies inside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_g2.cli.bench.spec import parse_spec
from lightning_g2.cli.bench.trial import FLOOR, Record

Trial = Callable[[str, float], Record]
"""Trains a rule at a rate, on the seed that screens."""


def screen(trial: Trial, rules: Sequence[str], rates: Sequence[float], most: int) -> dict[str, list[Record]]:
    """Try each rule at as many rates as the others, with its best one inside if that can be had.

    Each rule starts with the same grid. Where its best rate is the grid's end, the grid goes on beyond that end by its
    own last step, until the best rate is inside or ``most`` rates were tried. Then every other rule is tried at further
    rates, too, beyond its better end, until all have had the same number. The floor, no rule that competes, is left out
    of that count.

    Args:
        trial: trains a rule at a rate.
        rules: the rules.
        rates: the grid to start with; a single rate is no grid, and stays alone.
        most: largest number of rates a rule.

    Returns:
        Trials by rule, in the order of the rates.
    """
    tried: dict[str, list[Record]] = {}
    for rule in rules:
        records = tried[rule] = [trial(rule, lr) for lr in sorted(rates)]
        while len(records) < most and (lr := _beyond(records, only_if_best=True)) is not None:
            _insert(records, trial(rule, lr))
    competing = {rule: records for rule, records in tried.items() if parse_spec(rule).name != FLOOR}
    equal = max((len(records) for records in competing.values()), default=0)
    for rule, records in competing.items():
        while len(records) < equal and (lr := _beyond(records, only_if_best=False)) is not None:
            _insert(records, trial(rule, lr))
    return tried


def quality(record: Record) -> float:
    """Validation loss to choose by: infinite for a diverged training."""
    return record.validation_loss if math.isfinite(record.validation_loss) else math.inf


def _beyond(records: Sequence[Record], *, only_if_best: bool) -> float | None:
    """The next rate beyond the better end of a grid; with ``only_if_best``, only where that end is the best rate."""
    if len(records) < 2:
        return None
    low, high = records[0], records[-1]
    end = low if quality(low) <= quality(high) else high
    if only_if_best and quality(end) > min(quality(record) for record in records):
        return None
    step = records[1].lr / low.lr if end is low else high.lr / records[-2].lr
    # Two digits keep 0.1, 0.2, 0.4 what they are, so that rules share rates and files find them again.
    return float(f"{(low.lr / step if end is low else high.lr * step):.3g}")


def _insert(records: list[Record], record: Record) -> None:
    records.append(record)
    records.sort(key=lambda r: r.lr)
