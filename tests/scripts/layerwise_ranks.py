"""Ranks push all-ones gradients bucket by bucket: every tensor ends at exactly minus the number of pushes."""

import json
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT = Path(sys.argv[1])
RANKS, PUSHES, SIZE = 2, 40, 50_000
CASES = {
    "shm": {"transport": "shm", "pull": "fresh"},
    "rpc": {"transport": "rpc", "pull": "prefetch", "wire_dtype": "bf16"},
}


class Ones(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(5))
        self.uniform, self.mixed = True, 0

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        if self.global_rank == RANKS - 1:
            time.sleep(0.002)  # the ranks' pushes interleave in other ways each time
        return sum(weight.sum() for weight in self.weights)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.uniform &= all(bool((weight == weight[0]).all()) for weight in self.weights)
        self.mixed += len({weight[0].item() for weight in self.weights}) > 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Totals(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.totals = trainer.strategy.totals()
        self.version = trainer.strategy.view().version


if __name__ == "__main__":
    facts = {}
    for name, options in CASES.items():
        totals, module = Totals(), Ones()
        strategy = lightning_g2.G2AsyncStrategy(
            gate="none", push="layerwise", bucket_bytes=4 * SIZE + 64, dispatch="static", **options
        )
        trainer = pl.Trainer(
            strategy=strategy, devices=RANKS, accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[totals],
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(RANKS * PUSHES, 1)), batch_size=1))
        facts[name] = {
            "values": sorted({v for w in module.weights for v in (w.min().item(), w.max().item())}),
            "uniform": module.uniform, "mixed": module.mixed, "version": totals.version,
            "pushes": {r: t.pushes for r, t in totals.totals.items()},
            "samples": {r: t.samples for r, t in totals.totals.items()},
            "bytes": [sum(t.bytes_sent for t in totals.totals.values()),
                      sum(t.bytes_saved for t in totals.totals.values())],
        }  # fmt: skip
    (OUT / f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))
