"""Optimizers, parameters, gradients and precisions in real jobs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def test_optimizers_of_every_kind_step_as_in_plain_lightning(run_job: Callable, tmp_path: Path) -> None:
    """Torch's own, sparse ones, classes of the script, optimizers within optimizers, step hooks; toggled, by hand."""
    job = run_job("optimizers.py", tmp_path)
    assert job.code == 0, job.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["optimizers"] >= 18
    assert facts["weights_differ"] == []
    assert facts["states_differ"] == []
    assert facts["untouched_rows_still"]
    assert facts["k"] == [5, 5], "what an optimizer changes in its own groups is kept"
    assert facts["calls"] == [5, 5], "and so are its attributes"
    assert facts["hooks"][0] == facts["hooks"][1] != []
    assert facts["steps"][0] == facts["steps"][1]


def test_parameters_schedules_and_precisions_are_those_of_plain_lightning(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("parameters.py", tmp_path)
    assert job.code == 0, job.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    applied, steps = facts.pop("skipped")
    assert 0 < applied == steps < 30, "an overflow of the scaler pushes nothing"
    assert 0 < facts.pop("norm_max") <= 0.1 * (1 + 1e-4), "the server gets unscaled, clipped gradients"
    assert facts.pop("groups_number") > 2
    assert facts.pop("master_dtypes") == ["torch.float32"]
    assert [name for name, right in facts.items() if not right] == []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "tests" / "scripts" / "parameters_ranks.py"), str(out)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    output = done.stdout + done.stderr
    texts = [[out / f"{name}{rank}.json" for name in ("rank", "stop")] for rank in range(2)]
    assert all(path.exists() for paths in texts for path in paths), output
    assert done.returncode != 0, output
    return [
        json.loads(rank.read_text()) | {"stop": json.loads(stop.read_text()), "output": output} for rank, stop in texts
    ]


@pytest.mark.parametrize("gate", ["none", "g2"])
def test_bad_batches_of_one_rank_leave_everything_finite(ranks: list[dict], gate: str) -> None:
    for facts in ranks:
        assert facts[gate]["finite"]
        assert facts[gate]["state"] == ranks[0][gate]["state"]
        assert facts[gate]["saved"]
        assert facts[gate]["rejected"]["1"] >= 3, "a NaN batch in each of three epochs"
        assert facts[gate]["rejected"]["0"] == 0 or gate == "g2"
    assert ranks[1][gate]["empty_warning"] == 1
    assert "NaN or Inf in the gradient of " in ranks[0]["output"]


@pytest.mark.parametrize("gate", ["none", "g2"])
def test_ranks_that_add_a_group_at_different_times_share_it(ranks: list[dict], gate: str) -> None:
    for facts in ranks:
        assert facts[gate]["grown_moved"]
        assert facts[gate]["saved_groups"] == 2
        assert facts[gate]["untouched_rows"], "a sparse gradient moves the rows that it has"


def test_nan_stops_the_job_where_that_is_asked_for(ranks: list[dict]) -> None:
    assert ranks[1]["stop"]["error"] == "NonFiniteGradientError"
    assert "rank 1, step " in (message := ranks[1]["stop"]["message"])
    assert "NaN or Inf in the gradient of first.weight" in message
    assert ranks[0]["stop"]["error"] == "PeerFailedError"
    assert "NonFiniteGradientError" in ranks[0]["stop"]["message"]
