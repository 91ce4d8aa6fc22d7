"""Lightning's callbacks and tools: one rank equals plain Lightning; two ranks end alike and keep the tool's meaning."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

ALONE = [
    "ema", "swa", "swa_without_norm", "pruning", "clipped", "adversaries", "observers", "overrides", "hooks",
    "lr_finder", "batch_size_finder",
]  # fmt: skip
TOGETHER = [*ALONE, "clipped_over_rpc", "finder_within_fit", "flags", "fast_dev_run", "compiled"]


def _run(out: Path, mode: str, names: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "tools.py"), mode, str(out), *names]
    done = subprocess.run(
        command, env=environment, cwd=out, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Facts by case, then by strategy."""
    out = tmp_path_factory.mktemp("alone")
    _run(out, "one", ALONE)
    return torch.load(out / "one0.pt", weights_only=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("together")
    _run(out, "two", TOGETHER)
    return out


@pytest.fixture(scope="module")
def together(directory: Path) -> list[dict[str, Any]]:
    """Facts by rank, then by case."""
    ranks = [torch.load(directory / f"two{rank}.pt", weights_only=True) for rank in range(2)]
    return [{case: facts["g2async"] for case, facts in rank.items()} for rank in ranks]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("case", ALONE)
def test_one_rank_does_exactly_what_plain_lightning_does(case: str, alone: dict) -> None:
    plain, ours = dict(alone[case]["auto"]), dict(alone[case]["g2async"])
    for facts in (plain, ours):
        facts.pop("rows", None)  # compared below; ours has columns of its own
    assert [name for name in plain if not _same(plain[name], ours[name])] == []


@pytest.mark.parametrize("case", TOGETHER)
def test_two_ranks_end_with_the_same_weights(case: str, together: list) -> None:
    first, second = (rank[case] for rank in together)
    states = [name for name, value in first.items() if isinstance(value, dict) and "net.0.weight" in value]
    assert states or case == "pruning"
    for name in [*states, "state", "tested", "v"]:
        if name in first and name != "before":
            assert _same(first[name], second[name]), name
    for value in first.get("state", {}).values():
        assert value.isfinite().all()


def test_averaged_weights_are_validated_saved_and_kept(together: list, alone: dict) -> None:
    """The average follows what the rank pulls; what was validated is what was saved, and what training ends with."""
    facts = together[0]["ema"]
    assert facts["current_model_state"].keys() == alone["ema"]["auto"]["current_model_state"].keys()
    assert int(facts["averaging_state"]["n_averaged"]) > 0
    averaged, current = facts["state_dict"]["net.0.weight"], facts["current_model_state"]["net.0.weight"]
    assert not torch.equal(averaged, current)
    assert facts["v"] == pytest.approx(facts["best"]), "the last checkpoint holds what the last validation saw"
    assert facts["tested"] == pytest.approx(facts["best"])


def test_stochastic_weight_averaging_ends_with_the_average(together: list, alone: dict) -> None:
    facts = together[0]["swa_without_norm"]
    assert facts["averaged"] == alone["swa_without_norm"]["auto"]["averaged"]
    average = {name.removeprefix("module."): value for name, value in facts["average"].items()}
    assert _same(average, facts["state"])
    assert 0 < int(together[0]["swa"]["state"]["net.1.num_batches_tracked"]) <= 12, "statistics of the last pass only"


@pytest.mark.parametrize("case", ["clipped", "clipped_over_rpc"])
def test_what_code_does_to_weights_by_hand_reaches_the_server(case: str, together: list) -> None:
    facts = together[0][case]
    for name, value in facts["state"].items():
        if name.startswith("net"):
            assert value.abs().max() <= 0.6, f"{name}: clipped to 0.2 on every step, by either rank; 0.9 without"
        else:
            assert not torch.equal(value, facts["before"][name]), f"{name}: followed although no gradient moved it"


def test_pruned_weights_stay_pruned(together: list) -> None:
    assert together[0]["pruning"]["zeros"] >= 24


def test_two_optimizers_count_two_steps_a_batch(alone: dict, together: list) -> None:
    """Alone each step moves its own parameters only; among others it also brings what they have pushed."""
    for facts in (alone["adversaries"]["auto"], alone["adversaries"]["g2async"]):
        assert facts["steps"] == 20
        assert facts["moved"] == {"critic": ["critic"], "net": ["net"]}
    assert together[0]["adversaries"]["steps"] >= 20


def _column(rows: str, name: str) -> list[tuple[str, str]]:
    return [(row["step"], row[name]) for row in csv.DictReader(io.StringIO(rows)) if row[name]]


def test_loggers_and_monitors_write_what_they_write_in_plain_lightning(
    alone: dict, together: list, directory: Path
) -> None:
    plain, ours = (alone["observers"][strategy]["rows"] for strategy in ("auto", "g2async"))
    for name in ("loss", "v", "lr-SGD"):
        assert _column(plain, name) == _column(ours, name) != []
    columns = [set(alone["observers"][s]["rows"].splitlines()[0].split(",")) for s in ("auto", "g2async")]
    assert columns[0] <= columns[1]
    assert {c.split("/")[0] for c in columns[1] - columns[0]} <= {"g2", "openness", "tau"}
    two = together[0]["observers"]["rows"]
    assert columns[0] - set(two.splitlines()[0].split(",")) == set()
    assert together[1]["observers"]["rows"] == "", "only rank 0 writes"
    written = directory / "g2async" / "observers"
    assert len(list((written / "board" / "version_0").glob("events.*"))) == 2, "one of fit, one of test"
    assert len(list((written / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert list(written.glob("*simple*.txt"))
    assert not (written / "on_exception.ckpt").exists()
    assert together[0]["observers"]["starts"] == 3
    assert together[0]["observers"]["elapsed"]


def test_flags_of_the_trainer_do_what_they_say(together: list) -> None:
    for rank in together:
        assert rank["fast_dev_run"]["steps"] > 0
        assert any("order in which pushes arrive" in text for text in rank["flags"]["warned"]) or rank is together[1]
    assert together[0]["flags"]["warned"]


def test_overridden_hooks_are_called_as_often_as_by_plain_lightning(together: list) -> None:
    for rank in together:
        calls = rank["overrides"]["calls"]
        assert calls["step"] == calls["clip"] == calls["zero_grad"] > 0
        assert calls["schedule"] == 3


def test_a_compiled_modules_checkpoint_loads_into_the_plain_module(together: list) -> None:
    facts = together[0]["compiled"]
    assert facts["keys_whole"] == list(facts["whole"]), "a compiled module: its own keys"
    assert facts["keys_part"] == [f"net._orig_mod.{key.removeprefix('net.')}" for key in facts["part"]]
    assert all(value.isfinite().all() for value in facts["part"].values())


def test_the_learning_rate_finder_decides_for_all_ranks_and_leaves_nothing(together: list) -> None:
    for facts in (rank["lr_finder"] for rank in together):
        assert _same(facts["before"], facts["between"])
        assert facts["suggested"] == together[0]["lr_finder"]["suggested"] == facts["lr"] == facts["used"]
        assert facts["lrs"] == sorted(facts["lrs"]) == together[0]["lr_finder"]["lrs"]
        assert facts["lrs"][-1] <= 0.1 * 1.0001, "the range's end, however many ranks test it"
        assert facts["files"] == []
        assert facts["steps"] > 0
        assert not _same(facts["between"], facts["state"]), "and then it trains"


def test_schedules_begin_anew_after_a_finder_within_the_fit(together: list) -> None:
    for facts in (rank["finder_within_fit"] for rank in together):
        assert facts["schedule"] == facts["steps"] == 96, "four epochs of 24 batches, and none of the finder's"
        assert facts["lr"] == pytest.approx(0.05 * 0.99**96)


def test_the_batch_size_finder_decides_for_all_ranks_and_leaves_nothing(together: list) -> None:
    """Rank 1 has room for 8 samples only, rank 0 for 16."""
    for facts in (rank["batch_size_finder"] for rank in together):
        assert facts["size"] == facts["optimal"] == 8
        assert facts["sizes"][-1] == 8
        assert facts["files"] == []
        assert facts["steps"] > 0


STEPWISE = "module.lr_scheduler_step"


def _shape(record: list[str]) -> tuple[list[str], set[tuple[str, ...]]]:
    """The record without its batches, and what the batches look like; names of hooks only."""
    names = [entry.split("(")[0] for entry in record if not entry.startswith(STEPWISE)]
    skeleton: list[str] = []
    batches: set[tuple[str, ...]] = set()
    batch: list[str] | None = None
    transfer = re.compile(r"module\.(on_before_batch_transfer|transfer_batch_to_device|on_after_batch_transfer)")
    for name in names:
        if transfer.fullmatch(name):
            continue  # of a batch fetched ahead
        start = re.fullmatch(r"callback\.on_(train|validation)_batch_start", name)
        if start:
            batch = []
        if batch is None:
            skeleton.append(name)
            continue
        batch.append(name)
        if re.fullmatch(r"module\.on_(train|validation)_batch_end", name):
            batches.add(tuple(batch))
            if not skeleton[-1].startswith("batches"):
                skeleton.append("batches")
            batch = None
    return skeleton, batches


def test_users_hooks_run_in_the_documented_order_on_every_rank(together: list, alone: dict) -> None:
    """Plain Lightning's order within each batch and around batches; step-wise schedules follow the server's clock."""
    skeleton, batches = _shape(alone["hooks"]["auto"]["record"])
    assert len(batches) == 4, "accumulating, stepping, stepping at once for want of a second batch, validating"
    for number, rank in enumerate(together):
        ours = _shape(rank["hooks"]["record"])
        assert len(ours[1]) >= 3
        assert ours[1] <= batches
        once = {"module.prepare_data"} if number else set()  # one rank of a node prepares data
        assert ours[0] == [name for name in skeleton if name not in once]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("adapters")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "adapters.py"), str(out)]
    done = subprocess.run(
        command, env=environment, cwd=out, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return out, [torch.load(out / f"adapters{rank}.pt", weights_only=True) for rank in range(2)]


def _learned(losses: list[float]) -> bool:
    tenth = len(losses) // 10
    return sum(losses[-tenth:]) < 0.8 * sum(losses[:tenth])


def test_adapters_train_and_only_they_travel(adapters: tuple) -> None:
    facts = [rank["adapters"] for rank in adapters[1]]
    for rank in facts:
        assert _learned(rank["losses"])
        assert rank["moved"] == [f"net.{i}.{part}" for i in (0, 2) for part in ("down", "up")]
        # 4 bytes for each of (2·64 + 64·2) + (2·64 + 1·2) numbers, each tensor in whole lines of 64 bytes.
        assert rank["bytes"] == 4 * (128 + 128 + 128) + 64
    assert _same(facts[0]["state"], facts[1]["state"])


def test_a_transformer_trains(adapters: tuple) -> None:
    for rank in adapters[1]:
        assert _learned(rank["language"]["losses"])
    assert _same(adapters[1][0]["language"]["state"], adapters[1][1]["language"]["state"])


def test_histograms_are_written_at_their_interval_by_rank_0_alone(adapters: tuple) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, ranks = adapters
    directory = out / "board" / "version_0"
    assert len(list(directory.glob("events.*"))) == 1
    assert all(rank["adapters"]["steps"] == 200 for rank in ranks)
    events = EventAccumulator(str(directory), size_guidance={"histograms": 0})
    events.Reload()
    for tag in ("g2/friction", "g2/weight", "g2/staleness"):
        assert len(events.Histograms(tag)) == 200 // 50
