"""Lightning by its other name: pytorch_lightning."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_training_with_pytorch_lightning(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("other_namespace.py", tmp_path)
    assert job.code == 0, job.output
    assert "g2async: 2 ranks, 1 server, transport shm, gate none" in job.output
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(2))
    assert job.left == ()


def test_both_names_in_one_process_are_told_apart() -> None:
    code = (
        "import lightning.pytorch as pl, pytorch_lightning, lightning_g2;"
        "assert type(pl.Trainer(strategy='g2async', accelerator='cpu', devices=1).strategy).__name__"
        " == 'G2AsyncStrategy';"
        "pytorch_lightning.Trainer(strategy='g2async', accelerator='cpu', devices=1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1
    assert "a Trainer of pytorch_lightning: this process has imported lightning.pytorch as well" in done.stderr
