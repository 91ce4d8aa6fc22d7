"""Fits of two ranks on one host; rank 0 looks which sockets all processes of the job listen on while they train."""

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT = Path(sys.argv[1])


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.found = {}

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0 and not self.found:  # the other rank has joined, and cannot end without this one
            me = psutil.Process()
            self.found = {
                process.pid: {
                    "server": "lightning_g2.transport" in process.cmdline(),
                    "sockets": [[c.laddr.ip, c.laddr.port] for c in process.net_connections("inet") if not c.raddr],
                }
                for process in (me, *me.children(recursive=True))
            }
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    facts = {}
    for name, options in {"shm": {}, "rpc": {"transport": "rpc", "servers": 2}}.items():
        net = Net()
        trainer = pl.Trainer(
            strategy=lightning_g2.G2AsyncStrategy(dispatch="static", **options), devices=2, accelerator="cpu",
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(net, DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=2))
        facts[name] = {"processes": list(net.found.values()), "port": int(os.environ["MASTER_PORT"])}
    if trainer.is_global_zero:
        (OUT / "listening.json").write_text(json.dumps(facts))
