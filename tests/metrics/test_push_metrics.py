from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchmetrics import Metric, MetricCollection

from lightning_g2.errors import ConfigurationError
from lightning_g2.metrics import Friction, Goodput, Openness, Staleness
from lightning_g2.values import PushRecord

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")


def push(**fields: object) -> PushRecord:
    defaults = {
        "rank": 0, "version": 1, "staleness": 0, "energy": 1.0, "weight": 1.0, "rejected": False, "samples": 4,
        "time_s": 0.0,
    }  # fmt: skip
    return PushRecord(**(defaults | fields))


PUSHES = [
    push(energy=0.5, weight=1.0, staleness=0, samples=8, time_s=1_000_000.00),
    push(energy=2.0, weight=0.25, staleness=3, samples=8, time_s=1_000_000.01),
    push(energy=2.5, weight=0.9, staleness=7, samples=8, time_s=1_000_000.03, rejected=True),  # refused by the rule
    push(energy=0.0, weight=0.0, staleness=2, samples=6, time_s=1_000_000.05, rejected=True),  # NaN: never judged
]
EXPECTED = {
    "friction_mean": 5.0 / 3,
    "openness": 1.25 / 4,
    "stale_openness": 0.25 / 3,
    "staleness_mean": 12 / 4,
    "staleness_max": 7.0,
    "samples_per_s": 16 / 0.05,
    "applied_share": 16 / 30,
}


def collection() -> MetricCollection:
    return MetricCollection({
        "friction": Friction(quantiles=(0.0, 0.5, 1.0)), "openness": Openness(),
        "stale_openness": Openness(stale_only=True), "staleness": Staleness(), "goodput": Goodput(),
    })  # fmt: skip


def as_floats(values: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def without_quantiles(values: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value for name, value in as_floats(values).items() if not name.startswith("friction_q")}


@pytest.mark.parametrize("at_once", [True, False], ids=["one update", "push by push"])
def test_a_collection_gives_what_the_definitions_say(at_once: bool) -> None:
    metrics = collection()
    for part in [PUSHES] if at_once else PUSHES:
        metrics.update(part)
    values = metrics.compute()
    assert without_quantiles(values) == pytest.approx(EXPECTED, rel=1e-6)
    quantiles = [float(values[f"friction_q{percent}"]) for percent in (0, 50, 100)]
    assert quantiles == pytest.approx([0.5, 2.0, 2.5], abs=8 / 3 / 1024)


def test_states_that_look_alike_are_not_merged_by_a_collection() -> None:
    # After one stale push of weight 1, friction 1 and age 1 every count and sum is 1.
    metrics = MetricCollection({
        "all": Openness(), "stale": Openness(stale_only=True), "friction": Friction(), "age": Staleness()
    })  # fmt: skip
    metrics.update(push(staleness=1))
    metrics.update(push(staleness=0, weight=0.0, energy=2.0))
    assert as_floats(metrics.compute()) == {
        "all": 0.5, "stale": 1.0, "friction": 1.5, "staleness_mean": 0.5, "staleness_max": 1.0
    }  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_merged_replicas_equal_one_that_saw_everything(cut: int) -> None:
    whole, one, other = collection(), collection(), collection()
    whole.update(PUSHES)
    one.update(PUSHES[:cut])
    other.update(PUSHES[cut:])
    for name, metric in one.items(keep_base=True):
        metric.merge_state(other[name])
    assert as_floats(one.compute()) == pytest.approx(as_floats(whole.compute()), rel=1e-9)


def test_two_processes_agree_on_the_metrics_of_both(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("metric_sync.py", tmp_path)
    assert job.code == 0, job.output
    values = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert values[0] == values[1]
    expected = {
        "friction_mean": (2 * 1.0 + 3 * 2.0) / 5, "friction_q50": 2.0, "Openness": (2 * 1.0 + 2 * 0.5 + 0.0) / 5,
        "staleness_mean": 9 / 5, "staleness_max": 3.0, "samples_per_s": 40 / 12.0, "applied_share": 40 / 50,
    }  # fmt: skip
    assert values[0] == pytest.approx(expected, abs=8 / 3 / 1024)


EMPTY = {
    "friction_mean": 0.0, "friction_q0": 0.0, "friction_q50": 0.0, "friction_q100": 0.0, "openness": 1.0,
    "stale_openness": 1.0, "staleness_mean": 0.0, "staleness_max": 0.0, "samples_per_s": 0.0, "applied_share": 1.0,
}  # fmt: skip


def test_without_a_push_every_result_is_defined() -> None:
    metrics = collection()
    assert as_floats(metrics.compute()) == EMPTY
    metrics.update([])
    assert as_floats(metrics.compute()) == EMPTY


def test_a_reset_forgets() -> None:
    metrics = collection()
    metrics.update(PUSHES)
    metrics.reset()
    assert as_floats(metrics.compute()) == EMPTY


def test_forward_gives_the_batch_and_keeps_the_total() -> None:
    metrics = collection()
    first, second = metrics(PUSHES[:2]), metrics(PUSHES[2:])
    assert float(first["openness"]) == pytest.approx(0.625)
    assert float(second["openness"]) == 0.0
    assert float(second["samples_per_s"]) == 0.0
    assert float(second["staleness_max"]) == 7.0
    assert float(first["staleness_max"]) == 3.0
    assert without_quantiles(metrics.compute()) == pytest.approx(EXPECTED, rel=1e-6)


def test_the_rate_counts_from_a_known_moment() -> None:
    metrics = MetricCollection([Goodput(), Openness()])
    metrics.update([push(samples=10, time_s=5.0), push(samples=10, time_s=7.0)], since_s=3.0)
    assert float(metrics.compute()["samples_per_s"]) == pytest.approx(20 / 4)
    metrics.update(push(samples=10, time_s=9.0))
    assert float(metrics.compute()["samples_per_s"]) == pytest.approx(30 / 6)


def test_one_push_has_no_rate() -> None:
    goodput = Goodput()
    goodput.update(push())
    assert as_floats(goodput.compute()) == {"samples_per_s": 0.0, "applied_share": 1.0}


def test_sums_go_on_where_float32_would_stop() -> None:
    openness = Openness()
    openness.openness_count += 2.0**24
    for _ in range(3):
        openness.update(push())
    assert float(openness.openness_count) == 2**24 + 3


@pytest.mark.parametrize("metric", [Friction(quantiles=(0.5,)), Openness(), Staleness(), Goodput()], ids=repr)
def test_a_metric_can_be_copied_pickled_and_saved(metric: Metric) -> None:
    metric = copy.deepcopy(metric)
    metric.update(PUSHES)
    metric.persistent(True)
    again = pickle.loads(pickle.dumps(metric))
    restored = copy.deepcopy(metric)
    restored.reset()
    restored.load_state_dict(metric.state_dict())
    expected = _flat(metric.compute())
    assert torch.equal(_flat(again.compute()), expected)
    assert torch.equal(_flat(restored.compute()), expected)


def _flat(value: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(value.values())) if isinstance(value, dict) else value


@pytest.mark.parametrize("quantile", [-0.1, 1.5, float("nan")])
def test_a_quantile_out_of_range_is_refused(quantile: float) -> None:
    with pytest.raises(ConfigurationError, match=r"quantiles=\[.*\]: each must be ≥ 0 and ≤ 1"):
        Friction(quantiles=(quantile,))
