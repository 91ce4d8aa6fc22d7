import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SCRIPTS

RANKS, PUSHES, SIZE = 4, 100, 1_000_000
CASES = ["shm:fresh", "shm:prefetch", "rpc:fresh"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exact")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / "exact_pushes.py"), *map(str, (RANKS, PUSHES, SIZE, out)), *CASES]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("case", CASES)
def test_no_push_is_lost_doubled_or_torn(case: str, out: Path) -> None:
    for rank in range(RANKS):
        facts = json.loads((out / f"{case}-{rank}.json").read_text())
        assert (facts["low"], facts["high"]) == (-RANKS * PUSHES, -RANKS * PUSHES)
        assert facts["uniform"], "a pull brought weights of two versions"
        assert facts["version"] == RANKS * PUSHES
        assert set(facts["pushes"].values()) == {PUSHES}
        assert facts["staleness_max"] >= 2
