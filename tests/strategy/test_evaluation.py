"""Evaluation around two fits, and one decision for two ranks that log, monitor and look at different things."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SAMPLES_MEAN, SAMPLES_MAX = 7.5, 15.0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluation")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "scripts" / "evaluation.py"), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert (out / "rank0.json").exists(), done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def facts(out: Path) -> list[dict]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_epoch_values_are_reduced_over_the_ranks_that_logged_them(facts: list[dict]) -> None:
    for rank in facts:
        for stage in ("before", "between", "after"):
            assert rank[stage]["v_sync"] == rank[stage]["v_metric"] == SAMPLES_MEAN
            assert rank[stage]["v_max"] == SAMPLES_MAX
            assert rank[stage]["ve_sync"] == 1.5
        metrics = rank["metrics"]
        assert metrics["t_sync_epoch"] == metrics["t_metric_epoch"] == SAMPLES_MEAN
        assert metrics["e_sync"] == 1.5, "logged in on_train_epoch_end"
        assert rank["gathered"][-1] == [0.0, 1.0], "all_gather in a validation hook sees both ranks"
    assert facts[0]["between"]["v_step0_epoch"] == 7.0, "logged, by step and epoch, on rank 0 alone"
    assert facts[1]["between"]["v_extra"] == 8.0, "a metric that only rank 1 has"
    assert [rank["test"][0]["x/dataloader_idx_0"] for rank in facts] == [SAMPLES_MEAN, SAMPLES_MEAN]
    assert facts[0]["test"][1]["x/dataloader_idx_1"] == 0.5, "a dataloader without batches on rank 1"


def test_values_that_nobody_monitors_stay_each_ranks_own(facts: list[dict]) -> None:
    assert [rank["metrics"]["v_own"] for rank in facts] == [0.0, 1.0]
    assert [rank["between"]["v_plateau"] for rank in facts] == [0.0, 1.0], "outside training nothing is monitored"


def test_monitored_values_of_one_rank_decide_for_both(facts: list[dict], out: Path) -> None:
    """EarlyStopping sees 0, 1, 2 of rank 1; checkpoints follow what rank 0, or rank 1, alone has logged."""
    for rank in facts:
        assert rank["epochs"] == 3
        assert {n: rank["metrics"][n] for n in ("v_only0", "v_only1", "t_only1", "v_plateau")} == {
            "v_only0": 3.0, "v_only1": 2.0, "t_only1": 3.0, "v_plateau": 0.0,
        }  # fmt: skip
        assert rank["lr"] == 0.05 * 0.5**2, "ReduceLROnPlateau decides alike"
    assert facts[0]["monitors"] == facts[1]["monitors"]
    best, train, step = facts[0]["monitors"]
    directory = out / "root0" / "checkpoints"
    assert best[0] == {
        str(directory / "epoch=1-v_only1=1.00.ckpt"): 2.0, str(directory / "epoch=2-v_only1=2.00.ckpt"): 3.0
    }  # fmt: skip
    assert train[0] == {str(directory / "t1-epoch=1.ckpt"): 4.0, str(directory / "t1-epoch=2.ckpt"): 3.0}
    assert len(step[0]) == 2, "a train metric, between sync points"


def test_checkpoints_are_written_by_rank_0_only_and_removed_when_worse(facts: list[dict], out: Path) -> None:
    monitors = facts[0]["second_monitors"]
    kept = {path for best, _, _ in monitors for path in best} | {monitors[0][2]}
    unknown_to_last = {path for path in facts[0]["monitors"][1][0] if "epoch=2" in path}  # written after last.ckpt
    assert {str(path) for path in out.rglob("*.ckpt")} == kept | unknown_to_last
    assert not (out / "root1").exists()


def test_batch_norm_is_the_same_on_all_ranks_and_in_the_checkpoint(facts: list[dict], out: Path) -> None:
    assert facts[0]["in_validation"] == facts[1]["in_validation"]
    assert facts[0]["buffers"] == facts[1]["buffers"]
    assert 2.0 < facts[0]["buffers"]["running_mean"][0] < 8.0, "inputs are around 0 on rank 0 and around 10 on rank 1"
    saved = torch.load(out / "root0" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in facts[0]["final_buffers"].items():
        assert saved[f"norm.{name}"].flatten().tolist() == value
    assert saved["norm.num_batches_tracked"].dtype == torch.int64
    assert saved["norm.num_batches_tracked"] > 0


def test_best_last_and_a_path_load_what_rank_0_has(facts: list[dict], out: Path) -> None:
    for rank in facts:
        assert rank["predictions"] == 8
        assert rank["best_loaded"]
        assert rank["path_loaded"]
        assert rank["last"] == str(out / "root0" / "checkpoints" / "last.ckpt")
        assert rank["resumed_epochs"] == 4
    assert facts[0]["step"] == facts[1]["step"]


def test_the_module_copies_while_it_trains_and_nothing_stays_on_lightnings_objects(facts: list[dict]) -> None:
    for rank in facts:
        assert rank["copies"] == 3
        assert rank["hooks_left"] == []
        assert rank["gathering"].startswith("torchmetrics")


def test_a_metric_that_gathers_on_every_step_is_refused_by_name(out: Path) -> None:
    for rank in range(2):
        assert "metric eager: MeanMetric(dist_sync_on_step=True)" in (out / f"refused{rank}").read_text()
