from __future__ import annotations

import json

import pytest

from lightning_g2.cli.bench import main

FIELDS = {
    "mode", "forward_threads", "backward_threads", "delay", "modelled", "samples_per_s", "time_to_accuracy_s",
    "accuracy", "ratio_to_ddp", "ratio_to_lpp",
}  # fmt: skip


def test_pd_bench_prints_writes_and_draws(tmp_path, capsys):
    path, picture = tmp_path / "pd.json", tmp_path / "pd.png"
    assert main(["pd", "--quick", "--sleep-ms", "1", "--json", str(path), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [r["mode"] for r in records] == ["plain", *["pd", "block"] * 2, "ddp", "hogwild", "lap", "lap2", "lpp", "pd"]
    for record in records:
        assert set(record) >= FIELDS
        assert record["mode"] in printed
        assert record["samples_per_s"] > 0
        assert record["modelled"]
        assert record["peak_graphs"] is None or record["peak_graphs"] >= 1
        assert 0.0 <= record["accuracy"] <= 1.0
    assert all(r["ratio_to_ddp"] is None for r in records if r["workers"] == 1)
    assert next(r for r in records if r["mode"] == "ddp")["ratio_to_ddp"] == pytest.approx(1.0)
    assert next(r for r in records if r["mode"] == "lpp")["ratio_to_lpp"] == pytest.approx(1.0)
    assert len(records[1]["layer_lags"]) == 4
    assert picture.stat().st_size > 10_000


def test_real_compute_has_no_delays(capsys, tmp_path):
    path = tmp_path / "gpt.json"
    options = ["--ratios", "1:1", "--units", "layer", "--batch", "1", "--batches", "3", "--repeats", "1"]
    assert main(["pd", "--compute", "gpt", *options, "--json", str(path)]) == 0
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [(r["mode"], r["modelled"]) for r in records] == [("plain", False), ("pd", False)]
    assert all(r["ratio_to_plain_wide"] > 0 for r in records)
