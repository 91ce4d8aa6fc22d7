"""Ranks train alike whoever starts them; whatever starts them learns why they fail."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2  # noqa: F401 - registers the strategies
from lightning_g2.errors import ConfigurationError

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "launchers.py")
LIMIT_S = 240.0  # several programs start at once, on a machine that may be busy
TORCHRUN = ("-m", "torch.distributed.run")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def check_notes(folder: Path, *, transports: tuple[str, str] = ("shm", "shm"), siblings: bool | None = None) -> None:
    notes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [(note["ranks"], note["transport"]) for note in notes] == [(2, transport) for transport in transports]
    if siblings is not None:
        assert (notes[0]["parent"] == notes[1]["parent"]) is siblings


def parallel(run_job: Callable, *jobs: tuple[list[str], dict[str, str]]) -> None:
    words = json.dumps([{"words": words, "env": env} for words, env in jobs])
    job = run_job("parallel.py", words, timeout_s=LIMIT_S)
    assert job.code == 0, job.output
    assert job.left == ()


@pytest.mark.timeout(2 * LIMIT_S)
def test_two_jobs_at_once_on_one_host(run_job: Callable, tmp_path: Path) -> None:
    """One by script on a port that the user has set, the other by fork."""
    for name in "ab":
        (tmp_path / name).mkdir()
    parallel(
        run_job,
        ([SCRIPT, str(tmp_path / "a")], {"MASTER_PORT": free_port()}),
        ([SCRIPT, str(tmp_path / "b"), "--strategy=g2async_fork"], {}),
    )
    check_notes(tmp_path / "a", siblings=False)
    check_notes(tmp_path / "b", siblings=True)


@pytest.mark.timeout(2 * LIMIT_S)
def test_two_fits_of_spawned_ranks(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("launchers.py", tmp_path, "--strategy=g2async_spawn", "--fits=2", timeout_s=LIMIT_S)
    assert job.code == 0, job.output
    check_notes(tmp_path, siblings=True)
    assert job.left == ()


@pytest.mark.timeout(2 * LIMIT_S)
def test_torchrun_with_two_nodes(run_job: Callable, tmp_path: Path) -> None:
    nodes = [
        *TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"
    ]  # fmt: skip
    job = [SCRIPT, str(tmp_path), "--devices=1", "--nodes=2"]
    parallel(run_job, *(([*nodes, f"--node-rank={node}", *job], {}) for node in range(2)))
    check_notes(tmp_path, transports=("shm+rpc", "rpc+shm"))


@pytest.mark.timeout(2 * LIMIT_S)
def test_ranks_that_torchrun_starts(run_job: Callable, tmp_path: Path) -> None:
    program = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    job = run_job("launchers.py", tmp_path, program=program, timeout_s=LIMIT_S)
    assert job.code == 0, job.output
    check_notes(tmp_path, siblings=True)
    assert job.left == ()


def slurm(task: int = 0, tasks: int = 2) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": f"1{free_port()[-4:]}", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0",
        "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task),
    }  # fmt: skip


@pytest.mark.timeout(2 * LIMIT_S)
def test_tasks_of_slurm(run_job: Callable, tmp_path: Path) -> None:
    tasks = [slurm(task) for task in range(2)]
    tasks[1]["SLURM_JOB_ID"] = tasks[0]["SLURM_JOB_ID"]
    parallel(run_job, *(([SCRIPT, str(tmp_path)], task) for task in tasks))
    check_notes(tmp_path)


@pytest.mark.timeout(2 * LIMIT_S)
def test_an_interactive_session(run_job: Callable, tmp_path: Path) -> None:
    for name in ("g2async", "g2async_fork"):
        (tmp_path / name).mkdir()
    job = run_job("notebook.py", tmp_path, timeout_s=LIMIT_S)
    assert job.code == 0, job.output
    for strategy in ("g2async", "g2async_spawn"):
        assert f"strategy='{strategy}' in an interactive session: its ranks are processes that run your" in job.output
    assert "use strategy='g2async_fork'" in job.output
    assert "start_method='fork' after a rank has trained in this process" in job.output
    check_notes(tmp_path / "g2async_fork", siblings=True)
    assert json.loads((tmp_path / "g2async" / "rank0.json").read_text())["ranks"] == 1


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("strategy", "case", "reason"),
    [
        ("g2async_spawn", "exception", "rank 1 of this node failed:\nTraceback"),
        ("g2async_spawn", "interrupt", "Detected KeyboardInterrupt"),
    ],
)
def test_a_failing_worker_ends_the_job_with_its_reason(
    strategy: str, case: str, reason: str, run_job: Callable, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ("launchers.py", tmp_path, f"--strategy={strategy}", f"--case={case}")
    job = run_job(*words, timeout_s=LIMIT_S, env={"TMPDIR": str(temporary)})
    assert job.code == 1, job.output
    assert re.search(reason, job.output), job.output
    if case == "exception":
        assert job.output.rstrip().endswith("ZeroDivisionError: boom at batch 3")
    checkpoint = torch.load(tmp_path / "exception.ckpt", weights_only=True)
    assert checkpoint["global_step"] > 0, "written by rank 0, which has trained, not by the process that waits for it"
    assert job.left == ()
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_worker_that_is_killed_is_dropped_and_the_others_go_on(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("launchers.py", tmp_path, "--strategy=g2async_fork", "--case=killed", timeout_s=LIMIT_S)
    assert job.code == 0, job.output
    assert re.search("rank 1 was dropped.*process [0-9]+ was killed by signal 9", job.output), job.output
    assert "`max_epochs=50` reached" in job.output
    assert job.left == ()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


ELASTIC = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "strategy", "error", "match"),
    [
        (slurm(tasks=1), "g2async", MisconfigurationException, "SLURMEnvironment says 1 ranks, devices=2 .* say 2"),
        ({**slurm(), "SLURM_NTASKS_PER_NODE": "3"}, "g2async", ValueError, "devices=2.*ntasks-per-node=3"),
        (ELASTIC, "g2async", ValueError, r"\(2 \* 1\) does not match the world size \(4\)"),
        ({"WORLD_SIZE": "4"}, "g2async", MisconfigurationException, "WORLD_SIZE says 4 ranks, devices=2 .* say 2"),
        ({"WORLD_SIZE": "4"}, "g2async_fork", MisconfigurationException, "WORLD_SIZE says 4 ranks, devices=2"),
        ({**ELASTIC, "WORLD_SIZE": "2"}, "g2async_spawn", ConfigurationError, "this process is a rank already"),
    ],
)
def test_other_numbers_of_ranks_than_the_trainer_counts_are_refused(
    variables: dict, strategy: str, error: type, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = pl.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1
    )
    with pytest.raises(error, match=match):
        trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2))
    monkeypatch.undo()
