"""Checkpoints of one server version while two ranks push; resumes across strategies and numbers of ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BETA1, BETA2 = 0.9, 0.999


def run(mode: str, out: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "checkpoints.py"), mode, str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints")
    run("two", out)
    return out


@pytest.fixture(scope="module")
def facts(out: Path) -> list[dict]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def saved(out: Path, pattern: str) -> list[dict]:
    files = sorted(out.glob(pattern))
    return [torch.load(file, weights_only=True) for file in files]


def assert_one_version(state: dict, version: float) -> None:
    """Every weight has gone down by one unit a version."""
    for name in ("wide", "precise"):
        assert state[name].min() == state[name].max(), f"{name}: weights of two versions"
        assert state[name][0].item() == pytest.approx(-version, abs=1e-3)
    assert torch.equal(state["wide"], state["tied"])
    assert torch.equal(state["frozen"], torch.ones(3))


def test_weights_moments_and_schedule_are_of_one_version_while_others_push(out: Path) -> None:
    checkpoints = [*saved(out, "steps/*.ckpt"), *saved(out, "async/*.ckpt")]
    assert len(checkpoints) >= 5
    versions = set()
    for checkpoint in checkpoints:
        (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
        version = optimizer["state"][0]["step"].item()
        versions.add(version)
        assert_one_version(checkpoint["state_dict"], version)
        for moments in optimizer["state"].values():
            assert moments["step"] == version
            assert moments["exp_avg"].min() == moments["exp_avg"].max() == pytest.approx(1 - BETA1**version, rel=1e-4)
            assert moments["exp_avg_sq"].max().item() == pytest.approx(1 - BETA2**version, rel=1e-3)
        assert schedule["last_epoch"] == version, "a schedule by the server's clock"
        assert schedule["_last_lr"] == [group["lr"] for group in optimizer["param_groups"]]
    assert len(versions) >= 5


def test_an_optimizer_state_is_what_plain_lightning_saves(out: Path) -> None:
    plain, ours = saved(out, "plain.ckpt")[0], saved(out, "steps/last.ckpt")[0]
    assert plain.keys() == ours.keys() - {"lightning_g2"}, "and where the epoch goes on"
    (a,), (b,) = plain["optimizer_states"], ours["optimizer_states"]
    assert {k: {n: (t.dtype, t.shape) for n, t in s.items()} for k, s in a["state"].items()} == {
        k: {n: (t.dtype, t.shape) for n, t in s.items()} for k, s in b["state"].items()
    }
    lr = {"lr": 0.0}
    assert [g | lr for g in a["param_groups"]] == [g | lr for g in b["param_groups"]]
    assert set(ours["callbacks"]) == {key for key in ours["callbacks"] if key.startswith("ModelCheckpoint")}


def test_weights_only_checkpoints_and_those_after_the_fit(out: Path) -> None:
    weights = saved(out, "weights/*.ckpt")
    assert weights
    for checkpoint in weights:
        assert "optimizer_states" not in checkpoint
        assert_one_version(checkpoint["state_dict"], -checkpoint["state_dict"]["wide"][0].round().item())
    after = saved(out, "after.ckpt")[0]
    assert_one_version(after["state_dict"], after["optimizer_states"][0]["state"][1]["step"].item())


def test_rank_0_writes_copies_and_other_ranks_nothing(facts: list[dict]) -> None:
    assert facts[0]["saves"] >= 6
    assert facts[0]["async_saves"] >= 2
    assert facts[0]["untouched"], "training went on in tensors that a checkpoint holds"
    assert facts[1]["saves"] == facts[1]["async_saves"] == 0


@pytest.mark.parametrize("source", ["resumed", "from_plain", "from_ddp"])
def test_the_server_starts_from_what_the_checkpoint_holds(source: str, facts: list[dict]) -> None:
    assert facts[0][source] == {"weights": True, "moments": True, "groups": True, "lr": True}


def test_ddp_resumes_where_the_checkpoint_stands(facts: list[dict]) -> None:
    start = torch.load(facts[0]["middle"], weights_only=True)["optimizer_states"][0]["state"][0]["step"].item()
    for rank in facts:
        assert rank["ddp"] == [start + 3, start + 3]
        assert rank["ddp_weights"] == pytest.approx([-(start + 3)] * 2, abs=1e-3)


def test_loading_touches_the_cpu_only_and_moments_stay_on_rank_0(facts: list[dict]) -> None:
    assert [rank["loads"] for rank in facts] == [[["cpu"]], [["cpu"]]]
    assert [rank["moments_here"] for rank in facts] == [2, 0]


def test_one_rank_resumes_a_checkpoint_of_two_like_plain_lightning(out: Path, facts: list[dict]) -> None:
    run("one", out)
    one = json.loads((out / "one.json").read_text())
    assert one.pop("started") == {"weights": True, "moments": True, "groups": True, "lr": True}
    missing = [w for w in one.pop("warned") if "callbacks used to create the checkpoint" in w]
    assert not any("G2" in w or "SyncPoint" in w or "Agreement" in w for w in missing), "callbacks that only we add"
    assert [name for name, equal in one.items() if not equal] == []
