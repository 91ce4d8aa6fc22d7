"""Recorded arrivals, and runs that repeat them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate import SimulationResult, layered, simulate, straggler, trace, uniform

DATA = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(5)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (nn.functional.dropout(model(batch), 0.5) - batch[:, :2]).square().mean()


def run(delays: Any, **options: Any) -> SimulationResult:
    known: dict[str, Any] = {"ranks": 4, "pushes": 40, "gate": "g2", "optimizer": "adam", "lr": 0.02, "seed": 3}
    return simulate(lambda: nn.Linear(6, 2), loss, DATA, delays=delays, **{**known, **options})


def test_a_trace_repeats_a_run_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    original = run(straggler(0.25, 4), record=path, schedule=lambda f: 1 - f)
    again = run(trace(path), pushes=None, record=tmp_path / "again.jsonl")
    assert again.loss == original.loss
    assert again.staleness == original.staleness
    assert again.time == original.time
    assert all(torch.equal(original.weights[name], again.weights[name]) for name in original.weights)
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()


def test_other_rules_meet_the_same_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    original = run(straggler(0.25, 4), record=path)
    other = run(trace(path), gate=("drop", {"limit": 2}))
    assert any(other.rejected)
    assert (other.rank, other.time) == (original.rank, original.time)
    direct = run(straggler(0.25, 4), gate=("drop", {"limit": 2}))
    assert other.loss == direct.loss
    assert other.staleness == direct.staleness


def test_a_trace_can_be_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    original = run(uniform(), record=path)
    assert run(trace(path), pushes=10).staleness == original.staleness[:10]
    assert run(trace(path), pushes=None, time_limit=3.0).time == [1.0] * 4 + [2.0] * 4 + [3.0] * 4


def test_what_a_trace_holds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(uniform(), ranks=2, pushes=3, record=path)
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {"format": "lightning_g2 trace 1", "ranks": 2}
    assert [(row["rank"], row["k"], row["number"], row["base"], row["version"]) for row in rows] == [
        (0, 0, 0, 0, 1), (1, 0, 1, 0, 2), (0, 1, 2, 1, 3)
    ]  # fmt: skip
    assert len({row["seed"] for row in rows}) == 3


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(uniform(), record=path)
    with pytest.raises(ConfigurationError, match="ranks=5: must be 4, as in the trace"):
        run(trace(path), ranks=5)
    with pytest.raises(ConfigurationError, match="record with layered delays"):
        run(layered(uniform(), {"weight": 0.5}), record=path)
    with pytest.raises(ConfigurationError, match="a trace cannot be layered"):
        layered(trace(path), {"weight": 0.5}).duration(0, 4, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="push 0 of rank 0 has no indices; only runs whose batches the server"):
        trace(path).batches(DATA)
    with pytest.raises(ConfigurationError, match=r"record='.*/absent/run.jsonl': must be a file that can be written"):
        run(uniform(), record=tmp_path / "absent" / "run.jsonl")
    path.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="must be what record= has written"):
        trace(path)


@pytest.mark.parametrize("options", [{"rounds": 3}, {"aggregate": 3}, {"rounds": "auto", "staleness_cost": 5.0}])
def test_several_pushes_a_version_are_repeated_too(options: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    original = run(straggler(0.25, 4), record=path, **options)
    again = run(trace(path), pushes=None, **options)
    assert (again.staleness, again.version, again.late) == (original.staleness, original.version, original.late)
    assert all(torch.equal(original.weights[name], again.weights[name]) for name in original.weights)
