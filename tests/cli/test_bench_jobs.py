"""Benchmarks that run jobs: rates and times worked out from what ranks have read, and small jobs from end to end."""

from __future__ import annotations

import json
import math

import pytest

from lightning_g2.cli.bench import main, plot
from lightning_g2.cli.bench.fits import Fit, run_fits
from lightning_g2.cli.bench.record import config_hash, format_table, medians
from lightning_g2.errors import G2Error

WORKLOAD = {"kind": "regression", "batch": 2}


def _rank(times, losses=(), **facts):
    rows = [(t, 0.1 * i, 0.02 * i, 0.01 * i, 0.05 * i) for i, t in enumerate(times)]
    return {"start_s": 0.0, "batches": rows, "losses": list(losses), **facts}


def test_samples_a_second_end_where_the_first_fast_rank_runs_dry():
    pushes = [[0, 1.0, 2], [1, 1.5, 2], [0, 2.0, 2], [1, 2.5, 4], [0, 3.0, 2], [2, 3.5, 2], [1, 9.0, 2]]
    fit = Fit({"workload": WORKLOAD}, [_rank([], pushes=pushes), _rank([]), _rank([])])
    # From 1.5 s on; the slow rank 2 does not end the span at 3.5 s, nor does rank 1 keep it open until 9 s.
    assert fit.samples_per_s(skip=2, slow_rank=2) == pytest.approx((2 + 4 + 2) / (3.0 - 1.5))


def test_under_synchronous_training_each_batch_of_each_rank_counts():
    fit = Fit({"workload": WORKLOAD}, [_rank([1.0, 2.0, 3.0]), _rank([1.0, 2.0, 3.0])])
    assert fit.samples_per_s(skip=2) == pytest.approx(8 / 2.0)


def test_time_to_a_loss_takes_the_job_s_latest_batches_in_order_of_time():
    one = _rank([], losses=[[1.0, 1.0], [3.0, 0.2]])
    other = {**_rank([], losses=[[2.0, 0.6], [4.0, 0.2]]), "start_s": 0.5}
    fit = Fit({"workload": WORKLOAD}, [one, other])
    assert fit.time_to_loss_s(0.4, window=2) == pytest.approx(3.0)
    assert fit.time_to_loss_s(0.1, window=2) is None


def test_the_parts_of_a_step_add_up_to_it():
    totals = {"0": {"apply_s": 0.3, "pushes": 5, "rejected": 1}}
    parts = Fit({"workload": WORKLOAD}, [_rank([1.0, 2.0, 3.0], totals=totals)]).split_s(skip=1)
    assert parts["step_s"] == pytest.approx(1.0)
    assert parts["apply_s"] == pytest.approx(0.05), "the server's mean over all pushes"
    assert parts["wait_s"] == pytest.approx(0.1 - 0.05)
    assert sum(value for name, value in parts.items() if name != "step_s") == pytest.approx(parts["step_s"])


def test_records_are_told_apart_by_their_configuration_and_have_medians():
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1}) != config_hash({"a": 1, "b": 3})
    assert medians([{"x": 1.0, "y": None}, {"x": 9.0, "y": None}, {"x": 2.0, "y": None}]) == {"x": 2.0, "y": None}
    assert format_table([{"x": 1.25, "y": None}], {"x": "{:.1f}", "y": "{}"}).splitlines()[2] == "1.2  -"


@pytest.mark.timeout(300)
def test_stragglers_compares_real_jobs(tmp_path, capsys):
    path, picture = tmp_path / "s.json", tmp_path / "s.png"
    assert main(["stragglers", "--quick", "--json", str(path), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "ddp_idle_fraction" in printed
    assert "machine:" in printed
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [r["strategy"] for r in records] == ["ddp", "ddp without straggler", "rounds m=2", "g2async"]
    for record in records:
        assert record["samples_per_s"] > 0
        assert record["ratio_to_ddp"] == pytest.approx(record["samples_per_s"] / records[0]["samples_per_s"])
        assert 0 < record["ddp_idle_fraction"] < 1
        assert record["compute"] == "sleep-modelled"
        assert {"gate", "factor", "time_to_loss_s", "repeats", "machine", "config"} <= record.keys()
    assert len({record["config"] for record in records}) == len(records)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_transport_measures_against_gloo_and_plain_copies(tmp_path, capsys):
    path, picture = tmp_path / "t.json", tmp_path / "t.png"
    options = ["--quick", "--transports", "shm", "--json", str(path), "--plot", str(picture)]
    assert main(["transport", *options]) == 0
    assert "push_pull_s" in capsys.readouterr().out
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [r["bytes"] for r in records] == [100_000, 1_000_000]
    for record in records:
        assert record["transport"] == "shm"
        assert record["ratio"] == pytest.approx(record["push_pull_s"] / record["gloo_all_reduce_s"])
        assert 0 < record["apply_s"] < record["push_pull_s"]
        assert all(math.isfinite(record[name]) for name in ("ratio_with_load", "ratio_to_two_memcpy", "mb_per_s"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["step", "scaling", "memory", "transport"])
def test_other_modes_run_from_end_to_end(mode, tmp_path, capsys):
    path, picture = tmp_path / "records.json", tmp_path / "records.png"
    assert main([mode, "--quick", "--json", str(path), "--plot", str(picture)]) == 0
    assert "interleaved repeats" in capsys.readouterr().out
    records = json.loads(path.read_text(encoding="utf-8"))
    assert all({"config", "machine", "repeats"} <= record.keys() for record in records)
    if mode in ("step", "scaling"):
        assert all(record["samples_per_s"] > 0 for record in records)
        assert {"strategy", "gate", "ranks", "ratio_to_ddp"} <= records[0].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_pictures_are_drawn_of_records(tmp_path):
    common = {"gate": "none", "repeats": 3, "machine": "a machine", "samples_per_s_range": [1.0, 9.0]}
    rows = [
        {**common, "strategy": name, "ranks": n, "samples_per_s": 2.0 * n, "efficiency": 0.5, "ratio_to_ddp": 1.0}
        for name in ("ddp", "g2async")
        for n in (1, 2)
    ]
    plot.scaling(rows, tmp_path / "scaling.png")
    parts = dict.fromkeys(("compute_s", "gate_s", "copy_s", "wait_s", "apply_s"), 0.1)
    plot.step([{**rows[0], **parts}, {**rows[2], **parts}], tmp_path / "step.png")
    sizes = {"repeats": 3, "machine": "a machine", "parameter_bytes": 8}
    plot.memory([{**sizes, "process": "server", "beyond_bytes": 9, "limit_bytes": 16}], tmp_path / "memory.png")
    assert {path.name for path in tmp_path.iterdir()} == {"scaling.png", "step.png", "memory.png"}


def test_a_job_that_fails_says_why():
    fit = {"strategy": "g2async", "options": {"gate": "no such gate"}, "max_steps": 1}
    workload = {"kind": "regression", "inputs": 2, "outputs": 2, "sleep_s": 0.0, "batch": 1, "samples": 4}
    with pytest.raises(G2Error, match="no such gate"):
        run_fits(workload, [{**fit, "module": {"update_batch": 1}}], ranks=1)
