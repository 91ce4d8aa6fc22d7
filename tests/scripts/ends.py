"""Ways in which a job of two ranks can end; several jobs at once, their ranks forked from here as a launcher would.

Prints nothing of its own; writes for each case the exit codes, what each rank wrote, and the seconds it took.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT, CASES = Path(sys.argv[1]), sys.argv[2:]
PARALLEL = 3
LIMIT_S = 240.0
SLEEP_S = 15.0
CALL_LIMIT_S = 5.0


class BoomError(Exception):
    """What a case raises."""


class Net(pl.LightningModule):
    """Does what the case ``act:hook:rank`` says, once, when the hook runs on the rank (or on ``all``)."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.act, self.hook, self.where = case.split(":")

    def reached(self, hook: str) -> None:
        if hook != self.hook or self.where not in ("all", os.environ["LOCAL_RANK"]):
            return
        if self.act == "raise":
            raise BoomError(f"in {hook}")
        if self.act == "exit":
            sys.exit(3)
        if self.act == "sleep":
            time.sleep(SLEEP_S)
        elif self.act in ("SIGTERM", "SIGINT", "SIGUSR1"):
            self.hook = ""
            signal.raise_signal(signal.Signals[self.act])

    def setup(self, stage):
        self.reached("setup")

    def configure_optimizers(self):
        self.reached("configure_optimizers")
        return torch.optim.AdamW(self.parameters())

    def on_train_start(self):
        self.reached("on_train_start")

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.reached("training_step")
        return self.layer(batch[0]).square().mean()

    def optimizer_step(self, *args, **kwargs):
        self.reached("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def validation_step(self, batch, batch_idx):
        self.reached("validation_step")
        self.log("v", self.layer(batch[0]).square().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        self.reached("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint):
        self.reached("on_save_checkpoint")

    def on_train_end(self):
        self.reached("on_train_end")

    def teardown(self, stage):
        self.reached("teardown")


def train(case: str, directory: Path) -> None:
    act, hook, _ = case.split(":")
    requeue = act == "SIGUSR1"
    # Either rank comes to its fourth batch, however fast the other is.
    strategy = lightning_g2.G2AsyncStrategy(dispatch="static", timeout_s=CALL_LIMIT_S if act == "sleep" else 1000.0)
    trainer = pl.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", logger=False,
        max_epochs=1 if hook in ("on_train_end", "teardown") or requeue else 50, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=directory,
        callbacks=[
            OnExceptionCheckpoint(directory), ModelCheckpoint(directory / "kept", save_last=True),
        ],
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)] if requeue else None,
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
    trainer.fit(Net(case), data, data)


def start(case: str) -> dict:
    """Fork the ranks of one job. In a rank this does not return."""
    directory = OUT / case.replace(":", "-")
    directory.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pids = {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            log = os.open(directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            name = str(rank)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "WORLD_SIZE": "2"}
            os.environ |= {"LOCAL_RANK": name, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            if case.startswith("SIGUSR1"):
                os.environ |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
                os.environ |= {"SLURM_PROCID": name, "SLURM_LOCALID": name, "SLURM_NODEID": "0"}
                os.environ |= {"SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "test", "PATH": str(OUT)}
            train(case, directory)
            sys.exit()
        pids[rank] = pid
    return {"case": case, "pids": pids, "port": port, "codes": {}, "start": time.monotonic(), "directory": directory}


def reap(job: dict) -> bool:
    """Note the ranks that have ended; whether all have."""
    overdue = time.monotonic() - job["start"] > LIMIT_S
    for rank, pid in job["pids"].items():
        if rank in job["codes"]:
            continue
        if overdue:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            job["codes"][rank] = "hung"
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            job["codes"][rank] = os.waitstatus_to_exitcode(status)
    return len(job["codes"]) == len(job["pids"])


def servers(port: str) -> list[int]:
    """Server processes of the job at a port: of all processes here they alone were started with it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MASTER_PORT={port}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def finish(job: dict) -> None:
    seconds = time.monotonic() - job["start"]
    limit = time.monotonic() + 60.0
    while (left := servers(job["port"])) and time.monotonic() < limit:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    facts = {
        "codes": [job["codes"][rank] for rank in sorted(job["codes"])], "seconds": seconds, "left": left,
        "logs": [(job["directory"] / f"rank{rank}.log").read_text() for rank in range(2)],
        "files": sorted(str(p.relative_to(job["directory"])) for p in job["directory"].rglob("*.ckpt")),
    }  # fmt: skip
    (OUT / f"{job['case'].replace(':', '-')}.json").write_text(json.dumps(facts))


waiting, running = list(CASES), []
while waiting or running:
    while waiting and len(running) < PARALLEL:
        running.append(start(waiting.pop(0)))
    for job in [job for job in running if reap(job)]:
        running.remove(job)
        finish(job)
    time.sleep(0.02)
