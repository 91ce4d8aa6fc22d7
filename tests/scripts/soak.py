"""A tiny model at the greatest rate: nothing grows, and every push that was sent was applied.

    OMP_NUM_THREADS=1 python tests/scripts/soak.py [seconds] [ranks]

Reads, of every rank and of the server, resident memory, open descriptors and mapped memory files ("segments") as often
as the time allows twenty readings, and compares the last with those after the first fifth of the time.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

import lightning_g2
from lightning_g2.cli.bench.memory_use import memory, servers_of

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
READINGS = 20
GROWTH_BYTES = 3 * 2**20
"""What an allocator may still take after the first fifth of the time; a leak of 100 bytes a push is more than that."""


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(4)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.sent = 0

    def training_step(self, batch, batch_idx):
        self.sent += 1
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def reading(pid: int) -> dict[str, int]:
    descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {"rss": memory(pid)["rss"], "descriptors": len(descriptors), "segments": maps.count("memfd:lightning_g2")}


class Soak(pl.Callback):
    def __init__(self) -> None:
        self.readings: dict[str, list[dict[str, int]]] = {}
        self.start = self.last = 0.0

    def on_train_start(self, trainer, module):
        self.start = self.last = time.monotonic()

    def on_train_batch_end(self, trainer, module, *args):
        now = time.monotonic()
        if now - self.last >= SECONDS / READINGS:
            self.last = now
            self.read(trainer.global_rank)
        trainer.should_stop = now - self.start >= SECONDS

    def read(self, rank):
        self.readings.setdefault(f"rank {rank}", []).append(reading(os.getpid()))
        for server in servers_of(os.getpid()):
            self.readings.setdefault("server", []).append(reading(server))

    def on_train_end(self, trainer, module):
        self.sent = int(trainer.strategy.reduce(torch.tensor(float(module.sent)), reduce_op="sum"))
        if trainer.is_global_zero:
            self.totals = trainer.strategy.totals()


def grown(readings: list[dict[str, int]]) -> dict[str, int]:
    settled = readings[len(readings) // 5 :]
    return {name: settled[-1][name] - settled[0][name] for name in settled[0]}


if __name__ == "__main__":
    soak, net = Soak(), Net()
    folder = tempfile.gettempdir()
    trainer = pl.Trainer(
        strategy=lightning_g2.G2AsyncStrategy(gate="none"), devices=RANKS, accelerator="cpu", max_epochs=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[soak], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(net, DataLoader(Endless(), batch_size=4))
    for name, readings in soak.readings.items():
        growth = grown(readings)
        print(f"{name}: {json.dumps(readings[-1])}; grown by {json.dumps(growth)}", flush=True)
        assert growth["rss"] <= GROWTH_BYTES, f"{name}: memory grows: {[r['rss'] for r in readings]}"
        assert growth["descriptors"] <= 0, f"{name}: descriptors grow: {[r['descriptors'] for r in readings]}"
        assert growth["segments"] <= 0, f"{name}: segments grow: {[r['segments'] for r in readings]}"
    if trainer.is_global_zero:
        applied = sum(one.pushes for one in soak.totals.values())
        print(f"pushes sent {soak.sent}, applied {applied}, {applied / SECONDS:.0f} a second", flush=True)
        assert soak.sent == applied
        assert not any(one.rejected for one in soak.totals.values())
