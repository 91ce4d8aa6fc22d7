"""Largest learning rate at which a rule still trains a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_g2.cli.bench.screen import quality
from lightning_g2.cli.bench.trial import Record

TOLERANCE = 1.5
"""A rate counts as stable up to so many times the rule's own best loss."""

_STEP = math.sqrt(2.0)
_MOST = 40


@dataclass(frozen=True)
class StableRange:
    """What a rule bears.

    Attributes:
        rule: the rule.
        best: training at its best rate.
        largest: training at the last rate above that before the first one that is not stable.
        trials: rates tried.
    """

    rule: str
    best: Record
    largest: Record
    trials: int


def stable_range(trial: Callable[[str, float], Record], rule: str, start: float) -> StableRange:
    """Walk a grid of √2 from a rate: down until the best is passed, up until the loss exceeds 1.5 times the best.

    Args:
        trial: trains a rule at a rate.
        rule: the rule.
        start: where the grid begins; the same one for every rule, so that rates compare.
    """
    tried: dict[int, Record] = {}

    def at(k: int) -> Record:
        if k not in tried:
            tried[k] = trial(rule, float(f"{start * _STEP**k:.4g}"))
        return tried[k]

    def best() -> int:
        return min(tried, key=lambda k: quality(tried[k]))

    def go_down() -> None:
        # Two rates below the best one: one may be worse by chance. From a start that diverges, down to one that trains.
        while (min(tried) > best() - 2 or math.isinf(quality(tried[best()]))) and min(tried) > -_MOST:
            at(min(tried) - 1)

    at(0)
    go_down()
    while (max(tried) < best() + 2 or quality(tried[max(tried)]) <= TOLERANCE * quality(tried[best()])) and max(
        tried
    ) < _MOST:
        at(max(tried) + 1)
        go_down()
    limit = TOLERANCE * quality(tried[best()])
    largest = best()
    while largest + 1 in tried and quality(tried[largest + 1]) <= limit:
        largest += 1
    return StableRange(rule, tried[best()], tried[largest], len(tried))


def stable_table(ranges: Sequence[StableRange]) -> str:
    """Ranges in Markdown, rates beside those of the first rule."""
    lines = [
        "| rule | best rate | its loss | largest stable rate | its loss | over the first rule's | rates tried |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in ranges:
        ratio = r.largest.lr / ranges[0].largest.lr
        lines.append(
            f"| {r.rule} | {r.best.lr:.3g} | {r.best.terminal_loss:.4f} | {r.largest.lr:.3g} | "
            f"{r.largest.terminal_loss:.4f} | {ratio:.2f} | {r.trials} |"
        )
    return "\n".join(lines) + "\n"
