import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(("optimizer", "servers"), [("sgd", (1, 1, 1)), ("adamw", (1, 3, 2))])
def test_one_rank_is_plain_lightning_bit_for_bit(
    optimizer: str, servers: tuple[int, int, int], run_job: Callable, tmp_path: Path
) -> None:
    """Clipping, accumulation of 3, a schedule by step, dropout, BatchNorm; straight and resumed; default gate."""
    job = run_job("equivalence.py", optimizer, tmp_path, *servers)
    assert job.code == 0, job.output
    assert job.left == ()
    facts = json.loads((tmp_path / "facts.json").read_text())
    loads, versions = facts.pop("loads"), facts.pop("versions")
    assert [name for name, equal in facts.items() if not equal] == []
    assert versions == [50, 20, 20], "a live server made every step"
    assert loads >= 50 + 20 + 20, "weights arrived by pull after every step"
