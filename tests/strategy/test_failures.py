"""Whatever goes wrong, the job ends with reason and remedy, long before any limit, and leaves nothing behind."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, SCRIPTS

CASES = {
    "wrong-option": "gait='g2': not an option of g2async; the options of g2async are gate",
    "mps": "accelerator=MPSAccelerator: g2async runs on CPU and CUDA devices; pass accelerator=",
    "sync-batchnorm": "sync_batchnorm=True: SyncBatchNorm makes ranks wait",
    "lbfgs": "optimizer LBFGS: it evaluates its closure several times",
    "two-optimizers": "parameter 'layer.bias': belongs to optimizers 0 and 1",
    "on-train-end": "rank 1 failed, so the job ends: ZeroDivisionError: boom on the way out",
    "teardown": "lightning_g2: rank 1 of this node failed: process [0-9]+ ended with exit code 1",
    "unpicklable": "optimizer AdamW: cannot be sent to the server",
    "setup": "rank 1 of this node failed: process [0-9]+ ended with exit code 1 before training had started",
    "exception": "rank 1 failed, so the job ends: ZeroDivisionError: boom at batch 3",
    "validation": "rank 1 failed, so the job ends: ZeroDivisionError: boom in validation",
    "server-killed": "server 0 was lost.* server process [0-9]+ was killed by signal 9",
    "second-server-killed": "server 1 was lost.* server process [0-9]+ was killed by signal 9",
    "interrupt": "rank 0 failed, so the job ends: KeyboardInterrupt",
}

LIMIT_S = 900.0
"""Of all jobs together."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all of these jobs have left what became of them."""
    out = tmp_path_factory.mktemp("failures")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(SCRIPTS / "failure.py"), str(out), *CASES, "rank0-killed"]
    done = subprocess.run(
        command, env=environment, cwd=out, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def ended(jobs: Path, case: str) -> tuple[int, str]:
    """Exit code and output of a job that has left no process behind."""
    facts, output = json.loads((jobs / f"{case}.json").read_text()), (jobs / f"{case}.log").read_text()
    assert facts["left"] == [], output
    return facts["code"], output


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("case", CASES)
def test_a_failure_ends_the_job_with_its_reason(case: str, jobs: Path) -> None:
    code, output = ended(jobs, case)
    assert code not in (0, "hung"), output
    assert re.search(CASES[case], output), output


@pytest.mark.timeout(LIMIT_S + 20)
def test_when_rank_0_is_killed_nothing_is_left(jobs: Path) -> None:
    code, output = ended(jobs, "rank0-killed")
    assert code == -9
    assert "server 0 was lost" in output


def test_a_torch_without_rpc_is_named(run_job: Callable) -> None:
    job = run_job("failure.py", "rpc-missing")
    assert job.code not in (0, None), job.output
    assert "needs torch.distributed.rpc, which this build of torch does not have; install" in job.output
    assert job.left == ()


def test_a_taken_port_is_named(run_job: Callable) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = run_job("failure.py", "port", env={"MASTER_PORT": str(port)})
    assert job.code not in (0, None), job.output
    assert f"MASTER_PORT={port}: the port is taken by another process" in job.output
    assert job.left == ()
