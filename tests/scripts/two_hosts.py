"""One node of a job of two: all ranks push all-ones gradients, and note what they see of servers, bytes and time."""

import json
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT, PUSHES, SIZE, TIMEOUT_S = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
RANKS, SHARES = 4, (3, 2, 2, 1)


class Ones(pl.LightningModule):
    """Four vectors of unequal sizes, so that there is something to balance."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.nn.ParameterList(torch.zeros(SIZE * share // sum(SHARES)) for share in SHARES)
        self.uniform = True
        self.step_s = []

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        self.start = time.perf_counter()
        return sum(vector.sum() for vector in self.vectors)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.uniform &= all(bool((vector == vector[0]).all()) for vector in self.vectors)

    def on_train_batch_end(self, *_: object) -> None:
        self.step_s.append(time.perf_counter() - self.start)
        if len(self.step_s) == 3:
            servers = {k: process.pid for k, process in self.trainer.strategy._session._processes.items()}
            Path(OUT, f"servers{self.global_rank}.json").write_text(json.dumps(servers))
            Path(OUT, f"training{self.global_rank}").touch()

    def validation_step(self, batch: object, batch_idx: int) -> None:
        self.values = sorted({float(value) for vector in self.vectors for value in vector[:: max(1, SIZE // 999)]})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Facts(pl.Callback):
    facts = {}  # noqa: RUF012 - there is one

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        transport = strategy._transport
        self.facts = {
            "transport": strategy._session.transports(strategy.node_rank),
            "server_bytes": [child.layout().size_bytes() for child in transport._children],
            "versions": [child.view().version for child in transport._children],
            "pushes": {rank: totals.pushes for rank, totals in strategy.totals().items()},
        }


if __name__ == "__main__":
    facts, module = Facts(), Ones()
    strategy = lightning_g2.G2AsyncStrategy(gate="none", timeout_s=TIMEOUT_S)
    trainer = pl.Trainer(
        strategy=strategy, num_nodes=2, devices=2, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[facts],
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.zeros(PUSHES, 1)), batch_size=1)
    trainer.fit(module, data, DataLoader(TensorDataset(torch.zeros(RANKS, 1)), batch_size=1))
    last = sorted({float(value) for vector in module.vectors for value in (vector.min(), vector.max())})
    known = {"uniform": module.uniform, "validated": module.values, "last": last, "step_s": module.step_s}
    Path(OUT, f"rank{trainer.global_rank}.json").write_text(json.dumps(facts.facts | known))
