"""Judging of options: one way to say value, rule and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_g2.errors import ConfigurationError


def require(condition: bool, name: str, value: object, rule: str, remedy: str) -> None:
    """Raise ConfigurationError unless ``condition`` holds.

    Args:
        condition: what must be true.
        name: the option.
        value: what was given.
        rule: what it must satisfy, after "must".
        remedy: what to do.

    Raises:
        ConfigurationError: the condition is false.
    """
    if not condition:
        raise ConfigurationError(f"{name}={value!r}: must {rule}; {remedy}")


def require_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ConfigurationError unless ``value`` is one of ``choices``.

    Args:
        name: the option.
        value: what was given.
        choices: what is allowed.

    Raises:
        ConfigurationError: the value is none of them.
    """
    listed = tuple(choices)
    require(value in listed, name, value, f"be one of {', '.join(map(str, listed))}", "choose one of them")


def require_within(name: str, value: float, low: float, high: float, remedy: str) -> None:
    """Raise ConfigurationError unless low ≤ value ≤ high and the value is a finite number.

    Args:
        name: the option.
        value: what was given.
        low: smallest allowed value.
        high: largest allowed value; ``inf`` for any finite one.
        remedy: what to do.

    Raises:
        ConfigurationError: the value lies outside, is NaN or infinite.
    """
    rule = f"be ≥ {low:g}" if math.isinf(high) else f"lie in [{low:g}, {high:g}]"
    require(math.isfinite(value) and low <= value <= high, name, value, rule, remedy)
