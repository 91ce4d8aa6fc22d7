"""However a job ends, all of it ends: ranks, server, with the exit codes and checkpoints that Lightning has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

RAISED = [
    "raise:setup:0", "raise:setup:1", "raise:configure_optimizers:1", "raise:on_train_start:0",
    "raise:training_step:1", "raise:optimizer_step:0", "raise:optimizer_step:1", "raise:validation_step:0",
    "raise:on_train_epoch_end:1", "raise:on_save_checkpoint:0", "raise:on_train_end:0", "raise:on_train_end:1",
    "exit:training_step:0", "exit:on_train_epoch_end:1", "SIGINT:training_step:1", "SIGINT:training_step:all",
]  # fmt: skip
STOPPED = ["SIGTERM:training_step:0", "SIGTERM:training_step:1", "SIGTERM:validation_step:1"]
HEALTHY = ["sleep:on_train_end:1", "SIGUSR1:training_step:all"]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("ends")
    cases = [*HEALTHY, *RAISED, *STOPPED, "raise:teardown:1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "ends.py"), str(out), *cases]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        case: json.loads((out / f"{case.replace(':', '-')}.json").read_text()) | {"out": out / case.replace(":", "-")}
        for case in cases
    }


@pytest.mark.timeout(920)
@pytest.mark.parametrize("case", RAISED)
def test_an_error_in_any_hook_of_any_rank_ends_both_ranks_and_the_server(case: str, ends: dict) -> None:
    end, (act, hook, where) = ends[case], case.split(":")
    logs = "\n".join(end["logs"])
    assert 0 not in end["codes"], end
    assert "hung" not in end["codes"], end
    assert end["left"] == []
    if act == "raise":
        assert f"BoomError: in {hook}" in end["logs"][int(where)], "the culprit's own traceback"
        if hook not in ("setup", "configure_optimizers"):  # before there is a server only the launcher can tell
            assert f"rank {where} failed, so the job ends: BoomError: in {hook}" in end["logs"][1 - int(where)]
    if act == "exit":
        assert end["codes"][int(where)] == 3
    if act == "SIGINT":
        assert "KeyboardInterrupt" in logs
        assert end["codes"] == [1, 1]


@pytest.mark.timeout(920)
@pytest.mark.parametrize("case", STOPPED)
def test_sigterm_on_any_rank_stops_all_of_them_in_order_with_a_checkpoint(case: str, ends: dict) -> None:
    end = ends[case]
    assert end["codes"] == [0, 0], end["logs"]
    assert end["left"] == []
    assert "on_exception.ckpt" in end["files"]
    saved = torch.load(end["out"] / "on_exception.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["state"], "the server's moments"


@pytest.mark.timeout(920)
def test_a_rank_that_takes_its_time_on_the_way_out_is_waited_for(ends: dict) -> None:
    end = ends["sleep:on_train_end:1"]
    assert end["codes"] == [0, 0], end["logs"]
    assert end["seconds"] > 15, "three times the limit of one call, which is what rank 1 takes on its way out"
    assert end["left"] == []


@pytest.mark.timeout(920)
def test_the_signal_before_requeueing_writes_a_checkpoint_and_training_goes_on(ends: dict) -> None:
    end = ends["SIGUSR1:training_step:all"]
    assert end["codes"] == [0, 0], end["logs"]
    assert "hpc_ckpt_1.ckpt" in end["files"]
    saved = torch.load(end["out"] / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["state"]


@pytest.mark.timeout(920)
def test_an_error_after_training_ends_the_rank_that_has_it(ends: dict) -> None:
    end = ends["raise:teardown:1"]
    assert end["codes"][1] == 1
    assert "BoomError: in teardown" in end["logs"][1]
    assert end["left"] == []
