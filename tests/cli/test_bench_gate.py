from __future__ import annotations

import json

import pytest
import torch

from lightning_g2.cli.bench import main


@pytest.fixture(autouse=True)
def _keep_thread_count():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("gate", ["g2", 'g2(frame="random", action="scalar")', "g2_spectral(rank=4)"])
def test_gate_bench_prints_and_writes(tmp_path, capsys, gate):
    path = tmp_path / "gate.json"
    options = ["--width", "64", "--layers", "1", "--tokens", "256", "--repeats", "2", "--gate", gate]
    assert main(["gate", *options, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for row in ("forward + backward", "decide, staleness 0", "decide, staleness 16", "memory: references r"):
        assert row in printed
    report = json.loads(path.read_text(encoding="utf-8"))
    assert all(value > 0 for value in report["ms"].values())
    assert report["settings"]["width"] == 64
    assert report["bytes"]["reference"] <= 4 * report["parameters"]
    assert (report["bytes"]["frames"] > 0) == ("random" not in gate)


def test_unknown_bench_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["gates"])
    assert "invalid choice: 'gates'" in capsys.readouterr().err
