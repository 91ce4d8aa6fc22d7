"""Ranks are lost in several ways, and the job goes on without them and trains on everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BATCHES, EPOCHS = 24, 3
TRANSPORTS = pytest.mark.parametrize(
    "options", [(), pytest.param(("transport=rpc", "pull=prefetch"), marks=pytest.mark.slow)], ids=["shm", "rpc"]
)


def _report(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"report-{rank}.mark").read_text())
    return found


def _check(report: dict[str, Any], *, lost: set[str]) -> None:
    """Every batch of every epoch was trained on once, those of lost ranks by others."""
    assert [epoch["exact"] for epoch in report["epochs"]] == [True] * EPOCHS, report["epochs"]
    assert {rank for epoch in report["epochs"] for rank, numbers in epoch["returned"].items() if numbers} == lost
    assert report["steps"] == EPOCHS * BATCHES
    for epoch in report["epochs"]:
        assert sum(epoch["fates"].values()) == sum(epoch["samples"].values()) == BATCHES


@TRANSPORTS
def test_a_frozen_rank_and_one_that_dies_in_a_collective_hold_nobody_up(
    run_job: Callable, tmp_path: Path, options: tuple[str, ...]
) -> None:
    job = run_job("faults.py", "silent", *options)
    assert job.code == 0, job.output
    assert job.left == ()
    for rank in (1, 2):
        assert f"rank {rank} was dropped, " in job.output
    assert (
        "DroppedError: rank 2 was dropped from the job, which goes on without it: it has not been heard of"
        in (tmp_path / "ended-2.mark").read_text()
    )
    report = _report(tmp_path)
    # Within the collective a share is missing, and the lowest rank's stands for it; from the next meeting on it is not.
    assert report["met"] == [[0, 3, 3], [1, 3, 3], [2, 2, 2]]
    _check(report, lost={"2"})
    lines = [json.loads(line) for line in (tmp_path / "log" / "0" / "ledger.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["exact"], line["over"]) for line in lines] == [(e, True, True) for e in range(EPOCHS)]
    tested = [_report(tmp_path, rank)["tested"] for rank in (0, 3)]
    assert sorted(number for numbers in tested for number in numbers) == list(range(BATCHES))
    assert report["mean"] == pytest.approx((BATCHES - 1) / 2)


@TRANSPORTS
def test_a_rank_that_is_killed_and_one_that_leaves_are_made_up_for(
    run_job: Callable, tmp_path: Path, options: tuple[str, ...]
) -> None:
    job = run_job("faults.py", "gone", *options)
    assert job.code == 0, job.output
    assert job.left == ()
    assert "rank 2 was dropped, " in job.output
    assert "rank 1 was told to end (SIGTERM) and leaves" in job.output
    assert "rank 1 was dropped" not in job.output
    assert (tmp_path / "ended-1.mark").read_text() == "LeaveJob: 0"
    report = _report(tmp_path)
    assert report["met"] == [[epoch, 1, 1] for epoch in range(EPOCHS)]
    _check(report, lost={"2"})
