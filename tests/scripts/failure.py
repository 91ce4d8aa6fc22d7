"""A job of two ranks that fails in the way named on the command line; or, given a folder first, one after another.

Their first ranks are then forked from here, which saves each of them the imports. Of each job the folder is given its
output and a file of what became of it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

if sys.argv[1] == "rpc-missing":
    del torch._C._rpc_init  # as in a build of torch without RPC

import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2
from tests.conftest import session_processes

CASE = sys.argv[1]
PARALLEL = 2
LIMIT_S = 240.0  # of one job; what has not ended by then hangs
SERVERS = {"server-killed": 1, "second-server-killed": 2}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.automatic_optimization = CASE != "two-optimizers"

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if CASE == "exception" and self.global_rank == 1 and batch_idx == 3:
            raise ZeroDivisionError("boom at batch 3")
        if CASE in SERVERS and self.global_rank == 0 and batch_idx == 5:
            os.kill(self.trainer.strategy._session._processes[SERVERS[CASE] - 1].pid, signal.SIGKILL)
        if CASE == "rank0-killed" and self.global_rank == 0 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "interrupt" and self.global_rank == 0 and batch_idx == 3:
            signal.raise_signal(signal.SIGINT)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if CASE == "validation" and self.global_rank == 1:
            raise ZeroDivisionError("boom in validation")
        self.log("v", self.layer(batch[0]).square().mean(), sync_dist=True)

    def setup(self, stage: str) -> None:
        if CASE == "setup" and self.global_rank == 1:
            raise ZeroDivisionError("boom in setup")

    def teardown(self, stage: str) -> None:
        if CASE == "teardown" and self.global_rank == 1:
            raise ZeroDivisionError("boom after training")

    def on_train_end(self) -> None:
        if CASE == "on-train-end" and self.global_rank == 1:
            raise ZeroDivisionError("boom on the way out")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if CASE == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        optimizer = torch.optim.AdamW(self.parameters())
        if CASE == "two-optimizers":
            return optimizer, torch.optim.SGD([self.layer.bias], lr=0.1)
        if CASE == "unpicklable":
            optimizer.lock = __import__("threading").Lock()
        return optimizer


def train() -> None:
    # Either rank comes to its fourth batch, however fast the other is; and limits are longer than a test waits, so that
    # a job that ends does so because its processes have learned of the failure.
    options = {"dispatch": "static", "timeout_s": 1000.0, "start_timeout_s": 1000.0}
    if CASE == "wrong-option":
        options["gait"] = "g2"
    if CASE == "second-server-killed":
        options["servers"] = 2
    # With an instance Lightning itself would refuse MPS, with advice that does not fit.
    strategy = "g2async" if CASE == "mps" else lightning_g2.G2AsyncStrategy(**options)
    accelerator = "mps" if CASE == "mps" else "cpu"
    if CASE == "mps":
        from lightning.pytorch.accelerators import MPSAccelerator

        MPSAccelerator.is_available = staticmethod(lambda: True)
        MPSAccelerator.parse_devices = staticmethod(lambda devices: [0])
    trainer = pl.Trainer(
        strategy=strategy, devices=1 if CASE == "mps" else 2, accelerator=accelerator, logger=False,
        max_epochs=1 if CASE in ("on-train-end", "teardown") else 50,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
        sync_batchnorm=CASE == "sync-batchnorm",
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
    trainer.fit(Net(), data, data)


def start(case: str, folder: Path) -> int:
    """Fork the first rank of a job. In that rank this does not return."""
    global CASE
    pid = os.fork()
    if pid == 0:
        CASE, sys.argv[1:] = case, [case]  # what the launcher starts the other rank with
        os.environ["G2_TEST_CASE"] = mark_of(case)
        log = os.open(folder / f"{case}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train()
        sys.exit()
    return pid


def mark_of(case: str) -> str:
    return f"{MAIN}-{case}-"


def finish(case: str, code: int | str, folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while (left := session_processes(f"G2_TEST_CASE={mark_of(case)}")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    facts = {"code": code, "left": left}
    (folder / f"{case}.json").write_text(json.dumps(facts))


def one_after_another(folder: Path, cases: list[str]) -> None:
    running: dict[int, tuple[str, float]] = {}
    while cases or running:
        while cases and len(running) < PARALLEL:
            case = cases.pop(0)
            running[start(case, folder)] = case, time.monotonic() + LIMIT_S
        for pid, (case, limit) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                finish(case, "hung", folder)
            elif ended:
                finish(case, os.waitstatus_to_exitcode(status), folder)
            else:
                continue
            del running[pid]
        time.sleep(0.02)


if __name__ == "__main__":
    MAIN = os.getpid()
    if len(sys.argv) > 2:
        one_after_another(Path(sys.argv[1]), sys.argv[2:])
    else:
        train()
