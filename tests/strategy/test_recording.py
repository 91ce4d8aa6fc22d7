"""A real run writes its pushes down, and a simulation repeats it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_g2 import G2AsyncStrategy
from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate import simulate, trace
from tests.scripts.recording import Net, data

ROOT = Path(__file__).resolve().parents[2]


def test_a_simulation_repeats_a_real_run_bit_for_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "scripts" / "recording.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "weights.pt")
    model = Net()
    model.load_state_dict(weights["first"])
    recorded = trace(tmp_path / "run.jsonl")
    assert recorded.ranks == 3
    assert len(recorded.entries) == 2 * 24
    trained = sorted(i for entry in recorded.entries for batch in entry.samples or [] for i in batch)
    assert trained == sorted([*range(96), *range(96)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = simulate(
            model, lambda module, batch: module.loss(batch), recorded.batches(data()), ranks=3,
            gate=("g2", {"beta": 4.0}), optimizer="adamw", lr=0.02, clip=0.5, delays=recorded, seed=0,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert again.version == [entry.version for entry in recorded.entries]
    assert again.weight == [entry.weight for entry in recorded.entries]
    assert again.energy == [entry.energy for entry in recorded.entries]
    assert any(staleness > 0 for staleness in again.staleness)
    for name, weight in weights["last"].items():
        assert torch.equal(again.weights[name], weight), name


def test_what_cannot_be_repeated_is_not_recorded() -> None:
    several = {"aggregate": 2, "rounds": 2, "push": "layerwise", "wire_dtype": "bf16", "local_steps": 2, "servers": 2}
    for name, value in several.items():
        with pytest.raises(
            ConfigurationError, match=rf"record='run.jsonl' beside {name}={value!r}: a trace holds whole"
        ):
            G2AsyncStrategy(record="run.jsonl", **{name: value})
