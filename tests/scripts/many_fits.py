"""Many fits in one process, one rank each; what the process holds after each of them."""

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.distributed import rpc
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2  # noqa: F401 - registers the strategy
from lightning_g2.transport import membership

OUT, FITS = Path(sys.argv[1]), int(sys.argv[2])


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 64)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def held() -> dict[str, int]:
    """What an operating system would have to give back."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "children": len(children),
        "segments": Path("/proc/self/maps").read_text().count("memfd:lightning_g2"),
        "shm": len(os.listdir("/dev/shm")),
        "stores": len(membership._stores),
        "rpc": int(rpc._is_current_rpc_agent_set()),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def settled(least: dict[str, int]) -> dict[str, int]:
    """What is held once all that is on its way out has gone, which ends no later than it has to: what leaks stays."""
    now, deadline = held(), time.monotonic() + 30.0
    while any(now[kind] > least[kind] for kind in now if kind != "rss") and time.monotonic() < deadline:
        time.sleep(0.05)
        now = held()
    return now


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(32, 256)), batch_size=4)
    facts = []
    for _ in range(FITS):
        trainer = pl.Trainer(
            strategy="g2async", devices=1, accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(), data)
        del trainer
        facts.append(settled(facts[1]) if len(facts) > 1 else held())
        (OUT / "held.json").write_text(json.dumps(facts))
