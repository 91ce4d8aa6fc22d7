import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("grown")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "scripts" / "grown_project.py"), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_unequal_numbers_of_batches_end_together(facts: list[dict]) -> None:
    assert facts[0]["pushes"] == {"0": 6, "1": 13}
    assert facts[0]["rejected"] == {"0": 0, "1": 1}, "one push was NaN"


def test_all_ranks_end_with_the_same_weights_and_buffers(facts: list[dict]) -> None:
    assert facts[0]["state"] == facts[1]["state"]
    assert all(value == value for values in facts[0]["state"].values() for value in values), "no NaN anywhere"
    assert facts[0]["tracked"] == facts[1]["tracked"] > 0
    assert facts[0]["v"] == facts[1]["v"]


def test_tied_frozen_and_unused_parameters_stay_what_they_are(facts: list[dict]) -> None:
    for rank in facts:
        assert rank["tied"]
        assert rank["still"], "weight decay must not move a parameter without gradient"
        assert rank["moved"]


def test_the_checkpoint_holds_what_the_ranks_end_with(facts: list[dict]) -> None:
    assert facts[0]["saved"]
