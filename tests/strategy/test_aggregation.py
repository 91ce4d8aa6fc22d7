"""Several pushes a version in real fits of three ranks (``tests/scripts/aggregation.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("aggregation")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "aggregation.py"), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", ["aggregate", "rounds"])
def test_as_many_pushes_a_version_as_ranks_are_what_ddp_does(ranks, case: str) -> None:
    for rank in ranks[1]:
        torch.testing.assert_close(torch.tensor(rank[case]), torch.tensor(rank["ddp"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("case", "late"), [("dropped", True), ("gated", False)])
def test_rounds_go_on_without_a_straggler_and_count_what_comes_late(ranks, case: str, late: bool) -> None:
    facts = [rank[case] for rank in ranks[1]]
    assert sorted(n for rank in facts for n in rank["seen"]) == sorted([*range(30)] * 2), "each batch twice, no hang"
    first = facts[0]
    assert first["global_step"] == 60 == first["samples"] + first["late_samples"]
    assert first["samples"] == sum(first["pushes"].values())
    assert first["late_samples"] == sum(first["late"].values())
    assert (first["late"]["2"] >= 2) == late, "the first push of each epoch at least"
    assert (sum(first["late"].values()) > 0) == late
    assert first["weight"] == -first["version"], "each version moves the weight by a mean of ones"
    assert first["version"] < first["samples"]
    for rank in facts:
        assert rank["validated"] == first["validated"], "all validate one version"
        assert len(rank["validated"]) == 6
        assert rank["weight"] == first["weight"]


def test_a_checkpoint_within_an_epoch_holds_whole_versions_and_says_what_is_left(ranks) -> None:
    saved = torch.load(ranks[0] / "middle.ckpt", weights_only=True)
    trained = -2 * int(saved["state_dict"]["weight"])  # no validation has made a version of one push
    cursor = saved["lightning_g2"]
    assert trained == 4, "rank 0 alone has pushed, five times; the fifth waits for its second"
    assert cursor["next"] - len(cursor["loose"]) == trained == saved["global_step"]
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == trained
    facts = ranks[1][0]["interrupted"]
    assert (facts["samples"], facts["version"], facts["weight"]) == (30, 15, -15.0)
