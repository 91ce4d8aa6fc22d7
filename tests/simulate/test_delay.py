"""Delay models."""

from __future__ import annotations

from random import Random

import pytest

from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate import Delays, charged, layered, pareto, parse_delays, speeds, straggler, uniform


def sampled(delays: Delays, ranks: int = 8, draws: int = 400) -> list[list[float]]:
    return [[delays.duration(rank, ranks, random) for _ in range(draws)] for rank in range(ranks) for random in [Random(rank)]]  # noqa: E501 # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_uniform() -> None:
    assert sampled(uniform()) == [[1.0] * 400] * 8
    wide = sampled(uniform(0.5))
    assert all(0.5 <= d <= 1.5 for rank in wide for d in rank)
    assert mean(wide[0]) == pytest.approx(1.0, abs=0.05)


def test_straggler() -> None:
    drawn = sampled(straggler(0.25, 10, jitter=0.1))
    assert [round(mean(rank)) for rank in drawn] == [1] * 6 + [10] * 2


def test_pareto() -> None:
    drawn = [d for rank in sampled(pareto(1.3), draws=4000) for d in rank]
    assert min(drawn) >= 1.0
    for x in (2.0, 10.0):
        assert sum(d > x for d in drawn) / len(drawn) == pytest.approx(x**-1.3, rel=0.1)


def test_speeds() -> None:
    assert [rank[0] for rank in sampled(speeds((1, 4), jitter=0.0), ranks=4)] == [1.0, 2.0, 3.0, 4.0]
    assert [rank[0] for rank in sampled(speeds((1, 7, 2, 5), jitter=0.0), ranks=4)] == [1.0, 7.0, 2.0, 5.0]
    assert [rank[0] for rank in sampled(speeds((3,), jitter=0.0), ranks=3)] == [3.0, 3.0, 3.0]
    assert [rank[0] for rank in sampled(speeds((2, 5), jitter=0.0), ranks=1)] == [2.0]


def test_what_is_charged_is_added_and_layers_are_kept() -> None:
    delays = charged(layered(uniform(), {"head": 0.5}), 0.25)
    assert sampled(delays, draws=1)[0] == [1.25]
    assert delays.reads == {"head": 0.5}


@pytest.mark.parametrize(
    ("text", "delays"),
    [
        ("uniform", uniform()),
        ("straggler(0.25, 10)", straggler(0.25, 10)),
        ("straggler(fraction=0.5, factor=3)", straggler(0.5, 3)),
        (" pareto(1.3)", pareto(1.3)),
        ("speeds((1, 4))", speeds((1, 4))),
    ],
)
def test_delays_by_text(text: str, delays: Delays) -> None:
    assert parse_delays(text) == delays


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: uniform(1.0), r"jitter=1.0: must lie in \[0, 1\)"),
        (lambda: straggler(1.5), r"fraction=1.5: must lie in \[0, 1\]"),
        (lambda: straggler(0.5, 0.0), "factor=0.0: must be > 0"),
        (lambda: pareto(0.0), "a=0.0: must be > 0"),
        (lambda: speeds(()), r"durations=\(\): must be numbers > 0"),
        (lambda: speeds((1.0, -1.0)), r"durations=\(1.0, -1.0\): must be numbers > 0"),
        (lambda: layered(uniform(), {"w": 1.0}), r"reads\['w'\]=1.0: must lie in \[0, 1\)"),
        (lambda: charged(uniform(), -1.0), "overhead=-1.0: must be ≥ 0"),
        (lambda: parse_delays("pareto(0)"), "a=0: must be > 0"),
        (lambda: parse_delays("pareto"), "delays='pareto': must be one of"),
        (lambda: parse_delays("print(1)"), "delays='print\\(1\\)': must be one of"),
        (lambda: parse_delays("pareto(1.3"), "delays='pareto\\(1.3': must be one of"),
    ],
)
def test_bad_delays_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
