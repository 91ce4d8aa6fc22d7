from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, run_job: Callable) -> None:
    job = run_job(path)
    assert job.code == 0, job.output
    assert "val_loss" in job.output
    assert job.left == ()
