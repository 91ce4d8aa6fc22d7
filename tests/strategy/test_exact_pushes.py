import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(("transport", "pull"), [("shm", "fresh"), ("shm", "prefetch"), ("rpc", "fresh")])
def test_no_push_is_lost_doubled_or_torn(transport: str, pull: str, run_job: Callable, tmp_path: Path) -> None:
    ranks, pushes = 4, 100
    job = run_job("exact_pushes.py", ranks, pushes, 1_000_000, transport, pull, tmp_path)
    assert job.code == 0, job.output
    assert job.left == ()
    for rank in range(ranks):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (facts["low"], facts["high"]) == (-400.0, -400.0)
        assert facts["uniform"], "a pull brought weights of two versions"
        assert facts["version"] == ranks * pushes
        assert set(facts["pushes"].values()) == {pushes}
        assert facts["staleness_max"] >= 2
