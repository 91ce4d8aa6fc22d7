"""Rounds chosen by times of arrival, and a delayed momentum, in real fits (``tests/scripts/rounds_auto.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
STEPS = 80  # of both ranks in an epoch

pytestmark = pytest.mark.timeout(620)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("rounds")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "rounds_auto.py"), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_where_staleness_is_dear_ranks_wait_for_each_other(job) -> None:
    """The size of rounds is up to the times of arrival: two ranks alike make 2 of it, one much slower makes 1."""
    for facts in (rank["dear"] for rank in job[1]):
        assert facts["choice"] in (1, 2)
        assert facts["pushes"] + facts["late"] == STEPS
        assert facts["version"] < STEPS, "several pushes have made one version, or some came late"
        assert facts["weight"] == -facts["version"], "each version a mean of ones, which in rounds are all fresh"


def test_where_staleness_costs_nothing_nobody_waits(job) -> None:
    for facts in (rank["cheap"] for rank in job[1]):
        assert facts["choice"] == 0
        assert (facts["version"], facts["pushes"], facts["late"]) == (STEPS, STEPS, 0)
        assert facts["weight"] == -STEPS


def test_the_choice_is_in_log_and_tensorboard(job) -> None:
    out = job[0]
    said = (out / "log0.txt").read_text()
    assert "g2async rounds='auto': asynchronous from version" in said
    assert "g2async rounds='auto': rounds of" in said
    assert "rounds='auto'" not in (out / "log1.txt").read_text(), "rank 0 says it"
    for name, values in (("dear", {1.0, 2.0}), ("cheap", {0.0})):
        events = EventAccumulator(str(out / name)).Reload()
        assert {entry.value for entry in events.Scalars("g2/rounds")} <= values
        assert events.Tensors("g2/rounds/text_summary")


def test_times_and_choice_are_in_checkpoints_and_go_on(job) -> None:
    kept = torch.load(job[0] / "dear.ckpt", weights_only=True)["lightning_g2_rounds"]
    assert kept["decided"]
    assert kept["rounds"] in (1, 2)
    assert not job[1][0]["dear"]["decided_at_start"]
    assert job[1][0]["resumed"]["decided_at_start"]
    assert "lightning_g2_rounds" not in torch.load(job[0] / "delayed.ckpt", weights_only=True)


@pytest.mark.parametrize(("case", "pushes"), [("delayed", STEPS), ("delayed_resumed", 2 * STEPS)])
def test_a_delayed_momentum_moves_with_every_second_push_of_whichever_rank(job, case: str, pushes: int) -> None:
    weight = momentum = 0.0
    for count in range(1, pushes + 1):
        weight -= 0.5 / 2
        if count % 2 == 0:
            momentum = 0.5 * momentum + 1.0
            weight -= 0.5 * 0.5 * momentum
    for rank in job[1]:
        assert rank[case]["weight"] == pytest.approx(weight, rel=1e-5)
        assert rank[case]["version"] == STEPS, "each push a version"
