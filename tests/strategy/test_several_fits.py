from collections.abc import Callable
from pathlib import Path


def test_fit_validate_fit_test_predict_in_one_script(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("several_fits.py", tmp_path)
    assert job.code == 0, job.output
    assert (tmp_path / "rank0").exists()
    assert (tmp_path / "rank1").exists()
    assert job.left == ()
